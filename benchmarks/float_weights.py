"""What it gains that float32 whose numbers are bfloat16, as those of most checkpoints, is kept as bfloat16 on a CPU.

`python -m benchmarks.float_weights` multiplies by the matrices of layers, kept so and kept as float32, in turn, and
prints the milliseconds of one pass over all layers and the ratio of each number of rows. Exits 1 when the two differ
by more than rounding, or when a single row is no faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from dflash_kernels.cpu_ops import HAS_CPU_OPS, PackedWeight
from load_tests.markdown import markdown_table

# Outputs and inputs of SmolLM2-135M's products, and its layers.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
NUM_LAYERS = 30
ROUNDING = 2e-6
HEADER = ("rows", "as bfloat16, ms", "as float32, ms", "ratio")


def weights(seed: int) -> tuple[PackedWeight, ...]:
    """Of a layer, as bfloat16, then the same as float32: each of these has one more row, which is no bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [(0.05 * torch.randn(shape, generator=generator)).bfloat16().float() for shape in SHAPES]
    floats = [torch.cat([each, torch.full((1, each.shape[1]), 0.1)]) for each in numbers]
    return tuple(map(PackedWeight, [*numbers, *floats]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128], help="1 4 8 16 32 128")
    parser.add_argument("--rounds", type=int, default=15, help="passes of each kind (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a product (%(default)s)")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="(%(default)s)")
    args = parser.parse_args(arguments)
    if not HAS_CPU_OPS:
        print("The operations in C++ are not built here: weights stay as torch has them.")
        return 0
    torch.set_num_threads(args.threads)
    layers = [weights(seed) for seed in range(args.layers)]
    count, table, failed = len(SHAPES), [], False
    for rows in args.rows:
        x = {inputs: torch.randn(rows, inputs) for _, inputs in SHAPES}
        times: tuple[list[float], list[float]] = [], []
        for _ in range(args.rounds):
            results = []
            for kind, taken in enumerate(times):
                started = time.perf_counter()
                results.append(
                    [each.product(x[each.shape[1]]) for of in layers for each in of[kind * count : (kind + 1) * count]]
                )
                taken.append(1000 * (time.perf_counter() - started))
            failed |= not all((a - b[:, :-1]).norm() < ROUNDING * a.norm() for a, b in zip(*results, strict=True))
        halves, floats = map(statistics.median, times)
        failed |= rows == 1 and halves > floats
        table.append([str(rows), f"{halves:.2f}", f"{floats:.2f}", f"{floats / halves:.2f}"])
    print(markdown_table(HEADER, table))
    if failed:
        print("Results differ by more than rounding, or a single row is no faster.", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

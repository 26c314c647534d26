"""Whether products of many wide rows, of which a core's cache holds few, take as long as those of as many numbers in
narrow rows on a CPU.

`python -m benchmarks.wide_rows` multiplies by the matrices of an MLP of 2,560 hidden numbers and 9,728 inner ones, as
Qwen3-4B has them: into the MLP, of narrow rows, and out of it, of wide ones. They have as many numbers, and take turns.
It prints milliseconds and the ratio for each kind of weight and number of rows. Exits 1 when wide rows take more than
1.6 times as long.
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

HIDDEN, INNER = 2560, 9728
MOST = 1.6
HEADER = ("weights", "rows", "narrow rows, ms", "wide rows, ms", "ratio")


def packed(kind: str, outputs: int, inputs: int) -> PackedWeight:
    """Random numbers in bfloat16, or random blocks of Q4_0 whose numbers are made in bfloat16."""
    generator = torch.Generator().manual_seed(outputs)
    if kind == "bfloat16":
        return PackedWeight((0.02 * torch.randn(outputs, inputs, generator=generator)).bfloat16())
    codes = torch.randint(0, 256, (outputs, inputs // 32, 18), dtype=torch.uint8, generator=generator)
    codes[..., :2] = torch.tensor([0.01]).half().view(torch.uint8)  # the step of each block
    found = PackedWeight.of_blocks([("Q4_0", codes.flatten(1))], torch.bfloat16)
    assert found is not None
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512], help="128 256 512")
    parser.add_argument("--rounds", type=int, default=9, help="products of each kind (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a product (%(default)s)")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="(%(default)s)")
    parser.add_argument("--inner", type=int, default=INNER, help="(%(default)s)")
    args = parser.parse_args(arguments)
    if not HAS_CPU_OPS:
        print("The operations in C++ are not built here: weights stay as torch has them.")
        return 0
    torch.set_num_threads(args.threads)
    table, failed = [], False
    for kind in ("bfloat16", "Q4_0"):
        both = packed(kind, args.inner, args.hidden), packed(kind, args.hidden, args.inner)
        for rows in args.rows:
            times: tuple[list[float], list[float]] = [], []
            x = [torch.randn(rows, weight.shape[1]).bfloat16() for weight in both]
            for _ in range(args.rounds):
                for weight, of, taken in zip(both, x, times, strict=True):
                    started = time.perf_counter()
                    weight.product(of)
                    taken.append(1000 * (time.perf_counter() - started))
            narrow, wide = map(statistics.median, times)
            failed |= wide > MOST * narrow
            table.append([kind, str(rows), f"{narrow:.2f}", f"{wide:.2f}", f"{wide / narrow:.2f}"])
    print(markdown_table(HEADER, table))
    if failed:
        print(f"Wide rows take more than {MOST:g} times as long.", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""How much faster oneDNN multiplies a step's matrices on a CPU than MKL, which torch takes by itself.

`python -m benchmarks.cpu_products` prints a table: the shapes of the demo target's products and of larger ones, with as
many rows as one, four and 32 decoding requests have and a chunk of a prompt. The weights of many layers take turns, so
that they do not stay in a core's cache, as in a model. Exits 1 if a product that `models/cpu_product.py` gives to
oneDNN is slower there by more than a quarter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from dflash_backend.models import cpu_product
from dflash_backend.models.cpu_product import CpuWeight
from load_tests.markdown import markdown_table

# Sizes of inputs and outputs.
DEMO = ((160, 256), (128, 160), (160, 768), (384, 160), (160, 1536))
LARGER = ((1024, 1024), (1024, 4096), (4096, 4096))
ROWS = (1, 16, 64, 512)
# Weights that take turns, as many as fit.
MAX_WEIGHTS, WEIGHT_BYTES = 12, 256 * 1024**2
MOST_SLOWER = 1.25


def median_s(call: Callable[[], object], rounds: int) -> float:
    """Of a call, in seconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measured(inputs: int, outputs: int, num_rows: int, rounds: int) -> tuple[float, float, bool]:
    """Seconds of a product by MKL and by oneDNN, in turn, and whether the engine gives it to oneDNN."""
    num_weights = max(1, min(MAX_WEIGHTS, WEIGHT_BYTES // (4 * inputs * outputs)))
    x = torch.randn(num_rows, inputs)
    weights = [torch.randn(outputs, inputs) for _ in range(num_weights)]
    packed = [CpuWeight(weight) for weight in weights]
    by_mkl: list[float] = []
    by_onednn: list[float] = []
    for _ in range(rounds):
        by_mkl.append(median_s(lambda: [F.linear(x, weight) for weight in weights], 3) / num_weights)
        by_onednn.append(median_s(lambda: [weight.product(x, None) for weight in packed], 3) / num_weights)
    return statistics.median(by_mkl), statistics.median(by_onednn), packed[0].pays(num_rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_products", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="times that each product is measured (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a product (default: 1, as rows have)")
    options = parser.parse_args(arguments)
    if not cpu_product.HAS_ONEDNN:
        print("This torch has no oneDNN: all products are torch's own.")
        return 0
    torch.set_num_threads(options.threads)
    table, missed = [], False
    with torch.inference_mode():
        for inputs, outputs in (*DEMO, *LARGER):
            for num_rows in ROWS:
                mkl, onednn, pays = measured(inputs, outputs, num_rows, options.rounds)
                missed |= pays and onednn > MOST_SLOWER * mkl
                taken = "oneDNN" if pays else "MKL"
                cells = [f"{inputs} x {outputs}", f"{num_rows}", f"{mkl * 1e6:.0f}", f"{onednn * 1e6:.0f}"]
                table.append([*cells, f"{mkl / onednn:.2f}", taken])
    print(markdown_table(["weight", "rows", "MKL, us", "oneDNN, us", "ratio", "taken"], table))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

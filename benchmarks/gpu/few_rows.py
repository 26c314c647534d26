"""Products of few rows by `few_row_linear`, beside torch's: which tile and how many parts, for each of a layer's.

A part of `card_report` that runs on request (`--only "few rows"`). Each tile is timed with each number of parts that
gives a GPU's multiprocessors enough programs, over as many weights as no cache holds; the fastest of each tile is timed
again beside torch's product, and that is what is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.floor import Ceilings, Work, matrix
from benchmarks.gpu.results import KernelRun
from benchmarks.gpu.timing import num_copies, scale, seconds_each
from dflash_kernels.few_row_linear import FewRowProducts, FewRowTile

SECTION = "few rows"
ROWS = {"cuda": (1, 8, 16, 32), "cpu": (1, 32)}
# Of each two kernels are compiled, for up to 16 and for 32 rows.
TILES = (
    FewRowTile(64, 128, 3),
    FewRowTile(64, 128, 4),
    FewRowTile(64, 128, 6),
    FewRowTile(64, 64, 6),
    FewRowTile(64, 256, 3),
    FewRowTile(128, 64, 4),
    FewRowTile(64, 128, 4, by_last=False),
    FewRowTile(64, 128, 3, by_descriptor=True),
    FewRowTile(64, 128, 4, by_descriptor=True),
    FewRowTile(64, 256, 3, by_descriptor=True),
    FewRowTile(128, 128, 3, by_descriptor=True),
)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Programs of a launch: fewer leave multiprocessors without one, more have little to read each.
FEWEST, MOST = 120, 1100
ROUGH, FINE = 4, 12
# How far numbers may be off, by the largest.
TOLERANCE = 2e-2

Problem = Callable[[str, str], None]
"""Is told what was not measured, and why."""


def measure(
    products: Sequence[tuple[str, int, int]], device: torch.device, dtype: torch.dtype, ceilings: Ceilings,
    problem: Problem,
) -> Iterator[KernelRun]:  # fmt: skip
    """Each product (name, outputs, inputs) at each number of rows."""
    most = max(outputs for _, outputs, _ in products)
    by_tile = [FewRowProducts(tile, most, device) for tile in TILES]
    for name, outputs, inputs in products:
        copies = num_copies(device, dtype.itemsize * outputs * inputs)
        weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(copies)]
        for rows in ROWS[scale(device)]:
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            found: list[tuple[float, str, list[partial[torch.Tensor]]]] = []
            for each in by_tile:
                try:
                    found += [_fastest(each, x, weights)]
                except (RuntimeError, ValueError, AssertionError) as error:
                    problem(f"{name}, {rows} rows by {each.tile.describe()}", str(error).partition("\n")[0])
            torchs = seconds_each(device, [partial(F.linear, x, weight) for weight in weights], FINE)
            others = {
                what: seconds_each(device, works, FINE) for _, what, works in sorted(found, key=lambda one: one[0])
            }
            work = matrix(inputs, outputs, rows, dtype.itemsize) + Work(dtype.itemsize * rows * (inputs + outputs))
            yield KernelRun(SECTION, f"{name}, {rows} rows", torchs, work.seconds(ceilings), others)
        del weights


def splits_of(tile: FewRowTile, outputs: int, inputs: int) -> list[int]:
    """Numbers of parts that are worth a try."""
    tiles, pieces = -(-outputs // tile.outputs), inputs // tile.inputs
    return [number for number in SPLITS if number <= pieces and FEWEST <= tiles * number <= MOST] or [1]


def _fastest(
    products: FewRowProducts, x: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[float, str, list[partial[torch.Tensor]]]:
    """Roughly how long a tile takes with the best number of parts, what that is, and the products. Raises RuntimeError
    where its numbers are wrong."""
    outputs, inputs = weights[0].shape
    expected, found = F.linear(x, weights[0]).float(), []
    for splits in splits_of(products.tile, outputs, inputs):
        # Twice: the second launch finds the counters as the first has left them.
        for _ in range(2):
            error = (products(x, weights[0], splits).float() - expected).abs().amax() / expected.abs().amax()
        if not float(error) <= TOLERANCE:
            raise RuntimeError(f"its numbers are off by {float(error):.2g} of the largest with {splits} parts")
        works = [partial(products, x, weight, splits) for weight in weights]
        found.append((seconds_each(x.device, works, ROUGH), f"{products.tile.describe()}, {splits} parts", works))
    return min(found, key=lambda one: one[0])

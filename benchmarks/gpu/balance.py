"""How evenly the attention of a captured step is shared out when one row is much longer than the others.

    python -m benchmarks.gpu.balance

prints, for one row of 32k positions among rows of 1k, the positions of the longest program and the mean of those that
the device runs at a time: for splits chosen from the bounds of the rows alone, which are the same for all rows of a
captured step, and for the schedule that the device makes from the real lengths. It is arithmetic over the launches that
are planned for the heads of Qwen3-8B and 132 multiprocessors, and needs no GPU. It measures no time.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from dflash_kernels.attention_schedule import share_reference
from dflash_kernels.paged_attention_launch import HOPPER, HeadShape, Tiling, plan_launches
from load_tests.markdown import markdown_table

SHAPE = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)
NUM_SMS, WIDTH, MAX_LEN = 132, 16, 40960
BATCHES = (4, 8, 16, 32, 64)
# Of splits that are chosen from bounds: no more than this, no more than fill the device so often, and in positions what
# a program costs besides its own and what their merge does.
MAX_SPLITS, MAX_WAVES, PROGRAM_OVERHEAD, MERGE_OVERHEAD = 128, 4, 64, 64


def splits_from_bounds(batch: int, capacity: int, min_chunk: int) -> int:
    """Pieces of every row, chosen as if all were as long as they can be: those that take the least time in waves."""
    num_programs = batch * SHAPE.num_kv_heads
    most = max(min(MAX_LEN // min_chunk, MAX_SPLITS, MAX_WAVES * capacity // num_programs), 1)
    splits = np.arange(1, most + 1)
    waves = -(-num_programs * splits // capacity)
    time = waves * (MAX_LEN / splits + PROGRAM_OVERHEAD) + np.where(splits > 1, MERGE_OVERHEAD, 0)
    return int(np.argmin(time)) + 1


def longest_piece(lengths: np.ndarray, splits: int, tiling: Tiling) -> int:
    """Positions of the longest program when every row has as many pieces."""
    share = -(-lengths // splits)
    pieces = np.maximum(-(-share // tiling.block_n) * tiling.block_n, tiling.min_chunk)
    return int(np.minimum(pieces, lengths).max())


def balance(lengths: np.ndarray) -> tuple[float, int, int, int]:
    """The mean, the splits chosen from bounds and the longest program with them, and the longest worker."""
    batch = len(lengths)
    bounds = np.full(batch, WIDTH), np.full(batch, MAX_LEN)
    (launch,) = plan_launches(*bounds, SHAPE, True, None, HOPPER, max_overestimate=MAX_LEN)
    tiling = launch.tiling
    capacity = NUM_SMS * tiling.programs_per_sm
    mean = int(lengths.sum()) * SHAPE.num_kv_heads / capacity
    splits = splits_from_bounds(batch, capacity, tiling.min_chunk)
    units = -(-lengths // tiling.block_n)
    share = share_reference(units, launch.num_workers, tiling.min_chunk // tiling.block_n)
    return mean, splits, longest_piece(lengths, splits, tiling), share * tiling.block_n


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=32768, help="positions of the long row (%(default)s)")
    parser.add_argument("--short", type=int, default=1024, help="positions of the others (%(default)s)")
    args = parser.parse_args(arguments)
    rows = []
    for batch in BATCHES:
        lengths = np.array([args.long] + [args.short] * (batch - 1))
        mean, splits, before, after = balance(lengths)
        cells = [str(batch), f"{mean:.0f}", str(splits), str(before), f"{before / mean:.1f}", str(after)]
        rows.append([*cells, f"{after / mean:.2f}"])
    header = ["rows", "mean", "splits from bounds", "longest with them", "to the mean", "longest worker", "to the mean"]
    print(markdown_table(header, rows, "r" * len(header)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How many bytes of KV the attention of a step asks for, with and without a shared prefix read once.

    python -m benchmarks.gpu.shared_prefix

prints, for rows behind one prefix, the bytes of KV and of partial results that the programs of one layer read and
write, with the heads of Qwen3-8B in bfloat16, and whether the scheduler shares there. A program that attends a tile of
a group's queries reads the prefix for all of them, so with 15 drafts, where two rows fill a tile, half of it is saved.
It is arithmetic over tiles, needs no GPU and measures no time. Programs that read the same blocks at the same time may
find them in the cache of the device, in either form; that is not counted.
"""

from __future__ import annotations

import sys

from dflash_backend.attention.cascade import NUM_ACCESSES, PARTIAL_ITEMSIZE, CascadeCost
from dflash_backend.core.plan import MIN_SHARING_ROWS
from dflash_backend.engine.build import MIN_SHARED_POSITIONS
from dflash_kernels.paged_attention_launch import HeadShape
from load_tests.markdown import markdown_table

SHAPE = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)
OWN = 500
PREFIXES, ROWS, DRAFTS = (512, 1024, 4096, 16384), (4, 8, 32, 64), (0, 3, 15)


def bytes_asked_for(num_rows: int, num_drafts: int, prefix: int, own: int) -> tuple[int, int, int]:
    """Of one layer: KV with each row by itself; KV with the prefix read once for each tile; partial results then."""
    position = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * SHAPE.itemsize
    num_queries = num_rows * (1 + num_drafts)
    tiles = -(-num_queries // _cost().queries_per_tile)
    partial = num_queries * SHAPE.num_heads * SHAPE.head_dim * PARTIAL_ITEMSIZE * NUM_ACCESSES
    return num_rows * (prefix + own) * position, (tiles * prefix + num_rows * own) * position, partial


def shares(num_rows: int, num_drafts: int, prefix: int) -> bool:
    """Whether the scheduler would, as `core.kv.cascade` decides."""
    before, after, partial = bytes_asked_for(num_rows, num_drafts, prefix, own=0)
    return num_rows >= MIN_SHARING_ROWS and prefix >= MIN_SHARED_POSITIONS and before - after > 2 * partial


def _cost() -> CascadeCost:
    return CascadeCost.of(SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim, SHAPE.itemsize)


def main() -> int:
    """Entry point."""
    rows = []
    for prefix in PREFIXES:
        for num_rows in ROWS:
            for num_drafts in DRAFTS:
                before, after, partial = bytes_asked_for(num_rows, num_drafts, prefix, OWN)
                cells = [
                    str(prefix),
                    str(num_rows),
                    str(num_drafts),
                    *(f"{n / 1e6:.1f}" for n in (before, after, partial)),
                ]
                pays = "yes" if shares(num_rows, num_drafts, prefix) else "no"
                rows.append([*cells, f"{before / (after + partial):.2f}", pays])
    header = [
        "prefix",
        "rows",
        "drafts",
        "MB each by itself",
        "MB shared",
        "MB partial",
        "times fewer",
        "shared",
    ]
    print(f"One layer, {OWN} positions of each row's own:\n")
    print(markdown_table(header, rows, "r" * len(header)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

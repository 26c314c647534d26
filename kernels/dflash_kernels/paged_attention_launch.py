"""How paged attention is split into programs: tiles of queries, splits of the context. Pure host arithmetic.

Called once for each forward pass and shape of heads, with the *bounds* that the host has of the rows' lengths, so that
a captured graph stays right for every length below them: the kernel reads the real ones on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_SPLITS = 128
# What a program costs besides its share of the context, and a merge of the splits' results, in context positions.
PROGRAM_OVERHEAD = 64
MERGE_OVERHEAD = 64
# Contexts are split into no more programs than fill the device this many times: their partial results stay in its
# L2 cache.
MAX_SPLIT_WAVES = 4


@dataclass(frozen=True)
class HeadShape:
    """What of a layer decides its tiling. `itemsize`: bytes of an element of the queries and of KV."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Tiling:
    """A program's share: `block_m` pairs of query and head, `block_n` context positions at a time.

    programs_per_sm: how many such programs the registers and shared memory of a Hopper multiprocessor hold, or fewer
    where fewer keep its memory pipe full. min_chunk: the fewest positions of a split; below it, writing and merging
    the partial results costs as much as the KV.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_chunk: int = 128


@dataclass(frozen=True)
class Launch:
    """One launch over `num_tiles` tiles of queries, for every KV head and split.

    tiles: int32 `[3, num_tiles]`: row of each tile, its first query and one
    past its last, as far as the row has them; None where every row has up to `query_len` queries and so as many tiles,
    in the order of the rows.
    """

    tiling: Tiling
    num_tiles: int
    num_splits: int
    query_len: int
    tiles: np.ndarray | None


def max_block_m(shape: HeadShape) -> int:
    """The tallest tile whose accumulator of `[block_m, head_dim]` float32 stays in registers."""
    tallest = 128 if shape.head_dim <= 128 else 64
    if shape.itemsize > 2:  # products of float32 run without tensor cores, from registers
        tallest = 16
    return max(tallest, power_of_two(shape.group))


def tiling_of(shape: HeadShape, num_queries: int) -> Tiling:
    """The tiling for rows of up to `num_queries` queries.

    K and V of `block_n` positions are 32 KiB for 16-bit heads of a power of two. While a program works on one such
    piece the next is on its way; Triton needs three stages for that, five for two pieces, since block numbers are
    loaded before K and V. Where the accumulator leaves a multiprocessor no registers for a second program, the first
    has two pieces on their way instead.
    """
    lines, tallest = num_queries * shape.group, max_block_m(shape)
    # Few sizes, since Triton compiles a kernel for each.
    block_m = next((size for size in (16, 64) if lines <= size <= tallest), tallest)
    if shape.itemsize > 2:
        return Tiling(block_m, 32 if shape.head_dim <= 128 else 16, num_warps=8, num_stages=2, programs_per_sm=1)
    block_n = 128 if shape.head_dim <= 64 else 64 if shape.head_dim <= 128 else 32
    if block_m > 64 or shape.head_dim > 128:
        return Tiling(block_m, block_n, num_warps=8, num_stages=5, programs_per_sm=1)
    return Tiling(block_m, block_n, num_warps=4, num_stages=3 if block_m == 64 else 5, programs_per_sm=2)


def plan_launches(
    query_lens: np.ndarray, seq_lens: np.ndarray, shape: HeadShape, causal: bool, window: int | None, num_sms: int
) -> list[Launch]:
    """Launches that cover every query of every row. query_lens, seq_lens: upper bounds, int64 `[num_rows]`.
    causal, window: what a query sees, as in `paged_attention_reference`.

    Rows of one tile (decode rows) run apart from longer ones: they want many splits, and lower tiles.
    """
    tallest = max_block_m(shape) // shape.group
    short = query_lens <= tallest
    launches = []
    for rows in (np.flatnonzero(short & (query_lens > 0)), np.flatnonzero(~short)):
        if len(rows) == 0:
            continue
        longest = int(query_lens[rows].max())
        tiling = tiling_of(shape, longest)
        per_tile = tiling.block_m // shape.group
        is_uniform = bool((query_lens == longest).all())
        tiles = None if is_uniform else tile_table(rows, query_lens[rows], per_tile)
        num_tiles = len(rows) * -(-longest // per_tile) if tiles is None else tiles.shape[1]
        span = int(seq_lens[rows].max())
        if window is not None:
            span = min(span, (window if causal else 2 * window - 1) + per_tile - 1)
        num_splits = choose_splits(
            num_tiles * shape.num_kv_heads, span, num_sms * tiling.programs_per_sm, tiling.min_chunk
        )
        launches.append(Launch(tiling, num_tiles, num_splits, longest, tiles))
    return launches


def launch_variants(query_lens: np.ndarray, shape: HeadShape) -> list[Launch]:
    """A launch of each kind that `plan_launches` can make for rows of up to these queries, int64 `[num_rows]`: one
    compiled kernel serves all launches of a kind. The launches themselves are over one tile of the first row.

    Rows of one bound are taken for decode rows or draft blocks, which always come alike.
    """
    longest = int(query_lens.max())
    is_uniform = bool((query_lens == longest).all())
    lengths = [longest] if is_uniform else range(1, longest + 1)
    tile = np.array([[0], [0], [1]], dtype=np.int32)
    return [
        Launch(tiling, num_tiles=1, num_splits=num_splits, query_len=1, tiles=tiles)
        for tiling in dict.fromkeys(tiling_of(shape, length) for length in lengths)
        for num_splits in (1, 2)
        for tiles in ([None] if is_uniform else [None, tile])
    ]


def tile_table(rows: np.ndarray, query_lens: np.ndarray, per_tile: int) -> np.ndarray:
    """int32 `[3, num_tiles]`: row of each tile, its first query and one past its last."""
    counts = -(-query_lens // per_tile)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * per_tile
    last = np.minimum(first + per_tile, np.repeat(query_lens, counts))
    return np.stack([np.repeat(rows, counts), first, last]).astype(np.int32)


def choose_splits(num_programs: int, span: int, capacity: int, min_chunk: int) -> int:
    """Into how many pieces of at least `min_chunk` positions to split contexts of up to `span`.

    There are `num_programs` programs for each piece, and `capacity` run at a time: as many waves as that takes, each
    as long as one piece. The fewest pieces with the least time win.
    """
    most = max(min(span // min_chunk, MAX_SPLITS, MAX_SPLIT_WAVES * capacity // num_programs), 1)
    splits = np.arange(1, most + 1)
    waves = -(-num_programs * splits // capacity)
    time = waves * (span / splits + PROGRAM_OVERHEAD) + np.where(splits > 1, MERGE_OVERHEAD, 0)
    return int(np.argmin(time)) + 1


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`, 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()

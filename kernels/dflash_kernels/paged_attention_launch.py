"""How paged attention is split into programs: tiles of queries, and workers that share contexts. Host arithmetic.

Called once for each forward pass and shape of heads, with the *bounds* that the host has of the rows' lengths, so that
a captured graph stays right for every length below them: the kernels read the real ones on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A program for each tile keeps a device as busy as workers do where no tile takes more than this part of what each of
# the programs that run at a time has to do on average.
SMALL_PART = 1 / 4
# Shared memory that a program may have on Hopper; on the smallest of the other GPUs that these kernels are for, 99 KiB.
HOPPER_SHARED_BYTES = 227 << 10
# For each element of a head, beside queries, K and V, by what the compiler says of tiles of 8 warps.
SCRATCH_BYTES = 17


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
    where fewer keep its memory pipe full. min_chunk: the fewest positions of a piece of a context; below it, writing
    and merging the partial results costs as much as the KV.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_chunk: int = 128


@dataclass(frozen=True)
class Launch:
    """One launch over `num_tiles` tiles of queries, for every KV head.

    num_workers: programs for each KV head that share all contexts of the launch; 0 for a program for each tile.
    tiles: int32 `[3, num_tiles]`: row of each tile, its first query and one past its last, as far as the row has them;
    None where every row has up to `query_len` queries and so as many tiles, in the order of the rows.
    """

    tiling: Tiling
    num_tiles: int
    num_workers: int
    query_len: int
    tiles: np.ndarray | None


def max_block_m(shape: HeadShape) -> int:
    """The tallest tile whose accumulator of `[block_m, head_dim]` float32 stays in registers."""
    tallest = 128 if shape.head_dim <= 128 else 64 if shape.head_dim <= 256 else 32
    if shape.itemsize > 2:  # products of float32 run without tensor cores, from registers
        tallest = 16
    return max(tallest, power_of_two(shape.group))


def tiling_of(shape: HeadShape, num_queries: int, shared_bytes: int = HOPPER_SHARED_BYTES) -> Tiling:
    """The tiling for rows of up to `num_queries` queries. shared_bytes: shared memory that a program may have.

    K and V of `block_n` positions are 32 KiB for 16-bit heads of a power of two. While a program works on one such
    piece the next is on its way; Triton needs three stages for that, five for two pieces, since block numbers are
    loaded before K and V. Where the accumulator leaves a multiprocessor no registers for a second program, the first
    has two pieces on their way instead, if they fit beside the queries.
    """
    lines, tallest = num_queries * shape.group, max_block_m(shape)
    # Few sizes, since Triton compiles a kernel for each.
    block_m = next((size for size in (16, 64) if lines <= size <= tallest), tallest)
    if shape.itemsize > 2:
        return Tiling(block_m, 32 if shape.head_dim <= 128 else 16, num_warps=8, num_stages=2, programs_per_sm=1)
    block_n = 128 if shape.head_dim <= 64 else 64 if shape.head_dim <= 128 else 32 if shape.head_dim <= 256 else 16
    if block_m > 64 or shape.head_dim > 128:
        # Two pieces of K and V, the queries, and what reductions pass between warps.
        needed = (block_m + 4 * block_n) * shape.head_dim * shape.itemsize + SCRATCH_BYTES * shape.head_dim
        num_stages = 5 if needed <= shared_bytes else 3
        return Tiling(block_m, block_n, num_warps=8, num_stages=num_stages, programs_per_sm=1)
    return Tiling(block_m, block_n, num_warps=4, num_stages=3 if block_m == 64 else 5, programs_per_sm=2)


def plan_launches(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    shape: HeadShape,
    causal: bool,
    window: int | None,
    num_sms: int,
    max_overestimate: int = 0,
    shared_bytes: int = HOPPER_SHARED_BYTES,
) -> list[Launch]:
    """Launches that cover every query of every row. query_lens, seq_lens: upper bounds, int64 `[num_rows]`.
    causal, window: what a query sees, as in `paged_attention_reference`. max_overestimate: how far the bounds of
    seq_lens may be too high. shared_bytes: as in `tiling_of`.

    Rows of one tile (decode rows) run apart from longer ones, with lower tiles and always with workers: how long they
    are is known on the device alone.
    """
    tallest = max_block_m(shape) // shape.group
    short = query_lens <= tallest
    launches = []
    for rows in (np.flatnonzero(short & (query_lens > 0)), np.flatnonzero(~short)):
        if len(rows) == 0:
            continue
        longest = int(query_lens[rows].max())
        tiling = tiling_of(shape, longest, shared_bytes)
        per_tile = tiling.block_m // shape.group
        is_uniform = bool((query_lens == longest).all())
        tiles = None if is_uniform else tile_table(rows, query_lens[rows], per_tile)
        counts = -(-query_lens[rows] // per_tile)
        spans = seq_lens[rows]
        if window is not None:
            spans = np.minimum(spans, (window if causal else 2 * window - 1) + per_tile - 1)
        varies = bool(short[rows[0]]) or 2 * max_overestimate > int(spans.max())
        num_workers = choose_workers(counts, spans, tiling, shape.num_kv_heads, num_sms, varies)
        launches.append(Launch(tiling, int(counts.sum()), num_workers, longest, tiles))
    return launches


def choose_workers(
    counts: np.ndarray, spans: np.ndarray, tiling: Tiling, num_kv_heads: int, num_sms: int, varies: bool
) -> int:
    """The workers of a launch for each KV head, 0 where a program for each tile does as well.

    counts, spans: tiles of each row, and positions that each of them sees at most: int64 `[n]`. varies: always with
    workers, since the real spans may be much below these. There are as many workers as the device runs at a time, or
    fewer where pieces of at least `min_chunk` positions are fewer.
    """
    capacity = num_sms * tiling.programs_per_sm
    most = int((counts * -(-spans // tiling.min_chunk)).sum())
    longest, mean = int(spans.max()), int((counts * spans).sum()) * num_kv_heads / capacity
    if not varies and (longest <= tiling.min_chunk or longest <= SMALL_PART * mean):
        return 0
    return max(min(capacity // num_kv_heads, most), 1)


def launch_variants(query_lens: np.ndarray, shape: HeadShape, shared_bytes: int = HOPPER_SHARED_BYTES) -> list[Launch]:
    """A launch of each kind that `plan_launches` can make for rows of up to these queries, int64 `[num_rows]`: one
    compiled kernel serves all launches of a kind. The launches themselves are over one tile of the first row.

    Rows of one bound are taken for decode rows or draft blocks, which always come alike.
    """
    longest = int(query_lens.max())
    is_uniform = bool((query_lens == longest).all())
    lengths = [longest] if is_uniform else range(1, longest + 1)
    tile = np.array([[0], [0], [1]], dtype=np.int32)
    tallest = max_block_m(shape) // shape.group
    kinds = dict.fromkeys((tiling_of(shape, length, shared_bytes), length <= tallest) for length in lengths)
    # Merged as many tiles are, and as few.
    counts = dict.fromkeys((tiling, num_workers) for tiling, _ in kinds for num_workers in (1, 2))
    return [
        Launch(tiling, num_tiles=1, num_workers=num_workers, query_len=1, tiles=tiles)
        for tiling, num_workers in [*counts, *((tiling, 0) for tiling, is_short in kinds if not is_short)]
        for tiles in ([None] if is_uniform else [None, tile])
    ]


def tile_table(rows: np.ndarray, query_lens: np.ndarray, per_tile: int) -> np.ndarray:
    """int32 `[3, num_tiles]`: row of each tile, its first query and one past its last."""
    counts = -(-query_lens // per_tile)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * per_tile
    last = np.minimum(first + per_tile, np.repeat(query_lens, counts))
    return np.stack([np.repeat(rows, counts), first, last]).astype(np.int32)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`, 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()

"""How paged attention is split into programs: tiles of queries, and workers that share contexts. Host arithmetic.

Called once for each forward pass and shape of heads, with the *bounds* that the host has of the rows' lengths, so that
a captured graph stays right for every length below them: the kernels read the real ones on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

# A program for each tile keeps a device as busy as workers do where no tile takes more than this part of what each of
# the programs that run at a time has to do on average.
SMALL_PART = 1 / 4
# Workers for each tile from which on tiles are few to a merge.
FEW_TILES_FROM = 8
# Shared memory that the driver keeps of each program's.
RESERVED_BYTES = 1 << 10
# For each element of a head, beside queries, K and V, by what the compiler says of tiles of 8 warps.
SCRATCH_BYTES = 17


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides tilings and launches. capability: ten times the major number and the minor one. num_sms:
    its multiprocessors. shared_bytes, sm_shared_bytes: shared memory that a program may have, and of a multiprocessor.
    """

    capability: int
    num_sms: int
    shared_bytes: int
    sm_shared_bytes: int

    @property
    def has_async_products(self) -> bool:
        """Whether a product of tensor cores runs beside the instructions behind it: wgmma of Hopper, tcgen05 of data
        centres' Blackwell; not the mma of others, whose operands fill registers besides."""
        return 90 <= self.capability < 120


HOPPER = Gpu(capability=90, num_sms=132, shared_bytes=227 << 10, sm_shared_bytes=228 << 10)


@dataclass(frozen=True)
class HeadShape:
    """What of a layer decides its tiling. `itemsize`: bytes of an element of the queries, and of KV unless `fp8_kv`,
    whose bytes become numbers in registers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    fp8_kv: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Tiling:
    """A program's share: `block_m` pairs of query and head, `block_n` context positions at a time.

    programs_per_sm: how many such programs a multiprocessor holds, or fewer where fewer keep its memory pipe full.
    min_chunk: the fewest positions of a piece of a context; below it, writing and merging the partial results costs as
    much as the KV. loop: over the blocks of positions, "masked", where each is compared with what the queries see; for
    rows of several tiles, whose time goes with arithmetic, "split", where only those are that some query of the tile
    does not see, or "overlapped", where products run beside the next softmax besides.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_chunk: int = 128
    loop: str = "masked"


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


def tiling_of(shape: HeadShape, num_queries: int, gpu: Gpu = HOPPER) -> Tiling:
    """The tiling for rows of up to `num_queries` queries.

    While a program works on one piece of K and V the next is on its way; Triton needs three stages for that, five for
    two pieces, since block numbers are loaded before K and V. Where the accumulator leaves a multiprocessor no
    registers for a second program, the first has two pieces on their way instead, if they fit beside the queries. That
    no tiling spills registers is what `benchmarks.gpu.compile_table` shows.
    """
    lines, tallest = num_queries * shape.group, max_block_m(shape)
    # Few sizes, since Triton compiles a kernel for each.
    block_m = next((size for size in (16, 64) if lines <= size <= tallest), tallest)
    if shape.itemsize > 2:
        return Tiling(block_m, 32 if shape.head_dim <= 128 else 16, num_warps=8, num_stages=2, programs_per_sm=1)
    is_long, wide = num_queries > tallest // shape.group, block_m > 64 or shape.head_dim > 128
    # On a Hopper the assembler serialises the products of both others, so they take longer than what they save: 8,192
    # tokens in 1,679, 1,703 and 2,015 us (H200).
    is_serialised = 90 <= gpu.capability < 100 and shape.head_dim <= 128 and not shape.fp8_kv
    has_masked = not is_long or is_serialised
    loop = "masked" if has_masked else "overlapped" if gpu.has_async_products else "split"
    num_stages = 3 if not wide and block_m == 64 and gpu.has_async_products else 5
    tiling = Tiling(block_m, _block_n(shape, block_m, is_long, gpu), 8 if wide else 4, num_stages, 1, loop=loop)
    if shape.fp8_kv and block_m > 16:
        tiling = _over_fp8_kv(tiling, shape, gpu)
    if _needed_bytes(tiling, shape) > gpu.shared_bytes:
        tiling = replace(tiling, num_stages=3)
    held = gpu.sm_shared_bytes // (_needed_bytes(tiling, shape) + RESERVED_BYTES)
    return tiling if wide else replace(tiling, programs_per_sm=max(1, min(2, held)))


def _block_n(shape: HeadShape, block_m: int, is_long: bool, gpu: Gpu) -> int:
    """Positions at a time: K and V of them are 32 KiB for heads of a power of two, where registers suffice."""
    block_n = 128 if shape.head_dim <= 64 else 64 if shape.head_dim <= 128 else 32 if shape.head_dim <= 256 else 16
    if not gpu.has_async_products and block_m > 16 and shape.head_dim <= 128:
        return 64 if shape.head_dim <= 64 else 32
    # The accumulator of a Blackwell comes and goes through registers.
    if 100 <= gpu.capability < 120 and 128 < shape.head_dim <= 256 and block_m > 16 and not is_long:
        return 16
    return block_n


def _over_fp8_kv(tiling: Tiling, shape: HeadShape, gpu: Gpu) -> Tiling:
    """The tiling over KV in FP8. Where operands of products fill registers, they hold half of the positions and one
    piece on its way, so that nothing spills; of a Hopper's wide heads those of decode rows do too."""
    if not gpu.has_async_products:
        return replace(tiling, block_n=max(16, tiling.block_n // 2), num_stages=3)
    if gpu.capability < 100 and 128 < shape.head_dim <= 256 and tiling.loop == "masked":
        return replace(tiling, block_n=16, num_warps=4)
    return tiling


def _needed_bytes(tiling: Tiling, shape: HeadShape) -> int:
    """Shared memory of a program: the queries, pieces of K and V, and what reductions pass between warps."""
    num_pieces = 2 if tiling.num_stages >= 5 else 1
    kept = (tiling.block_m + 2 * num_pieces * tiling.block_n) * shape.head_dim * shape.itemsize
    return kept + SCRATCH_BYTES * shape.head_dim


def plan_launches(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    shape: HeadShape,
    causal: bool,
    window: int | None,
    gpu: Gpu,
    max_overestimate: int = 0,
) -> list[Launch]:
    """Launches that cover every query of every row. query_lens, seq_lens: upper bounds, int64 `[num_rows]`.
    causal, window: what a query sees, as in `paged_attention_reference`. max_overestimate: how far the bounds of
    seq_lens may be too high.

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
        tiling = tiling_of(shape, longest, gpu)
        per_tile = tiling.block_m // shape.group
        is_uniform = bool((query_lens == longest).all())
        tiles = None if is_uniform else tile_table(rows, query_lens[rows], per_tile, seq_lens[rows])
        counts = -(-query_lens[rows] // per_tile)
        spans = seq_lens[rows]
        if window is not None:
            spans = np.minimum(spans, (window if causal else 2 * window - 1) + per_tile - 1)
        varies = bool(short[rows[0]]) or 2 * max_overestimate > int(spans.max())
        num_workers = choose_workers(counts, spans, tiling, shape.num_kv_heads, gpu.num_sms, varies)
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
    fills = int(counts.sum()) * num_kv_heads >= capacity
    if not varies and (longest <= tiling.min_chunk or longest <= SMALL_PART * mean or fills):
        return 0
    return max(min(capacity // num_kv_heads, most), 1)


def launch_variants(query_lens: np.ndarray, shape: HeadShape, gpu: Gpu = HOPPER) -> list[Launch]:
    """A launch of each kind that `plan_launches` can make for rows of up to these queries, int64 `[num_rows]`: one
    compiled kernel serves all launches of a kind. The launches themselves are over one tile of the first row.

    Rows of one bound are taken for decode rows or draft blocks, which always come alike.
    """
    longest = int(query_lens.max())
    is_uniform = bool((query_lens == longest).all())
    lengths = [longest] if is_uniform else range(1, longest + 1)
    tile = np.array([[0], [0], [1]], dtype=np.int32)
    tallest = max_block_m(shape) // shape.group
    kinds = dict.fromkeys((tiling_of(shape, length, gpu), length <= tallest) for length in lengths)
    # Merged as many tiles are, and as few.
    with_workers = dict.fromkeys((tiling, num_workers) for tiling, _ in kinds for num_workers in (1, FEW_TILES_FROM))
    return [
        Launch(tiling, num_tiles=1, num_workers=num_workers, query_len=1, tiles=tiles)
        for tiling, num_workers in [*with_workers, *((tiling, 0) for tiling, is_short in kinds if not is_short)]
        for tiles in ([None] if is_uniform else [None, tile])
    ]


def tile_table(
    rows: np.ndarray, query_lens: np.ndarray, per_tile: int, seq_lens: np.ndarray | None = None
) -> np.ndarray:
    """int32 `[3, num_tiles]`: row of each tile, its first query and one past its last. With `seq_lens`, int64
    `[num_rows]`, those behind the most positions come first: programs begin in this order, and a device that ends with
    its shortest ones is idle the least."""
    counts = -(-query_lens // per_tile)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * per_tile
    last = np.minimum(first + per_tile, np.repeat(query_lens, counts))
    table = np.stack([np.repeat(rows, counts), first, last]).astype(np.int32)
    if seq_lens is None:
        return table
    order = np.argsort(-(last + np.repeat(seq_lens - query_lens, counts)), kind="stable")
    # Kernels read a table without strides, and an array that was indexed may have those of its transpose.
    return np.ascontiguousarray(table[:, order])


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`, 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()

"""Paged attention in pieces at fixed positions: a query has the same bits alone, in a chunk, among drafts, and beside
any other rows.

`paged_attention` shares contexts out by load, so where a row is split follows the other rows. Here every context is
split at multiples of `PIECE` positions from its own beginning, a program attends one piece for one tile of queries, and
pieces are merged from the first to the last. Tiles have one height. Keys are read in blocks that begin at multiples of
their length, also where a window begins in between: so a query's keys are grouped by their positions alone. What a
block or a piece has that a query does not see adds 0 to its sums, which changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dflash_kernels.attention_merge import store_piece, store_tile, with_sink
from dflash_kernels.attention_schedule import PagedBatch, tile_span
from dflash_kernels.attention_tile import attend_tile
from dflash_kernels.launcher import cached_launches
from dflash_kernels.paged_attention import INTERPRETED, LOG2_E, STEP_NUMBERS, STEP_POINTERS, _tile
from dflash_kernels.paged_attention_launch import (
    HOPPER,
    Gpu,
    HeadShape,
    Tiling,
    max_block_m,
    power_of_two,
    tile_table,
    tiling_of,
)
from dflash_kernels.triton_import import tl, triton

# Positions of a piece, a multiple of every block of keys. With 256 / 512 / 1,024 one layer takes 14 / 21 / 35 us for a
# row of 1,024 positions, 27 / 27 / 41 for 8, 86 / 72 / 66 for 32, and 143 / 115 / 100 for 8 of 8,192 (H200).
PIECE = 512
# Lines of a tile: 16 queries of 4 heads.
TALLEST = 64
# Lines of partial results that there is memory for at a time: with heads of 128 they are 256 MiB.
MAX_PARTIAL_LINES = 1 << 19
# Lines that a program merges, one warp: as in `attention_merge`, what warps exchange costs more than the sums.
MERGED_LINES = 2


@dataclass(frozen=True)
class PiecesLaunch:
    """One launch over `num_tiles` tiles of queries from `first_tile` on, for every KV head and `num_pieces` pieces.

    tiles: int32 `[3, all tiles]`, the row of each tile, its first query and one past its last; None where every row has
    up to `query_len` queries and so as many tiles, in the order of the rows.
    """

    tiling: Tiling
    first_tile: int
    num_tiles: int
    num_pieces: int
    query_len: int
    tiles: torch.Tensor | None


def pieces_tiling(shape: HeadShape, gpu: Gpu = HOPPER) -> Tiling:
    """The tiling of such heads, whatever the rows: that of rows of `TALLEST` lines."""
    lines = min(TALLEST, max_block_m(shape))
    return tiling_of(shape, max(1, lines // shape.group), gpu)


def plan_pieces(
    query_lens: np.ndarray, seq_lens: np.ndarray, shape: HeadShape, gpu: Gpu = HOPPER
) -> tuple[list[PiecesLaunch], np.ndarray | None]:
    """Launches that cover every query of every row, and the table of tiles that they share, int32 `[3, n]`; None where
    all rows have one bound. query_lens, seq_lens: upper bounds, int64 `[num_rows]`.

    There are several launches only where partial results would take too much memory."""
    tiling, longest = pieces_tiling(shape, gpu), int(query_lens.max(initial=0))
    per_tile = tiling.block_m // shape.group
    total = int((-(-query_lens // per_tile)).sum())
    if not total:
        return [], None
    tiles = None
    if not (query_lens == longest).all():
        tiles = tile_table(np.arange(len(query_lens)), query_lens, per_tile)
    num_pieces = max(1, -(-int(seq_lens.max()) // PIECE))
    step = max(1, MAX_PARTIAL_LINES // (num_pieces * shape.num_kv_heads * tiling.block_m))
    launches = [
        PiecesLaunch(tiling, first, min(step, total - first), num_pieces, longest, None)
        for first in range(0, total, step)
    ]
    return launches, tiles


def with_tiles(launches: list[PiecesLaunch], tiles: torch.Tensor | None) -> list[PiecesLaunch]:
    """The launches of `plan_pieces` with their table on the device."""
    return [replace(launch, tiles=tiles) for launch in launches]


def pieces_variants(shape: HeadShape, gpu: Gpu = HOPPER) -> list[tuple[PiecesLaunch, np.ndarray | None]]:
    """A launch of each kind that `plan_pieces` can make, with its table: one compiled kernel serves all of a kind. Each
    is over one tile of the first row."""
    launch = PiecesLaunch(pieces_tiling(shape, gpu), 0, 1, 2, 1, None)
    return [(launch, None), (launch, np.array([[0], [0], [1]], dtype=np.int32))]


NUMBERS = [*STEP_NUMBERS, "first_tile", "num_pieces"]


@triton.jit
def _piece_span(
    first, last, query_len, seq_len, table_len, num_pieces,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The positions `[begin, end)` of a tile, from the beginning of a block on, and its first and last piece. A
    tile that sees nothing has one piece of nothing, which writes its zeros. table_len: no position is from there on:
    a row that has ended may be longer than its bound, by which pieces and partial results were counted."""
    begin, end = tile_span(first, last, query_len, seq_len, tl.minimum(table_len, num_pieces * PIECE), CAUSAL, WINDOW)
    begin = begin // BLOCK_N * BLOCK_N
    first_piece = begin // PIECE
    return begin, end, first_piece, tl.maximum((end - 1) // PIECE, first_piece)


@cached_launches
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=STEP_POINTERS)
def _attend_pieces_kernel(
    query_ptr, cache_ptr, scales_ptr, start_ptr, query_lens_ptr, seq_lens_ptr, tables_ptr, tiles_ptr, out_ptr,
    partial_ptr, lse_ptr, sinks_ptr, scale, first_tile, num_tiles, num_pieces, query_bound, table_width,
    table_stride, token_stride, head_stride, block_stride, slot_stride, value_stride, kv_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, MAPPED: tl.constexpr, WIDEN: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program attends one piece of one tile, for the heads of one KV head."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    piece = tl.program_id(1)
    row, first, last = _tile(first_tile + tile, tiles_ptr, num_tiles, query_bound, BLOCK_M // GROUP, MAPPED)
    query_len = tl.load(query_lens_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row)
    begin, end, first_piece, last_piece = _piece_span(
        first, last, query_len, seq_len, table_width * BLOCK_SIZE, num_pieces, CAUSAL, WINDOW, BLOCK_N, PIECE
    )
    if (piece < first_piece) | (piece > last_piece):
        return
    begin = tl.maximum(begin, piece * PIECE)
    end = tl.minimum(end, (piece + 1) * PIECE)
    acc, top, total, token, head, is_query = attend_tile(
        query_ptr, cache_ptr, scales_ptr, start_ptr, tables_ptr, row, first, last, kv_head, query_len, seq_len,
        begin, end, scale, table_stride, token_stride, head_stride, block_stride, slot_stride, value_stride,
        kv_head_stride, GROUP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, WIDEN, "masked",
    )  # fmt: skip
    if first_piece == last_piece:
        acc = with_sink(acc, top, total, sinks_ptr, head)
        store_tile(acc, token, head, is_query, out_ptr, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)
    else:
        place = (tile * num_pieces + piece).to(tl.int64) * KV_HEADS + kv_head
        line = place * BLOCK_M + tl.arange(0, BLOCK_M)
        store_piece(acc, top, total, line, is_query, partial_ptr, lse_ptr, HEAD_DIM, BLOCK_D)


@cached_launches
@triton.jit(
    do_not_specialize=[number for number in NUMBERS if number != "table_stride"],
    do_not_specialize_on_alignment=[pointer for pointer in STEP_POINTERS if pointer != "tables_ptr"],
)
def _merge_pieces_kernel(
    start_ptr, query_lens_ptr, seq_lens_ptr, tiles_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, first_tile,
    num_tiles, num_pieces, query_bound, table_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MAPPED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One program merges the pieces of some lines of one tile, from the first to the last."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    row, first, last = _tile(first_tile + tile, tiles_ptr, num_tiles, query_bound, BLOCK_M // GROUP, MAPPED)
    query_len = tl.load(query_lens_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row)
    _, _, first_piece, last_piece = _piece_span(
        first, last, query_len, seq_len, table_width * BLOCK_SIZE, num_pieces, CAUSAL, WINDOW, BLOCK_N, PIECE
    )
    if first_piece == last_piece:
        return  # written by its only program
    m = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    query = first + m // GROUP
    is_query = query < tl.minimum(last, query_len)
    d = tl.arange(0, BLOCK_D)
    mask = is_query[:, None] & (d < HEAD_DIM)[None, :]
    top = tl.full([BLOCK_L], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_L], tl.float32)
    acc = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    for piece in range(first_piece, last_piece + 1):
        line = ((tile * num_pieces + piece).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + m
        lse = tl.load(lse_ptr + line, mask=is_query, other=float("-inf"))
        partial = tl.load(partial_ptr + (line * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - finite_top)
        shrink = tl.exp2(top - finite_top)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + partial * weight[:, None]
        top = new_top
    # Rounded as a quotient is: a line with one piece keeps its bits.
    acc = tl.div_rn(acc, tl.where(total > 0, total, 1.0)[:, None] + tl.zeros_like(acc))
    head = kv_head * GROUP + m % GROUP
    acc = with_sink(acc, top, total, sinks_ptr, head)
    token = (tl.load(start_ptr + row) + query).to(tl.int64)
    store_tile(acc, token, head, is_query, out_ptr, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)


def invariant_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    rows: PagedBatch,
    launches: list[PiecesLaunch],
    causal: bool,
    window: int | None,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention`, in the launches of `plan_pieces` for these rows and heads."""
    if out is None:
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
    for launch in launches:
        num_heads, head_dim = query.shape[1:]
        block_size, kv_heads, block_m = cache.shape[1], cache.shape[3], launch.tiling.block_m
        group, has_pieces = num_heads // kv_heads, launch.num_pieces > 1
        lines = launch.num_tiles * launch.num_pieces * kv_heads * block_m if has_pieces else 1
        partial = torch.empty(lines, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(lines, dtype=torch.float32, device=query.device)
        total = launch.num_tiles if launch.tiles is None else launch.tiles.shape[1]
        options = {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(power_of_two(head_dim), 16),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": block_m,
            "BLOCK_N": launch.tiling.block_n,
            "CAUSAL": causal,
            "WINDOW": window or 0,
            "MAPPED": launch.tiles is not None,
            "PIECE": PIECE,
            # Without fused operations, which a compiler puts where it sees fit: zeros must add nothing anywhere.
            "enable_fp_fusion": False,
        }
        _attend_pieces_kernel[(launch.num_tiles * kv_heads, launch.num_pieces)](
            query, cache, scales, rows.query_start, rows.query_lens, rows.seq_lens, rows.block_tables, launch.tiles,
            out, partial, lse, sinks, LOG2_E * head_dim**-0.5, launch.first_tile, total, launch.num_pieces,
            launch.query_len, rows.block_tables.shape[1], rows.block_tables.stride(0), *query.stride()[:2],
            *cache.stride()[:4],
            **options, WIDEN=INTERPRETED, num_warps=launch.tiling.num_warps, num_stages=launch.tiling.num_stages,
        )  # fmt: skip
        if has_pieces:
            programs = triton.cdiv(block_m // group * group, MERGED_LINES)
            _merge_pieces_kernel[(launch.num_tiles * kv_heads, programs)](
                rows.query_start, rows.query_lens, rows.seq_lens, launch.tiles, out, partial, lse, sinks,
                launch.first_tile, total, launch.num_pieces, launch.query_len, rows.block_tables.shape[1],
                **options, BLOCK_L=MERGED_LINES, num_warps=1,
            )  # fmt: skip
    return out

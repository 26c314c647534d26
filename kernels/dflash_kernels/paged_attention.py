"""Attention of a few queries, or of a prefill chunk, over paged KV.

A tile is some of one row's queries with all query heads of one KV head, so that KV are read once for the whole group.
Where tiles are many and alike, a program attends one. Otherwise a fixed number of programs, the workers, share all
contexts out evenly (`attention_schedule`): what a worker has of a tile is whole, and written at once, or a piece, of
which it leaves a partial result and the log of its softmax's denominator for a second kernel to merge (FlashDecoding).
`paged_attention_launch.py` chooses tiles and workers from bounds; the real lengths are read on the device, so a
captured graph serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dflash_kernels.attention_merge import LOG2_E, merge, store_lse, store_piece, store_tile, with_sink
from dflash_kernels.attention_schedule import BLOCK, PagedBatch, schedule, tile_span
from dflash_kernels.attention_tile import attend_tile
from dflash_kernels.fp8_kv import dequantise_kv_reference
from dflash_kernels.launcher import cached_launches
from dflash_kernels.paged_attention_launch import Launch, power_of_two
from dflash_kernels.triton_import import tl, triton

# What changes from step to step must not have Triton compile a kernel anew: these arguments keep one type, whatever
# their value or alignment. Layouts of rows are slices of one buffer.
STEP_NUMBERS = ["num_tiles", "query_bound", "table_width", "table_stride"]
STEP_POINTERS = ["start_ptr", "query_lens_ptr", "seq_lens_ptr", "tables_ptr", "tiles_ptr"]


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch with what it reads on the device: int32 `[3, num_tiles]`, its tiles where it has a table of them, and
    its schedule (`attention_schedule`) where it has workers."""

    launch: Launch
    tiles: torch.Tensor | None
    schedule: torch.Tensor | None


def paged_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    rows: PagedBatch,
    causal: bool,
    window: int | None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each row over its own positions, one row at a time.

    query: `[num_tokens, num_heads, head_dim]`. cache: `[num_blocks, block_size, 2, num_kv_heads, head_dim]`. Softmax
    scale `head_dim ** -0.5`. With `causal` a query sees positions up to its own, else all of its row; with `window`
    only those less than `window` away. sinks: `[num_heads]`, a logit that is in each softmax of a head and has no value
    (`attention_merge`); None for no such logits. scales: float32 `[num_blocks, block_size, 2, num_kv_heads]` of a cache
    in FP8 (`fp8_kv`). Returns `[num_tokens, num_heads * head_dim]` in the query's dtype,
    zeros where a token is no row's or sees nothing.
    """
    out = torch.zeros_like(query)
    block_size, head_dim = cache.shape[1], cache.shape[4]
    group = query.shape[1] // cache.shape[3]
    columns = (rows.query_start, rows.query_lens, rows.seq_lens)
    for row, (start, count, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        key = torch.arange(min(length, rows.block_tables.shape[1] * block_size), device=query.device)
        position = torch.arange(length - count, length, device=query.device)[:, None]
        blocks = rows.block_tables[row, key // block_size].clamp(min=0).long()
        kv = cache[blocks, key % block_size]
        if scales is not None:
            kv = dequantise_kv_reference(kv, scales[blocks, key % block_size], query.dtype)
        k, v = kv.to(query.dtype).repeat_interleave(group, dim=2).unbind(1)
        visible = (key <= position) if causal else (key < length).expand(count, -1)
        if window is not None:
            visible = visible & ((key - position).abs() < window)
        scores = torch.einsum("qhd,khd->hqk", query[start : start + count], k) * head_dim**-0.5
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, count, 1)], dim=-1)
        weights = scores.softmax(dim=-1).nan_to_num(0.0)[..., : len(key)]
        out[start : start + count] = torch.einsum("hqk,khd->qhd", weights, v)
    return out.flatten(1)


@triton.jit
def _tile(tile, tiles_ptr, num_tiles, query_len, PER_TILE: tl.constexpr, MAPPED: tl.constexpr):
    """Row, first query and one past the last query of a tile; without a map all rows have as many tiles."""
    if MAPPED:
        row = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + num_tiles + tile)
        last = tl.load(tiles_ptr + 2 * num_tiles + tile)
    else:
        tiles_per_row = tl.cdiv(query_len, PER_TILE)
        row = tile // tiles_per_row
        first = tile % tiles_per_row * PER_TILE
        last = tl.minimum(first + PER_TILE, query_len)
    return row, first, last


@triton.jit
def _longest_first(number, num_tiles, query_len, PER_TILE: tl.constexpr):
    """The tile of a program where all rows have as many: the last ones of all rows, behind the most positions, have
    the programs that begin first."""
    tiles_per_row = tl.cdiv(query_len, PER_TILE)
    num_rows = num_tiles // tiles_per_row
    return number % num_rows * tiles_per_row + tiles_per_row - 1 - number // num_rows


@cached_launches
@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_POINTERS)
def _attend_kernel(
    query_ptr, cache_ptr, scales_ptr, start_ptr, query_lens_ptr, seq_lens_ptr, tables_ptr, tiles_ptr, out_ptr,
    sinks_ptr, out_lse_ptr, scale, num_tiles, query_bound, table_width, table_stride, token_stride, head_stride,
    block_stride,
    slot_stride, value_stride, kv_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, MAPPED: tl.constexpr, WIDEN: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """One program attends one tile, for the heads of one KV head."""
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    if not MAPPED:  # a table is in this order already
        tile = _longest_first(tile, num_tiles, query_bound, BLOCK_M // GROUP)
    row, first, last = _tile(tile, tiles_ptr, num_tiles, query_bound, BLOCK_M // GROUP, MAPPED)
    query_len = tl.load(query_lens_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row)
    begin, end = tile_span(first, last, query_len, seq_len, table_width * BLOCK_SIZE, CAUSAL, WINDOW)
    acc, top, total, token, head, is_query = attend_tile(
        query_ptr, cache_ptr, scales_ptr, start_ptr, tables_ptr, row, first, last, kv_head, query_len, seq_len,
        begin, end, scale, table_stride, token_stride, head_stride, block_stride, slot_stride, value_stride,
        kv_head_stride, GROUP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, WIDEN, LOOP,
    )  # fmt: skip
    acc = with_sink(acc, top, total, sinks_ptr, head)
    store_tile(acc, token, head, is_query, out_ptr, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)
    store_lse(top, total, token, head, is_query, out_lse_ptr, KV_HEADS * GROUP)


@cached_launches
@triton.jit(do_not_specialize=STEP_NUMBERS[:1] + STEP_NUMBERS[2:], do_not_specialize_on_alignment=STEP_POINTERS[:-1])
def _attend_shares_kernel(
    query_ptr, cache_ptr, scales_ptr, start_ptr, query_lens_ptr, seq_lens_ptr, tables_ptr, schedule_ptr, out_ptr,
    partial_ptr, lse_ptr, sinks_ptr, out_lse_ptr, scale, num_tiles, table_width, table_stride, token_stride,
    head_stride, block_stride, slot_stride, value_stride, kv_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, WIDEN: tl.constexpr, LOOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program attends one worker's share of the schedule, for the heads of one KV head: the end of a tile,
    whole tiles, the beginning of another, or any of these."""
    worker = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    share = tl.load(schedule_ptr)
    at = worker * share
    stop = tl.minimum(at + share, tl.load(schedule_ptr + num_tiles))
    tile = 0
    if at < stop:
        for base in range(0, num_tiles, BLOCK):
            number = base + tl.arange(0, BLOCK)
            ends = tl.load(schedule_ptr + 1 + number, mask=number < num_tiles, other=stop)
            tile += tl.sum((ends <= at).to(tl.int32), 0)
    while at < stop:
        tile_begin = tl.load(schedule_ptr + tile, mask=tile > 0, other=0)
        tile_end = tl.load(schedule_ptr + 1 + tile)
        row = tl.load(schedule_ptr + 1 + num_tiles + tile)
        first = tl.load(schedule_ptr + 1 + 2 * num_tiles + tile)
        last = tl.load(schedule_ptr + 1 + 3 * num_tiles + tile)
        query_len = tl.load(query_lens_ptr + row)
        seq_len = tl.load(seq_lens_ptr + row)
        begin, end = tile_span(first, last, query_len, seq_len, table_width * BLOCK_SIZE, CAUSAL, WINDOW)
        piece_end = tl.minimum(tile_end, stop)
        end = tl.minimum(end, begin + (piece_end - tile_begin) * BLOCK_N)
        begin += (at - tile_begin) * BLOCK_N
        acc, top, total, token, head, is_query = attend_tile(
            query_ptr, cache_ptr, scales_ptr, start_ptr, tables_ptr, row, first, last, kv_head, query_len, seq_len,
            begin, end, scale, table_stride, token_stride, head_stride, block_stride, slot_stride, value_stride,
            kv_head_stride, GROUP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, WIDEN, LOOP,
        )  # fmt: skip
        if (at == tile_begin) & (piece_end == tile_end):
            acc = with_sink(acc, top, total, sinks_ptr, head)
            store_tile(acc, token, head, is_query, out_ptr, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)
            store_lse(top, total, token, head, is_query, out_lse_ptr, KV_HEADS * GROUP)
        else:
            # A worker has two pieces at most: the last one of a tile that began before, and the first of another.
            slot = 2 * worker + (tile_begin >= worker * share).to(tl.int32)
            line = ((slot * KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
            store_piece(acc, top, total, line, is_query, partial_ptr, lse_ptr, HEAD_DIM, BLOCK_D)
        at = piece_end
        tile += 1


# The interpreter multiplies bfloat16 as if it were integers, so products are of float32 there.
INTERPRETED = not isinstance(_attend_kernel, triton.JITFunction)


def prepare_launches(
    launches: list[tuple[Launch, torch.Tensor | None]],
    rows: PagedBatch,
    group: int,
    block_size: int,
    causal: bool,
    window: int | None,
) -> list[PreparedLaunch]:
    """The launches of `plan_launches` for these rows, each with its tiles on the device, and with its schedule: for
    all layers of a forward pass that have the same heads and pattern."""
    return [
        PreparedLaunch(
            launch,
            tiles,
            schedule(rows, launch, tiles, group, block_size, causal, window) if launch.num_workers else None,
        )
        for launch, tiles in launches
    ]


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    rows: PagedBatch,
    launches: list[PreparedLaunch],
    causal: bool,
    window: int | None,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention_reference`, without a wait for the device.

    `launches` are those of `prepare_launches` for these rows and heads. Heads and the elements of a head must be
    contiguous in `cache`, the elements of a head in `query`; a cache with scales as a whole, and they too.
    out: where the output is written; tokens that are no row's are left as they are there. None: a new tensor, zeros
    for those. out_lse: float32 `[num_tokens, num_heads]`, which gets the logarithm, of two, of each query's
    denominator, -inf where it saw nothing; tokens that are no row's are left.
    """
    if out is None:
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = cache.shape[1], cache.shape[3]
    heads = {
        "KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(power_of_two(head_dim), 16),
    }
    for prepared in launches:
        launch, tiles, tiling = prepared.launch, prepared.tiles, prepared.launch.tiling
        options = {
            **heads,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "CAUSAL": causal,
            "WINDOW": window or 0,
            "WIDEN": INTERPRETED,
            "LOOP": tiling.loop,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }
        if prepared.schedule is not None:
            _launch_shares(query, cache, scales, rows, launch, prepared.schedule, out, sinks, out_lse, heads, options)
        else:
            _attend_kernel[(launch.num_tiles * num_kv_heads,)](
                query, cache, scales, rows.query_start, rows.query_lens, rows.seq_lens, rows.block_tables, tiles, out,
                sinks, out_lse, LOG2_E * head_dim**-0.5, launch.num_tiles, launch.query_len,
                rows.block_tables.shape[1], rows.block_tables.stride(0), *query.stride()[:2], *cache.stride()[:4],
                **options, MAPPED=tiles is not None,
            )  # fmt: skip
    return out


def _launch_shares(
    query: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    rows: PagedBatch,
    launch: Launch,
    schedule: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    heads: dict[str, int],
    options: dict[str, Any],
) -> None:
    """A program for each worker, then the merge of the tiles that they share."""
    block_m, num_kv_heads, head_dim = launch.tiling.block_m, cache.shape[3], query.shape[2]
    num_lines = 2 * launch.num_workers * num_kv_heads * block_m
    partial = torch.empty(num_lines, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(num_lines, dtype=torch.float32, device=query.device)
    _attend_shares_kernel[(launch.num_workers * num_kv_heads,)](
        query, cache, scales, rows.query_start, rows.query_lens, rows.seq_lens, rows.block_tables, schedule, out,
        partial, lse, sinks, out_lse, LOG2_E * head_dim**-0.5, launch.num_tiles, rows.block_tables.shape[1],
        rows.block_tables.stride(0), *query.stride()[:2], *cache.stride()[:4], **options, BLOCK=BLOCK,
    )  # fmt: skip
    merge(rows, launch, schedule, out, partial, lse, heads, sinks, out_lse)

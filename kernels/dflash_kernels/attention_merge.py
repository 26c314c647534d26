"""The end of an attention launch: the sink, outputs, what workers leave of tiles that they share, and its merge
(FlashDecoding).

A sink is a learned logit of a head that takes part in its softmax and has no value (Xiao et al., arXiv 2309.17453; as
gpt-oss has it). It enters once for each query, when its whole context has been summed up: of a piece nothing knows it.
"""

from __future__ import annotations

import torch

from dflash_kernels.attention_schedule import PagedBatch, num_shared
from dflash_kernels.launcher import cached_launches
from dflash_kernels.paged_attention_launch import FEW_TILES_FROM, Launch
from dflash_kernels.triton_import import tl, triton

# Pieces that a program loads at a time, and lines of a tile that it takes: few tiles have many pieces each, many tiles
# have few. It is one warp, since what several exchange goes through shared memory and barriers: with 8 rows of 1,024
# positions 4.4 us by one warp and 11 to 42 by four or eight, with 32 rows 8.0 and 16 to 143; with one row of 32,768 4.6
# by the form for few tiles and 6.4 by the other (H200).
FEW_TILES, MANY_TILES = (8, 1), (4, 2)
LOG2_E = 1.4426950408889634


_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def with_sink(acc, top, total, sinks_ptr, head):
    """The attention `acc` of lines over their whole context, as it is beside the sinks of their heads; unchanged
    without. top, total: each line's maximum, of powers of two, and its sum of weights."""
    if sinks_ptr is not None:
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
        # The share of the softmax that the sink leaves, 0 where it takes all.
        acc = acc * (1.0 / (1.0 + tl.exp2(sink - lse)))[:, None]
    return acc


@triton.jit
def store_tile(
    acc, token, head, is_query, out_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the output of a tile."""
    d = tl.arange(0, BLOCK_D)
    offsets = ((token * (KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + d[None, :]
    mask = is_query[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_lse(top, total, token, head, is_query, lse_ptr, NUM_HEADS: tl.constexpr):
    """Write the log, of two, of each line's denominator, if anyone asks for it; -inf where a line saw nothing."""
    if lse_ptr is not None:
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + token * NUM_HEADS + head, lse, mask=is_query)


@triton.jit
def store_piece(
    acc, top, total, line, is_query, partial_ptr, lse_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Leave the result of a piece and the log of its softmax's denominator for the merge."""
    d = tl.arange(0, BLOCK_D)
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + line, lse, mask=is_query)
    mask = is_query[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(partial_ptr + (line * HEAD_DIM)[:, None] + d[None, :], acc, mask=mask)


@cached_launches
@triton.jit(
    do_not_specialize=["num_tiles", "num_shared", "lines_per_tile"],
    do_not_specialize_on_alignment=["start_ptr", "query_lens_ptr"],
)
def _merge_kernel(
    start_ptr, query_lens_ptr, schedule_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, out_lse_ptr, num_tiles,
    num_shared, lines_per_tile,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Some lines of a tile that workers share: their partial results, weighted by their shares of the softmax's
    denominator."""
    number, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    shared_ptr = schedule_ptr + 1 + 4 * num_tiles + number
    tile = tl.load(shared_ptr)
    first_worker = tl.load(shared_ptr + num_shared)
    last_worker = tl.load(shared_ptr + 2 * num_shared)
    if tile < 0:
        return
    row = tl.load(schedule_ptr + 1 + num_tiles + tile)
    first = tl.load(schedule_ptr + 1 + 2 * num_tiles + tile)
    last = tl.load(schedule_ptr + 1 + 3 * num_tiles + tile)
    m = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    in_tile = m < lines_per_tile
    d = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_L], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_L], tl.float32)
    acc = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    for base in range(first_worker, last_worker + 1, BLOCK_P):
        worker = base + tl.arange(0, BLOCK_P)
        there = (worker <= last_worker)[:, None] & in_tile[None, :]
        slot = 2 * worker + (worker == first_worker).to(tl.int32)
        line = ((slot * KV_HEADS + kv_head) * lines_per_tile)[:, None].to(tl.int64) + m[None, :]
        lse = tl.load(lse_ptr + line, mask=there, other=float("-inf"))
        mask = there[:, :, None] & (d < HEAD_DIM)[None, None, :]
        partial = tl.load(partial_ptr + (line * HEAD_DIM)[:, :, None] + d[None, None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - finite_top[None, :])
        shrink = tl.exp2(top - finite_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(partial * weights[:, :, None], 0)
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    query = first + m // GROUP
    # What lies behind the row's own queries belongs to the next one, and no worker left results of it.
    is_query = in_tile & (query < tl.minimum(last, tl.load(query_lens_ptr + row)))
    head = kv_head * GROUP + m % GROUP
    acc = with_sink(acc, top, total, sinks_ptr, head)
    token = (tl.load(start_ptr + row) + query).to(tl.int64)
    store_tile(acc, token, head, is_query, out_ptr, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)
    store_lse(top, total, token, head, is_query, out_lse_ptr, KV_HEADS * GROUP)


def merge_form(launch: Launch) -> tuple[int, int]:
    """The pieces that a program loads at a time and its lines, by how many workers there are for each tile."""
    return FEW_TILES if launch.num_workers >= FEW_TILES_FROM * launch.num_tiles else MANY_TILES


def merge(
    rows: PagedBatch,
    launch: Launch,
    schedule: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    lse: torch.Tensor,
    heads: dict[str, int],
    sinks: torch.Tensor | None,
    out_lse: torch.Tensor | None = None,
) -> None:
    """Write the output of the tiles that have several pieces. partial, lse: float32 `[n, head_dim]` and `[n]`, a
    line of results for each of two pieces of a worker, KV head, and line of a tile. heads: constants of kernels.
    sinks: as of `paged_attention_reference`. out_lse: as of `paged_attention`."""
    block_m, group = launch.tiling.block_m, heads["GROUP"]
    most = num_shared(launch.num_tiles, launch.num_workers)
    pieces, lines = merge_form(launch)
    _merge_kernel[(most * heads["KV_HEADS"], triton.cdiv(block_m // group * group, lines))](
        rows.query_start, rows.query_lens, schedule, out, partial, lse, sinks, out_lse, launch.num_tiles,
        most, block_m, **heads, BLOCK_P=pieces, BLOCK_L=lines, num_warps=1,
    )  # fmt: skip

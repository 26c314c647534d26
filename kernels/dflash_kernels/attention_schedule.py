"""Shares the work of an attention launch out evenly, on the device, by the real lengths of its rows.

The contexts of all tiles lie behind one another as one line of units, of `block_n` positions each, and every worker
takes an equal piece of it, wherever tiles begin and end (Stream-K, arXiv 2301.03598; for attention LeanAttention, arXiv
2405.10480). So a row of 32k positions among rows of 1k takes as many workers as it needs, and no launch knows lengths
that a captured graph could not. Pieces of one tile are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.paged_attention_launch import Launch
from dflash_kernels.triton_import import tl, triton

# Tiles that a program looks at in one go.
BLOCK = 256
# A worker's piece is made longer by this part of it at most, so that no tile is cut.
WHOLE_TILES_COST = 8


@dataclass(frozen=True)
class PagedBatch:
    """Rows of queries and where their KV lie.

    query_start, query_lens, seq_lens: int32 `[num_rows]`: row r has the queries of tokens `[query_start[r],
    query_start[r] + query_lens[r])`, the last of them at position `seq_lens[r] - 1`; a padding row has lengths of 0.
    block_tables: int32 or int64 `[num_rows, width]`: positions past the table's width do not exist.
    """

    query_start: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


def share_reference(units: np.ndarray, num_workers: int, min_units: int) -> int:
    """Units of a worker, for tiles of `units` int64 `[num_tiles]`, 0 for those without queries.

    As few as suffice for all, but a tile is not cut into pieces below `min_units`. Where little more makes it a
    multiple of the longest tile, so that tiles of one length are not cut, it is that.
    """
    total, longest = int(units.sum()), max(int(units.max()), 1)
    share = max(-(-total // num_workers), min(min_units, longest))
    whole = -(-share // longest) * longest
    return whole if (whole - share) * WHOLE_TILES_COST <= share else share


def schedule_size(num_tiles: int, num_workers: int) -> int:
    """Numbers in a schedule: the units of a worker; then of each tile that has queries the units of it and all before
    it, its row, its first query and one past its last; behind the last one all units. Then of each tile that workers
    share its number, its first worker and its last: -1 behind the last such tile."""
    return 1 + 4 * num_tiles + 3 * num_shared(num_tiles, num_workers)


def num_shared(num_tiles: int, num_workers: int) -> int:
    """Tiles that workers share, at most: a worker is the first one of one such tile, since that has the end of its
    share."""
    return min(num_tiles, num_workers)


@triton.jit
def tile_span(first, last, query_len, seq_len, table_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The positions `[begin, end)` that any of the queries `[first, last)` sees; `end <= begin` for none."""
    offset = seq_len - query_len
    last_position = offset + tl.minimum(last, query_len) - 1
    begin = first * 0
    end = last_position + 1 if CAUSAL else seq_len
    if WINDOW > 0:
        begin = tl.maximum(offset + first - WINDOW + 1, 0)
        end = tl.minimum(end, last_position + WINDOW)
    end = tl.minimum(end, table_len)
    # A tile past the end of its row, or a padding row.
    end = tl.where(first < query_len, end, begin)
    return begin, end


@triton.jit
def _list_shared(schedule_ptr, shared_ptr, share, num_tiles, most, BLOCK: tl.constexpr):
    """Write which of these tiles workers share, `most` at most."""
    # Other threads read what one has written.
    tl.debug_barrier()
    listed = 0
    for base in range(0, num_tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        inside = tile < num_tiles
        begin = tl.load(schedule_ptr + tile, mask=inside & (tile > 0), other=0)
        end = tl.load(schedule_ptr + 1 + tile, mask=inside, other=1)
        worker, last_worker = begin // share, (end - 1) // share
        is_shared = inside & (worker < last_worker)
        place = listed + tl.cumsum(is_shared.to(tl.int32), 0) - 1
        tl.store(shared_ptr + place, tile, mask=is_shared)
        tl.store(shared_ptr + most + place, worker, mask=is_shared)
        tl.store(shared_ptr + 2 * most + place, last_worker, mask=is_shared)
        listed += tl.sum(is_shared.to(tl.int32), 0)
    for base in range(0, most, BLOCK):
        place = base + tl.arange(0, BLOCK)
        tl.store(shared_ptr + place, -1 + tl.zeros_like(place), mask=(place >= listed) & (place < most))


@cached_launches
@triton.jit(
    do_not_specialize=["num_tiles", "num_workers", "query_bound", "per_tile", "table_len", "block_n", "min_units"],
    do_not_specialize_on_alignment=["query_lens_ptr", "seq_lens_ptr", "tiles_ptr"],
)
def _schedule_kernel(
    query_lens_ptr, seq_lens_ptr, tiles_ptr, schedule_ptr, num_tiles, num_workers, query_bound, per_tile, table_len,
    block_n, min_units,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE_TILES_COST: tl.constexpr,
):  # fmt: skip
    """One program for the whole launch. Without a table of tiles all rows have as many, in the order of rows."""
    total = 0
    listed = 0
    longest = 1
    for base in range(0, num_tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        inside = tile < num_tiles
        if MAPPED:
            row = tl.load(tiles_ptr + tile, mask=inside, other=0)
            first = tl.load(tiles_ptr + num_tiles + tile, mask=inside, other=0)
            last = tl.load(tiles_ptr + 2 * num_tiles + tile, mask=inside, other=0)
        else:
            tiles_per_row = tl.cdiv(query_bound, per_tile)
            row = tile // tiles_per_row
            first = tile % tiles_per_row * per_tile
            last = tl.minimum(first + per_tile, query_bound)
        query_len = tl.load(query_lens_ptr + row, mask=inside, other=0)
        seq_len = tl.load(seq_lens_ptr + row, mask=inside, other=0)
        begin, end = tile_span(first, last, query_len, seq_len, table_len, CAUSAL, WINDOW)
        # A tile that sees nothing is some worker's all the same, which writes its zeros.
        units = tl.where(inside & (first < query_len), tl.maximum(tl.cdiv(end - begin, block_n), 1), 0)
        # Tiles without queries are left out, so that no worker goes through those of a row that is far below its
        # bound.
        there = units > 0
        place = listed + tl.cumsum(there.to(tl.int32), 0)
        tl.store(schedule_ptr + place, total + tl.cumsum(units, 0), mask=there)
        tl.store(schedule_ptr + num_tiles + place, row, mask=there)
        tl.store(schedule_ptr + 2 * num_tiles + place, first, mask=there)
        tl.store(schedule_ptr + 3 * num_tiles + place, last, mask=there)
        listed += tl.sum(there.to(tl.int32), 0)
        total += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
    for base in range(0, num_tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        # Behind the last one there are as many units as up to it.
        tl.store(schedule_ptr + 1 + tile, total + tl.zeros_like(tile), mask=(tile >= listed) & (tile < num_tiles))
    share = tl.maximum(tl.cdiv(total, num_workers), tl.minimum(min_units, longest))
    whole = tl.cdiv(share, longest) * longest
    share = tl.where((whole - share) * WHOLE_TILES_COST <= share, whole, share)
    tl.store(schedule_ptr, share)
    most = tl.minimum(num_tiles, num_workers)
    _list_shared(schedule_ptr, schedule_ptr + 1 + 4 * num_tiles, share, listed, most, BLOCK)


def schedule(
    rows: PagedBatch,
    launch: Launch,
    tiles: torch.Tensor | None,
    group: int,
    block_size: int,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """The schedule of a launch with workers: int32 `[schedule_size(num_tiles, num_workers)]`. tiles: those of the
    launch, on the device. group: query heads that share a KV head."""
    size = schedule_size(launch.num_tiles, launch.num_workers)
    out = torch.empty(size, dtype=torch.int32, device=rows.seq_lens.device)
    tiling = launch.tiling
    _schedule_kernel[(1,)](
        rows.query_lens, rows.seq_lens, tiles, out, launch.num_tiles, launch.num_workers, launch.query_len,
        tiling.block_m // group, rows.block_tables.shape[1] * block_size, tiling.block_n,
        tiling.min_chunk // tiling.block_n,
        CAUSAL=causal, WINDOW=window or 0, MAPPED=tiles is not None, BLOCK=BLOCK,
        WHOLE_TILES_COST=WHOLE_TILES_COST, num_warps=4,
    )  # fmt: skip
    return out

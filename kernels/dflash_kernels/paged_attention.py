"""Attention of a few queries, or of a prefill chunk, over paged KV.

One program attends a tile of one row's queries with all query heads of one KV head (so that KV are read once for
the whole group) over one split of the context. With more than one split, each leaves a partial result and the log of
its softmax's denominator, and a second kernel merges them (FlashDecoding). `paged_attention_launch.py` chooses tiles
and splits from bounds; the real lengths are read on the device, so a captured graph serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_kernels.paged_attention_launch import Launch, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the reference only
    triton = None

LOG2_E = 1.4426950408889634

# What changes from step to step must not have Triton compile a kernel anew: these arguments keep one type, whatever
# their value or alignment. Layouts of rows are slices of one buffer.
STEP_NUMBERS = ["num_tiles", "num_splits", "query_bound", "table_width", "table_stride"]
STEP_POINTERS = ["start_ptr", "query_lens_ptr", "seq_lens_ptr", "tables_ptr", "tiles_ptr"]
# Splits that are merged at a time.
MERGE_BLOCK = 16


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


def paged_attention_reference(
    query: torch.Tensor, cache: torch.Tensor, rows: PagedBatch, causal: bool, window: int | None
) -> torch.Tensor:
    """Attention of each row over its own positions, one row at a time.

    query: `[num_tokens, num_heads, head_dim]`. cache: `[num_blocks, block_size, 2, num_kv_heads, head_dim]`. Softmax
    scale `head_dim ** -0.5`. With `causal` a query sees positions up to its own, else all of its row; with `window`
    only those less than `window` away. Returns `[num_tokens, num_heads * head_dim]` in the query's dtype, zeros where a
    token is no row's or sees nothing.
    """
    out = torch.zeros_like(query)
    block_size, head_dim = cache.shape[1], cache.shape[4]
    group = query.shape[1] // cache.shape[3]
    columns = (rows.query_start, rows.query_lens, rows.seq_lens)
    for row, (start, count, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        key = torch.arange(min(length, rows.block_tables.shape[1] * block_size), device=query.device)
        position = torch.arange(length - count, length, device=query.device)[:, None]
        blocks = rows.block_tables[row, key // block_size].clamp(min=0).long()
        k, v = cache[blocks, key % block_size].repeat_interleave(group, dim=2).unbind(1)
        visible = (key <= position) if causal else (key < length).expand(count, -1)
        if window is not None:
            visible = visible & ((key - position).abs() < window)
        scores = torch.einsum("qhd,khd->hqk", query[start : start + count], k) * head_dim**-0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).nan_to_num(0.0)
        out[start : start + count] = torch.einsum("hqk,khd->qhd", weights, v)
    return out.flatten(1)


if triton is not None:

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
    def _span(first, last, query_len, seq_len, table_len, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
        """The positions `[begin, end)` that any of the queries `[first, last)` sees; `end <= begin` for none."""
        offset = seq_len - query_len
        last_position = offset + tl.minimum(last, query_len) - 1
        begin = 0
        end = seq_len
        if CAUSAL:
            end = last_position + 1
        if WINDOW > 0:
            begin = tl.maximum(offset + first - WINDOW + 1, 0)
            end = tl.minimum(end, last_position + WINDOW)
        end = tl.minimum(end, table_len)
        # A tile past the end of its row, or a padding row.
        end = tl.where(first < query_len, end, begin)
        return begin, end

    @triton.jit
    def _chunk(begin, end, num_splits, BLOCK_N: tl.constexpr, SMALLEST: tl.constexpr):
        """How many positions a split has, when the real context has `[begin, end)`."""
        share = tl.cdiv(tl.maximum(end - begin, 0), num_splits)
        return tl.maximum(tl.cdiv(share, BLOCK_N) * BLOCK_N, SMALLEST)

    @triton.jit
    def _split_span(begin, end, split, num_splits, BLOCK_N: tl.constexpr, SMALLEST: tl.constexpr):
        """The positions `[begin, end)` of one split."""
        chunk = _chunk(begin, end, num_splits, BLOCK_N, SMALLEST)
        begin = begin + split * chunk
        return begin, tl.minimum(begin + chunk, end)

    @triton.jit
    def _lines(first, kv_head, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
        """Lines of a tile, each a query and one of the heads of the group: `[BLOCK_M]` each."""
        m = tl.arange(0, BLOCK_M)
        return m, first + m // GROUP, kv_head * GROUP + m % GROUP

    @triton.jit
    def _dot(a, b, acc, WIDEN: tl.constexpr):
        """`a @ b + acc`, float32 in full precision."""
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        return tl.dot(a, b, acc, input_precision="ieee")

    @triton.jit
    def _visible(key, position, end, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
        """Which keys `[1, BLOCK_N]` below `end` the queries at `position` `[BLOCK_M, 1]` see."""
        visible = key < end
        if CAUSAL:
            visible = visible & (key <= position)
        if WINDOW > 0:
            visible = visible & (key - position < WINDOW) & (position - key < WINDOW)
        return visible

    @triton.jit
    def _attend_keys(
        q, position, top, total, acc, key, end, keys_ptr, table_ptr, in_head, d, scale, block_stride, slot_stride,
        value_stride,
        BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
        WINDOW: tl.constexpr, WIDEN: tl.constexpr,
    ):  # fmt: skip
        """Online softmax over one more block of keys: each line's maximum, sum of weights, and weighted values."""
        inside = key < end
        # The block of each position by itself, so that BLOCK_N need not divide the block size or the reverse.
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0)
        slot = tl.maximum(block, 0).to(tl.int64) * block_stride + (key % BLOCK_SIZE) * slot_stride
        kv_offsets = slot[:, None] + d[None, :]
        kv_there = inside[:, None] & in_head
        k = tl.load(keys_ptr + kv_offsets, mask=kv_there, other=0.0)
        scores = _dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN) * scale
        scores = tl.where(_visible(key[None, :], position, end, CAUSAL, WINDOW), scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        # A line that has seen nothing yet must not become NaN.
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - finite_top[:, None])
        shrink = tl.exp2(top - finite_top)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(keys_ptr + value_stride + kv_offsets, mask=kv_there, other=0.0)
        acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None], WIDEN)
        return new_top, total, acc

    @triton.jit
    def _store_split(acc, top, total, line, is_query, in_head, d, partial_ptr, lse_ptr, HEAD_DIM: tl.constexpr):
        """Leave a split's result and the log of its softmax's denominator for the merge."""
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + line, lse, mask=is_query)
        tl.store(partial_ptr + (line * HEAD_DIM)[:, None] + d[None, :], acc, mask=is_query[:, None] & in_head)

    @triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_POINTERS)
    def _attend_kernel(
        query_ptr, cache_ptr, start_ptr, query_lens_ptr, seq_lens_ptr, tables_ptr, tiles_ptr, out_ptr, partial_ptr,
        lse_ptr, scale, num_tiles, num_splits, query_bound, table_width, table_stride, token_stride, head_stride,
        block_stride, slot_stride, value_stride, kv_head_stride,
        KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SMALLEST: tl.constexpr,
        SPLIT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MAPPED: tl.constexpr, WIDEN: tl.constexpr,
    ):  # fmt: skip
        """A tile of queries, the heads of one KV head, one split. `scale` includes log2(e): powers are of two."""
        tile = tl.program_id(0) // KV_HEADS
        kv_head = tl.program_id(0) % KV_HEADS
        split = tl.program_id(1)
        row, first, last = _tile(tile, tiles_ptr, num_tiles, query_bound, BLOCK_M // GROUP, MAPPED)
        query_len = tl.load(query_lens_ptr + row)
        seq_len = tl.load(seq_lens_ptr + row)
        begin, end = _span(first, last, query_len, seq_len, table_width * BLOCK_SIZE, CAUSAL, WINDOW)
        if SPLIT:
            begin, end = _split_span(begin, end, split, num_splits, BLOCK_N, SMALLEST)
            if begin >= end:
                return  # the merge reads only the splits that have positions

        m, query, head = _lines(first, kv_head, BLOCK_M, GROUP)
        d = tl.arange(0, BLOCK_D)
        in_head = d[None, :] < HEAD_DIM
        is_query = query < tl.minimum(last, query_len)
        token = (tl.load(start_ptr + row) + query).to(tl.int64)
        q_offsets = (token * token_stride + head * head_stride)[:, None] + d[None, :]
        q = tl.load(query_ptr + q_offsets, mask=is_query[:, None] & in_head, other=0.0)
        position = (seq_len - query_len + query)[:, None]

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        keys_ptr = cache_ptr + kv_head * kv_head_stride
        for base in range(begin, end, BLOCK_N):
            top, total, acc = _attend_keys(
                q, position, top, total, acc, base + tl.arange(0, BLOCK_N), end, keys_ptr, table_ptr, in_head, d, scale,
                block_stride, slot_stride, value_stride, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, WIDEN,
            )  # fmt: skip
        acc = tl.where(is_query[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
        if not SPLIT:
            out_offsets = ((token * (KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + d[None, :]
            tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=is_query[:, None] & in_head)
        else:
            line = ((tl.program_id(0) * BLOCK_M + m).to(tl.int64)) * num_splits + split
            _store_split(acc, top, total, line, is_query, in_head, d, partial_ptr, lse_ptr, HEAD_DIM)

    @triton.jit(do_not_specialize=STEP_NUMBERS[:-1], do_not_specialize_on_alignment=STEP_POINTERS)
    def _merge_kernel(
        start_ptr, query_lens_ptr, seq_lens_ptr, tiles_ptr, out_ptr, partial_ptr, lse_ptr, num_tiles, num_splits,
        query_bound, table_width,
        KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SMALLEST: tl.constexpr,
        BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MAPPED: tl.constexpr,
    ):  # fmt: skip
        """One query and head: the splits' partial results, weighted by their shares of the softmax's denominator."""
        tile = tl.program_id(0) // KV_HEADS
        kv_head = tl.program_id(0) % KV_HEADS
        m = tl.program_id(1)
        row, first, last = _tile(tile, tiles_ptr, num_tiles, query_bound, BLOCK_M // GROUP, MAPPED)
        query = first + m // GROUP
        query_len = tl.load(query_lens_ptr + row)
        if query >= tl.minimum(last, query_len):
            return  # what lies behind the row's own queries belongs to the next one
        seq_len = tl.load(seq_lens_ptr + row)
        begin, end = _span(first, last, query_len, seq_len, table_width * BLOCK_SIZE, CAUSAL, WINDOW)
        used = tl.cdiv(tl.maximum(end - begin, 0), _chunk(begin, end, num_splits, BLOCK_N, SMALLEST))

        d = tl.arange(0, BLOCK_D)
        s = tl.arange(0, BLOCK_S)
        line = ((tl.program_id(0) * BLOCK_M + m).to(tl.int64)) * num_splits
        top = float("-inf")
        total = 0.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for base in range(0, used, BLOCK_S):
            there = base + s < used
            lse = tl.load(lse_ptr + line + base + s, mask=there, other=float("-inf"))
            offsets = (line + base + s)[:, None] * HEAD_DIM + d[None, :]
            partial = tl.load(partial_ptr + offsets, mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(lse, 0))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(lse - finite_top)
            shrink = tl.exp2(top - finite_top)
            total = total * shrink + tl.sum(weights, 0)
            acc = acc * shrink + tl.sum(partial * weights[:, None], 0)
            top = new_top
        acc = acc / tl.where(total > 0, total, 1.0)
        token = (tl.load(start_ptr + row) + query).to(tl.int64)
        out_offsets = (token * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP) * HEAD_DIM + d
        tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)

    # The interpreter multiplies bfloat16 as if it were integers, so products are of float32 there.
    INTERPRETED = not isinstance(_attend_kernel, triton.JITFunction)

    def paged_attention(
        query: torch.Tensor,
        cache: torch.Tensor,
        rows: PagedBatch,
        launches: list[tuple[Launch, torch.Tensor | None]],
        causal: bool,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `paged_attention_reference`, without a wait for the device.

        `launches` are those of `plan_launches` for these rows and heads, each with its tiles on the device. Heads and
        the elements of a head must be contiguous in `cache`, the elements of a head in `query`. out: where the output
        is written; tokens that are no row's are left as they are there. None: a new tensor, zeros for those.
        """
        if out is None:
            out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        for launch, tiles in launches:
            _launch(query, cache, rows, launch, tiles, causal, window, out)
        return out

    def _launch(
        query: torch.Tensor,
        cache: torch.Tensor,
        rows: PagedBatch,
        launch: Launch,
        tiles: torch.Tensor | None,
        causal: bool,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        num_heads, head_dim = query.shape[1:]
        block_size, num_kv_heads = cache.shape[1], cache.shape[3]
        group = num_heads // num_kv_heads
        tiling, splits = launch.tiling, launch.num_splits
        programs = launch.num_tiles * num_kv_heads
        constants = {
            "KV_HEADS": num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(power_of_two(head_dim), 16),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "SMALLEST": tiling.min_chunk,
            "CAUSAL": causal,
            "WINDOW": window or 0,
            "MAPPED": tiles is not None,
        }
        # With one split nothing is partial; the pointers are not followed.
        lines = programs * tiling.block_m * splits if splits > 1 else 0
        partial = torch.empty(lines * head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(lines, dtype=torch.float32, device=query.device)
        lengths = (rows.query_start, rows.query_lens, rows.seq_lens)
        table_width = rows.block_tables.shape[1]
        _attend_kernel[(programs, splits)](
            query, cache, *lengths, rows.block_tables, tiles, out, partial, lse, LOG2_E * head_dim**-0.5,
            launch.num_tiles, splits, launch.query_len, table_width, rows.block_tables.stride(0),
            *query.stride()[:2], *cache.stride()[:4], **constants, SPLIT=splits > 1, WIDEN=INTERPRETED,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip
        if splits > 1:
            _merge_kernel[(programs, tiling.block_m // group * group)](
                *lengths, tiles, out, partial, lse, launch.num_tiles, splits, launch.query_len, table_width,
                **constants, BLOCK_S=MERGE_BLOCK, num_warps=4,
            )  # fmt: skip

"""One tile of attention over paged KV: its queries, all heads of one KV head, over some positions of its row.

The kernels that give tiles to programs (`paged_attention`, `invariant_attention`) share this code.
"""

from __future__ import annotations

from dflash_kernels.fp8_kv import load_kv
from dflash_kernels.triton_import import tl, triton


@triton.jit
def _lines(first, kv_head, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """Lines of a tile, each a query and one of the heads of the group: `[BLOCK_M]` each."""
    m = tl.arange(0, BLOCK_M)
    return first + m // GROUP, kv_head * GROUP + m % GROUP


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
    q, position, top, total, acc, key, end, keys_ptr, scales_ptr, kv_head, table_ptr, in_head, d, scale,
    block_stride, slot_stride, value_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax over one more block of keys: each line's maximum, sum of weights, and weighted values."""
    inside = key < end
    # The block of each position by itself, so that BLOCK_N need not divide the block size or the reverse.
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0)
    slot = tl.maximum(block, 0).to(tl.int64) * block_stride + (key % BLOCK_SIZE) * slot_stride
    kv_offsets = slot[:, None] + d[None, :]
    kv_there = inside[:, None] & in_head
    # Scales lie as the heads do.
    place = slot // HEAD_DIM + kv_head
    k = load_kv(keys_ptr, scales_ptr, kv_offsets, place, kv_there, inside, q.dtype)
    scores = _dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN) * scale
    scores = tl.where(_visible(key[None, :], position, end, CAUSAL, WINDOW), scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1))
    # A line that has seen nothing yet must not become NaN.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite_top[:, None])
    shrink = tl.exp2(top - finite_top)
    total = total * shrink + tl.sum(weights, 1)
    place += value_stride // HEAD_DIM
    v = load_kv(keys_ptr + value_stride, scales_ptr, kv_offsets, place, kv_there, inside, q.dtype)
    acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None], WIDEN)
    return new_top, total, acc


@triton.jit
def _full_span(
    first, last, query_len, seq_len, begin, end, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Of the blocks of keys from `begin` to `end`, from where to where all queries of a tile see all keys."""
    first_position = seq_len - query_len + first
    last_position = seq_len - query_len + tl.minimum(last, query_len) - 1
    full_begin, full_end = begin, end
    if CAUSAL:
        full_end = tl.minimum(full_end, first_position + 1)
    if WINDOW > 0:
        full_begin = tl.maximum(begin, last_position - WINDOW + 1)
        full_begin = begin + tl.cdiv(tl.minimum(full_begin, tl.maximum(end, begin)) - begin, BLOCK_N) * BLOCK_N
        full_end = tl.minimum(full_end, first_position + WINDOW)
    return full_begin, full_begin + tl.maximum(full_end - full_begin, 0) // BLOCK_N * BLOCK_N


@triton.jit
def _full_block(
    key, ptr, scales_ptr, kv_head, table_ptr, in_head, d, block_stride, slot_stride, value_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The keys, or the values, of positions that are all there: `[BLOCK_N, BLOCK_D]`."""
    block = tl.maximum(tl.load(table_ptr + key // BLOCK_SIZE), 0)
    slot = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * slot_stride
    place = (slot + value_stride) // HEAD_DIM + kv_head
    return load_kv(ptr + value_stride, scales_ptr, slot[:, None] + d[None, :], place, in_head, None, DTYPE)


@triton.jit
def _softmax(scores, top, total, scale):
    """Weights of one more block of scores that all are seen; each line's maximum and sum of weights with it, and
    what the values before it shrink to."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weights, new_top, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def _attend_full(
    q, top, total, acc, begin, end, keys_ptr, scales_ptr, kv_head, table_ptr, d, scale, block_stride, slot_stride,
    value_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDEN: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """As `_attend_keys`, over blocks of keys that every query sees, at least one. With the loop "overlapped" the
    product with a block's values begins after the scores of the next block and is added to a turn later (as in
    FlashAttention-3, arXiv 2407.08608): it runs beside the softmax of the next block."""
    in_head = None
    if HEAD_DIM != BLOCK_D:
        in_head = d[None, :] < HEAD_DIM
    key = begin + tl.arange(0, BLOCK_N)
    nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if LOOP == "overlapped":
        k = _full_block(
            key, keys_ptr, scales_ptr, kv_head, table_ptr, in_head, d, block_stride, slot_stride, 0, HEAD_DIM,
            BLOCK_SIZE, q.dtype,
        )  # fmt: skip
        weights, top, total, shrink = _softmax(_dot(q, tl.trans(k), nothing, WIDEN), top, total, scale)
        begin += BLOCK_N
    for base in range(begin, end, BLOCK_N):
        next_key = base + tl.arange(0, BLOCK_N)
        k = _full_block(
            next_key, keys_ptr, scales_ptr, kv_head, table_ptr, in_head, d, block_stride, slot_stride, 0, HEAD_DIM,
            BLOCK_SIZE, q.dtype,
        )  # fmt: skip
        scores = _dot(q, tl.trans(k), nothing, WIDEN)
        if LOOP != "overlapped":
            weights, top, total, shrink = _softmax(scores, top, total, scale)
            key = next_key
        v = _full_block(
            key, keys_ptr, scales_ptr, kv_head, table_ptr, in_head, d, block_stride, slot_stride, value_stride,
            HEAD_DIM, BLOCK_SIZE, q.dtype,
        )  # fmt: skip
        acc = _dot(weights.to(q.dtype), v, acc * shrink[:, None], WIDEN)
        if LOOP == "overlapped":
            weights, top, total, shrink = _softmax(scores, top, total, scale)
            key = next_key
    if LOOP == "overlapped":
        v = _full_block(
            key, keys_ptr, scales_ptr, kv_head, table_ptr, in_head, d, block_stride, slot_stride, value_stride,
            HEAD_DIM, BLOCK_SIZE, q.dtype,
        )  # fmt: skip
        acc = _dot(weights.to(q.dtype), v, acc * shrink[:, None], WIDEN)
    return top, total, acc


@triton.jit
def attend_tile(
    query_ptr, cache_ptr, scales_ptr, start_ptr, tables_ptr, row, first, last, kv_head, query_len, seq_len, begin,
    end, scale, table_stride, token_stride, head_stride, block_stride, slot_stride, value_stride, kv_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WIDEN: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """A tile's queries over the positions `[begin, end)`: the attention, 0 where a line saw nothing or is no
    query's, each line's maximum, its sum of weights, token and head, and whether it is a query's. `scale` includes
    log2(e): powers are of two. LOOP: as of `Tiling`."""
    query, head = _lines(first, kv_head, BLOCK_M, GROUP)
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
    masked = begin
    if LOOP != "masked":
        full_begin, masked = _full_span(first, last, query_len, seq_len, begin, end, CAUSAL, WINDOW, BLOCK_N)
        if WINDOW > 0:
            for base in range(begin, full_begin, BLOCK_N):
                top, total, acc = _attend_keys(
                    q, position, top, total, acc, base + tl.arange(0, BLOCK_N), end, keys_ptr, scales_ptr, kv_head,
                    table_ptr, in_head, d, scale, block_stride, slot_stride, value_stride, HEAD_DIM, BLOCK_SIZE,
                    BLOCK_M, BLOCK_N, CAUSAL, WINDOW, WIDEN,
                )  # fmt: skip
        if full_begin < masked:
            top, total, acc = _attend_full(
                q, top, total, acc, full_begin, masked, keys_ptr, scales_ptr, kv_head, table_ptr, d, scale,
                block_stride, slot_stride, value_stride, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_M, BLOCK_N, WIDEN,
                LOOP,
            )  # fmt: skip
    for base in range(masked, end, BLOCK_N):
        top, total, acc = _attend_keys(
            q, position, top, total, acc, base + tl.arange(0, BLOCK_N), end, keys_ptr, scales_ptr, kv_head,
            table_ptr, in_head, d, scale, block_stride, slot_stride, value_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_M,
            BLOCK_N, CAUSAL, WINDOW, WIDEN,
        )  # fmt: skip
    acc = tl.where(is_query[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    return acc, top, total, token, head, is_query

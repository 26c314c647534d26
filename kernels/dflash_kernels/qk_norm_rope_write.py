"""What attention needs of a layer's projection, in one pass over it: queries and keys normalised (where the model does
so) and rotated, K and V written to their slots of the paged cache.

Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split form: number i of a head pairs with number
i + head_dim / 2. Tables are `[max_positions, head_dim]` with the sine's first half negated, so that the rotation is
`x * cos + swap_halves(x) * sin`. A slot below 0 marks a padding token, whose KV is not written (a
captured graph runs padding rows too). `context_write.py` shares all of this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_kernels.fp8_kv import quantise_kv_reference, store_kv
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


def head_norm_reference(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over each head, rounded before and after the weight: `[..., heads, head_dim]` with a weight for each head
    that broadcasts to it. A weight in float32 is multiplied by before the one rounding of heads in another dtype."""
    if weight.dtype != heads.dtype:
        return (F.rms_norm(heads.float(), heads.shape[-1:], None, eps) * weight).to(heads.dtype)
    return F.rms_norm(heads, heads.shape[-1:], None, eps) * weight


def rotate_reference(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `heads` `[..., n, num_heads, head_dim]` by tables that broadcast to them: `[n, 1, head_dim]`."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def kv_write_reference(
    kv: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    padded: bool = False,
    scales: torch.Tensor | None = None,
) -> None:
    """Copy `kv[i]` to `cache[slots[i]]`. `padded` says that slots below 0 may be among them.

    kv: `[num_tokens, 2, num_kv_heads, head_dim]`. slots: int64 `[num_tokens]`, distinct where not negative; negative
    ones are skipped. cache: `[num_slots, 2, num_kv_heads, head_dim]` of any floating dtype, changed in place. scales:
    with a cache of uint8, float32 `[num_slots, 2, num_kv_heads]`: KV becomes FP8 (`fp8_kv`).
    """
    if padded:
        written = slots >= 0
        kv, slots = kv[written], slots[written]
    if scales is not None:
        kv, kv_scales = quantise_kv_reference(kv)
        scales.index_copy_(0, slots, kv_scales)
    cache.index_copy_(0, slots, kv.to(cache.dtype))


def qk_norm_rope_write_reference(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    padded: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotated queries `[n, num_heads, head_dim]`; K and V go to `cache`.

    qkv: `[n, (num_heads + 2 * num_kv_heads) * head_dim]`, queries before keys before values. qk_norm:
    `[num_heads + num_kv_heads, head_dim]`, or None for no norm. cos, sin: `[n, 1, head_dim]`, each token's own row of
    the tables. slots: int64 `[n]`, distinct where not negative; with `padded` there may be negative ones, which are
    skipped. cache: `[num_slots, 2, num_kv_heads, head_dim]`, changed in place; its dtype and scales: as of
    `kv_write_reference`.
    """
    num_kv_heads, head_dim = cache.shape[2:]
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    rotated = heads[:, : num_heads + num_kv_heads]
    if qk_norm is not None:
        rotated = head_norm_reference(rotated, qk_norm, eps)
    rotated = rotate_reference(rotated, cos, sin)
    kv = torch.stack([rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]], dim=1)
    kv_write_reference(kv, slots, cache, padded, scales)
    return rotated[:, :num_heads]


@triton.jit
def norm_and_rotate(
    low, high, weight_low, weight_high, cos, sin, eps,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads, `[heads, half]`, in float32, rounded to DTYPE wherever the reference rounds, so
    that greedy choices are the same as far as they can be. cos, sin: those of the high half, `[1, half]`."""
    if NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = ((low * scale).to(DTYPE).to(tl.float32) * weight_low).to(DTYPE).to(tl.float32)
        high = ((high * scale).to(DTYPE).to(tl.float32) * weight_high).to(DTYPE).to(tl.float32)
    turned_low = (low * cos).to(DTYPE).to(tl.float32) - high * sin
    turned_high = (high * cos).to(DTYPE).to(tl.float32) + low * sin
    return turned_low, turned_high


@cached_launches
@triton.jit
def _qk_norm_rope_write_kernel(
    qkv_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, query_ptr, cache_ptr, scales_ptr,
    qkv_stride, table_stride, cache_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program does HEADS heads of one token; they may be queries, keys and values at once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half_dim: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, HALF)
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (pair < half_dim)[None, :]
    is_rotated = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & (pair < half_dim)[None, :]
    offsets = head[:, None] * HEAD_DIM + pair[None, :]

    weight_low, weight_high = 0.0, 0.0
    if NORM:
        weight_low = tl.load(norm_ptr + offsets, mask=is_rotated, other=0.0).to(tl.float32)
        weight_high = tl.load(norm_ptr + offsets + half_dim, mask=is_rotated, other=0.0).to(tl.float32)
    source = qkv_ptr + token * qkv_stride + offsets
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half_dim, mask=inside, other=0.0).to(tl.float32)
    table = tl.load(positions_ptr + token) * table_stride + half_dim + pair[None, :]
    cos = tl.load(cos_ptr + table, mask=(pair < half_dim)[None, :], other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=(pair < half_dim)[None, :], other=0.0).to(tl.float32)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    turned_low, turned_high = norm_and_rotate(low, high, weight_low, weight_high, cos, sin, eps, HEAD_DIM, NORM, dtype)
    low = tl.where(is_rotated, turned_low, low).to(dtype)
    high = tl.where(is_rotated, turned_high, high).to(dtype)

    is_query = (head < NUM_HEADS)[:, None] & inside
    query = query_ptr + token * NUM_HEADS * HEAD_DIM + offsets
    tl.store(query, low, mask=is_query)
    tl.store(query + half_dim, high, mask=is_query)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        is_kv = (head >= NUM_HEADS)[:, None] & inside
        # Keys and then values, as they follow the queries in the projection.
        written = cache_ptr + slot * cache_stride + offsets - NUM_HEADS * HEAD_DIM
        place = slot * (2 * NUM_KV_HEADS) + head - NUM_HEADS
        is_kv_head = (head >= NUM_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
        cache_dtype: tl.constexpr = cache_ptr.dtype.element_ty
        store_kv(low, high, written, half_dim, is_kv, scales_ptr, place, is_kv_head, cache_dtype)


def head_blocks(num_heads: int, head_dim: int) -> tuple[int, int]:
    """How many heads a program takes and the power of two that half a head fits in: about 1,024 numbers, 8 for each
    thread of 4 warps, whatever the number of tokens (so that no token's result depends on it)."""
    half = triton.next_power_of_2(head_dim // 2)
    return min(max(1, 512 // half), triton.next_power_of_2(num_heads)), half


def qk_norm_rope_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    padded: bool = True,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `qk_norm_rope_write_reference`, slots below 0 being skipped in any case, but for the tables: cos, sin are the
    whole ones, `[max_positions, head_dim]`, and `positions` (int64 `[n]`) says which row is each token's.

    Rows of `qkv`, slots of `cache`, `qk_norm` and `scales` must be contiguous.
    """
    num_kv_heads, head_dim = cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if len(qkv):
        total = num_heads + 2 * num_kv_heads
        heads, half = head_blocks(total, head_dim)
        _qk_norm_rope_write_kernel[(len(qkv), triton.cdiv(total, heads))](
            qkv, qkv if qk_norm is None else qk_norm, cos, sin, positions, slots, query, cache,
            scales, qkv.stride(0), cos.stride(0), cache.stride(0), eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, NORM=qk_norm is not None,
            HEADS=heads, HALF=half, num_warps=4,
        )  # fmt: skip
    return query

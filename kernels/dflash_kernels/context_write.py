"""The drafter's context injection: of one product for all its layers, keys normalised and rotated, and K and V of every
layer written to the slots of that layer's cache, in one launch.

What `qk_norm_rope_write.py` says of rotation, tables and slots holds here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.qk_norm_rope_write import (
    head_blocks,
    head_norm_reference,
    kv_write_reference,
    norm_and_rotate,
    rotate_reference,
)
from dflash_kernels.triton_import import tl, triton


def context_write_reference(
    projected: torch.Tensor,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    caches: Sequence[torch.Tensor] | torch.Tensor,
    padded: bool = False,
) -> None:
    """Write the context KV of n tokens to every layer.

    projected: `[n, num_layers * 2 * num_kv_heads * head_dim]`, each layer's keys before its values. k_norm:
    `[num_layers, num_kv_heads, head_dim]`, or None for no norm. cos, sin: `[n, 1, head_dim]`, each token's own row of
    the tables. slots: int64 `[n]`, distinct where not negative; with `padded` there may be negative ones, which are
    skipped. caches: for each layer `[num_slots, 2, num_kv_heads, head_dim]`, changed in place.
    """
    kv = projected.view(len(projected), len(caches), *caches[0].shape[1:]).transpose(0, 1).contiguous()
    keys = kv[:, :, 0] if k_norm is None else head_norm_reference(kv[:, :, 0], k_norm[:, None], eps)
    kv[:, :, 0] = rotate_reference(keys, cos, sin)
    for layer_kv, cache in zip(kv, caches, strict=True):
        kv_write_reference(layer_kv, slots, cache, padded)


@cached_launches
@triton.jit
def _context_write_kernel(
    projected_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, caches_ptr,
    projected_stride, table_stride, layer_stride, slot_stride, eps,
    NUM_LAYERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program does HEADS of the `num_layers * 2 * num_kv_heads` heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        layer = head // (2 * NUM_KV_HEADS)
        in_layer = head % (2 * NUM_KV_HEADS)
        half_dim: tl.constexpr = HEAD_DIM // 2
        pair = tl.arange(0, HALF)
        inside = (head < NUM_LAYERS * 2 * NUM_KV_HEADS)[:, None] & (pair < half_dim)[None, :]
        is_key = (in_layer < NUM_KV_HEADS)[:, None] & inside

        source = projected_ptr + token * projected_stride + head[:, None] * HEAD_DIM + pair[None, :]
        low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + half_dim, mask=inside, other=0.0).to(tl.float32)
        weight_low, weight_high = low, high
        if NORM:
            norm = norm_ptr + (layer * NUM_KV_HEADS + in_layer)[:, None] * HEAD_DIM + pair[None, :]
            weight_low = tl.load(norm, mask=is_key, other=0.0).to(tl.float32)
            weight_high = tl.load(norm + half_dim, mask=is_key, other=0.0).to(tl.float32)
        table = tl.load(positions_ptr + token) * table_stride + half_dim + pair[None, :]
        cos = tl.load(cos_ptr + table, mask=(pair < half_dim)[None, :], other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table, mask=(pair < half_dim)[None, :], other=0.0).to(tl.float32)
        dtype: tl.constexpr = caches_ptr.dtype.element_ty
        turned_low, turned_high = norm_and_rotate(
            low, high, weight_low, weight_high, cos, sin, eps, HEAD_DIM, NORM, dtype
        )

        written = caches_ptr + layer.to(tl.int64)[:, None] * layer_stride + slot * slot_stride
        written += in_layer[:, None] * HEAD_DIM + pair[None, :]
        tl.store(written, tl.where(is_key, turned_low, low).to(dtype), mask=inside)
        tl.store(written + half_dim, tl.where(is_key, turned_high, high).to(dtype), mask=inside)


def stacked(caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """The layers' slots as one tensor `[num_layers, num_slots, 2, num_kv_heads, head_dim]`, without a copy.

    Raises `ValueError` unless they follow one another in one allocation, as those of `PagedKVCache` do.
    """
    first = caches[0]
    size = first.numel()
    for index, cache in enumerate(caches):
        follows = cache.data_ptr() == first.data_ptr() + index * size * cache.element_size() and cache.is_contiguous()
        if not follows or cache.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            raise ValueError(
                f"the KV of layer {index} does not follow that of layer {index - 1} in one allocation; allocate the "
                "layers as one tensor, which the Triton operations write in one launch"
            )
    return first.as_strided((len(caches), *first.shape), (size, *first.stride()))


def context_write(
    projected: torch.Tensor,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: Sequence[torch.Tensor],
    padded: bool = True,
) -> None:
    """As `context_write_reference`, slots below 0 being skipped in any case, but for the tables: cos, sin are the whole
    ones, `[max_positions, head_dim]`, and `positions` (int64 `[n]`) says which row is each token's. Raises
    `ValueError` unless the caches are parts of one allocation.

    Rows of `projected`, slots of `caches`, and `k_norm` must be contiguous.
    """
    if len(projected) == 0:
        return
    memory = stacked(caches)
    num_layers, _, _, num_kv_heads, head_dim = memory.shape
    total = num_layers * 2 * num_kv_heads
    heads, half = head_blocks(total, head_dim)
    _context_write_kernel[(len(projected), triton.cdiv(total, heads))](
        projected, projected if k_norm is None else k_norm, cos, sin, positions, slots, memory,
        projected.stride(0), cos.stride(0), memory.stride(0), memory.stride(1), eps,
        NUM_LAYERS=num_layers, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, NORM=k_norm is not None,
        HEADS=heads, HALF=half, num_warps=4,
    )  # fmt: skip

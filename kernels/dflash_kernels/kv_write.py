"""Write the K and V of tokens to their slots of a paged cache. Called by attention backends.

A slot below 0 marks a padding token, whose K/V is written nowhere (trap 7: a captured graph runs padding rows too).
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the reference only
    triton = None


def kv_write_reference(kv: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, padded: bool = False) -> None:
    """Copy `kv[i]` to `cache[slots[i]]`. `padded` says that slots below 0 may be among them.

    kv: `[num_tokens, 2, num_kv_heads, head_dim]`. slots: int64 `[num_tokens]`, distinct where not negative; negative
    ones are skipped. cache: `[num_slots, 2, num_kv_heads, head_dim]`, changed in place.
    """
    if padded:
        written = slots >= 0
        kv, slots = kv[written], slots[written]
    cache.index_copy_(0, slots, kv)


if triton is not None:

    @triton.jit
    def _kv_write_kernel(kv_ptr, slots_ptr, cache_ptr, row_size, kv_stride, cache_stride, BLOCK: tl.constexpr):
        """One program copies one piece of one token's row."""
        token = tl.program_id(0)
        slot = tl.load(slots_ptr + token)
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < row_size
        if slot >= 0:
            values = tl.load(kv_ptr + token.to(tl.int64) * kv_stride + offsets, mask=inside)
            tl.store(cache_ptr + slot * cache_stride + offsets, values, mask=inside)

    def kv_write(kv: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
        """As `kv_write_reference`, without a wait for the device. Rows of `kv` and `cache` must be contiguous."""
        row_size = kv[0].numel() if len(kv) else 0
        if row_size == 0:
            return
        block = min(1024, triton.next_power_of_2(row_size))
        grid = (len(kv), triton.cdiv(row_size, block))
        _kv_write_kernel[grid](kv, slots, cache, row_size, kv.stride(0), cache.stride(0), BLOCK=block)

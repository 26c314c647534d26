"""RMSNorm, alone and with the residual add before it (Zhang and Sennrich, arXiv 1910.07467).

A decoder layer adds its output to the residual stream, and a norm of the sum follows: fused, the sum is written once
and not read again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension: `[n, size]` -> the same shape and dtype,
    computed in float32 at least and rounded once. weight: `[size]`, in that dtype or in float32."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual` and the sum itself, all `[n, size]`. The norm reads the sum as it is stored, rounded
    to the dtype."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total


@cached_launches
@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, x_stride, residual_stride, eps,
    SIZE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program norms one row. Without ADD neither `residual_ptr` nor `total_ptr` is touched."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < SIZE
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + offsets, mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + offsets, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(normed_ptr + row * SIZE + offsets, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    add: bool,
) -> None:
    size = weight.shape[0]
    block = triton.next_power_of_2(size)
    # The number of warps depends on the row's size alone, never on how many rows there are: so does the order in
    # which a row is summed, and no token's result depends on what else runs. 16 numbers for each thread.
    _rms_norm_kernel[(len(x),)](
        x, residual, weight, normed, total, x.stride(0), residual.stride(0), eps,
        SIZE=size, ADD=add, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm_reference`. Rows of `x` must be contiguous."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _launch(x, x, weight, normed, normed, eps, add=False)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `add_rms_norm_reference`. Rows of `x` and `residual` must be contiguous."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(normed)
    if len(x):
        _launch(x, residual, weight, normed, total, eps, add=True)
    return normed, total

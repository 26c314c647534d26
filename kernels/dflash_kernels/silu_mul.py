"""The gate of an MLP: SiLU of one half times the other (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_kernels.dependent_launch import after_kernel_before, dependent_launch
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, rounded after the SiLU and after the product: `[n, 2 * inner]`, gate before up, to
    `[n, inner]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def invariant_silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_mul_reference`, the same bits for a number wherever it lies. torch's SiLU computes the numbers at the
    end of a thread's share, which are fewer than a vector, in another way than the others."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1.0 + torch.exp(-wide))).to(gate.dtype) * up


@cached_launches
@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, output_ptr, row_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program computes one piece of one row."""
    after_kernel_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < INNER
    gate = tl.load(gate_up_ptr + row * row_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + INNER + offsets, mask=inside, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output_ptr + row * INNER + offsets, (activated * up).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_mul_reference`. Rows of `gate_up` must be contiguous."""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        # 8 numbers for each thread: loads of 16 bytes in half precision.
        block = min(1024, triton.next_power_of_2(inner))
        grid = (num_rows, triton.cdiv(inner, block))
        _silu_mul_kernel[grid](
            gate_up, output, gate_up.stride(0), INNER=inner, BLOCK=block, num_warps=max(1, block // 256),
            **dependent_launch(),
        )  # fmt: skip
    return output

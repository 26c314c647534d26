"""The gates of MLPs: an activation of one half times the other.

SiLU and GELU (its tanh form, arXiv 1606.08415; Shazeer, arXiv 2002.05202), and gpt-oss's SwiGLU, whose halves are cut
off, with one added to one of them: `(up + 1) * gate * sigmoid(alpha * gate)`, the gate at most `limit`, up within
`[-limit, limit]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# sqrt(2 / pi), and the cube's part in GELU.
SCALE, CUBE = 0.7978845608028654, 0.044715

Clamp = tuple[float, float]
"""alpha and limit."""


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, rounded after the SiLU and after the product: `[n, 2 * inner]`, gate before up, to
    `[n, inner]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, as `silu_mul_reference`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def invariant_silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_mul_reference`, the same bits for a number wherever it lies. torch's SiLU computes the numbers at the
    end of a thread's share, which are fewer than a vector, in another way than the others."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1.0 + torch.exp(-wide))).to(gate.dtype) * up


def invariant_gelu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """As `gelu_mul_reference`, the same bits for a number wherever it lies (`invariant_silu_mul_reference`)."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1.0 + torch.exp(-2.0 * SCALE * (wide + CUBE * wide * wide * wide)))).to(gate.dtype) * up


def clamped_swiglu_reference(gate_up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    """`[n, 2 * inner]`, gate before up, to `[n, inner]` in its dtype, computed in float32 at least and rounded once. A
    number has the same bits wherever it lies, which is not so of torch's own sigmoid."""
    alpha, limit = clamp
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    activated = (up.clamp(-limit, limit) + 1.0) * (gate / (1.0 + torch.exp(-alpha * gate)))
    return activated.to(gate_up.dtype)


@triton.jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """As `clamped_swiglu_reference`, of float32 halves."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))


_SCALE, _CUBE = tl.constexpr(SCALE), tl.constexpr(CUBE)


@triton.jit
def gelu(x):
    """GELU of float32 numbers. `0.5 * (1 + tanh(z))` is the logistic function of 2z."""
    return x / (1.0 + tl.exp((x + x * _CUBE * x * x) * (-2.0 * _SCALE)))


@cached_launches
@triton.jit
def _gated_mul_kernel(
    gate_up_ptr, output_ptr, row_stride,
    INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """One program computes one piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < INNER
    gate = tl.load(gate_up_ptr + row * row_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + INNER + offsets, mask=inside, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    activated = gelu(gate) if GELU else gate / (1.0 + tl.exp(-gate))
    activated = activated.to(dtype).to(tl.float32)
    tl.store(output_ptr + row * INNER + offsets, (activated * up).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_mul_reference`. Rows of `gate_up` must be contiguous."""
    return _gated_mul(gate_up, is_gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `gelu_mul_reference`. Rows of `gate_up` must be contiguous."""
    return _gated_mul(gate_up, is_gelu=True)


def _gated_mul(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        # 8 numbers for each thread: loads of 16 bytes in half precision.
        block = min(1024, triton.next_power_of_2(inner))
        grid = (num_rows, triton.cdiv(inner, block))
        _gated_mul_kernel[grid](
            gate_up, output, gate_up.stride(0), INNER=inner, BLOCK=block, GELU=is_gelu,
            num_warps=max(1, block // 256),
        )  # fmt: skip
    return output

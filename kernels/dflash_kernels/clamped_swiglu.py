"""gpt-oss's gate of an expert: a SwiGLU (Shazeer, arXiv 2002.05202) whose halves are cut off, with one added to one of
them: `(up + 1) * gate * sigmoid(alpha * gate)`, the gate at most `limit`, up within `[-limit, limit]`."""

from __future__ import annotations

import torch

from dflash_kernels.triton_import import tl, triton

Clamp = tuple[float, float]
"""alpha and limit."""


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

"""Experts with products whose rows do not depend on one another (`invariant_linear`)."""

from __future__ import annotations

import torch

from dflash_kernels import moe
from dflash_kernels.activation import (
    Clamp,
    clamped_swiglu_reference,
    invariant_gelu_mul_reference,
    invariant_silu_mul_reference,
)
from dflash_kernels.invariant_linear import invariant_linear_reference


def invariant_experts_mlp_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: moe.Biases | None = None,
    clamp: Clamp | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `moe.experts_mlp_reference`, the same bits for a token whatever other tokens go to its experts. A token's
    results are added up in float32, one expert after the other, and rounded once."""
    num_tokens, per_token = experts.shape
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=len(gate_up)).tolist()
    outputs = x.new_empty(num_tokens * per_token, x.shape[-1])
    for expert, entries in enumerate(order.split(counts)):
        if len(entries):
            of_gate_up, of_down = moe.biases_of(biases, expert)
            inner = invariant_linear_reference(x[entries // per_token], gate_up[expert], of_gate_up)
            gate = invariant_gelu_mul_reference if is_gelu else invariant_silu_mul_reference
            inner = clamped_swiglu_reference(inner, clamp) if clamp else gate(inner)
            outputs[entries] = invariant_linear_reference(inner, down[expert], of_down)
    weighted = (outputs.view(num_tokens, per_token, -1) * weights[:, :, None]).float()
    total = weighted[:, 0].clone()
    for rank in range(1, per_token):
        total += weighted[:, rank]
    return total.to(x.dtype)


# One tile for every number of tokens: between those for decode rows and those for long prompts.
TILE = moe.TILES[2]


def invariant_experts_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: moe.Biases | None = None,
    clamp: Clamp | None = None,
    tile: moe.Tile | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `moe.experts_mlp`, in tiles that do not follow the number of tokens. tile: other than `TILE`."""
    return moe.experts_mlp(x, gate_up, down, weights, experts, biases, clamp, tile or TILE, is_gelu=is_gelu)

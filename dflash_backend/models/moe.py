"""Mixture of experts in place of the MLP of a decoder layer, as Qwen3-MoE has it (arXiv 2505.09388).

The router sends each token to its most likely experts, and each of them runs over all of its tokens. On a GPU this is
done by kernels that read nothing back to the host, so that a captured graph holds for every routing; on a CPU by torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.spec import DecoderSpec, MoeSpec
from dflash_backend.models.mlp import Shapes, Tensors, take_fused
from dflash_backend.models.ops import LayerOps


@dataclass(frozen=True)
class SparseMlp:
    """router: `[num_experts, hidden]`; gate_up: `[num_experts, 2 * intermediate, hidden]`; down:
    `[num_experts, hidden, intermediate]`."""

    moe: MoeSpec
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def shapes(spec: DecoderSpec, moe: MoeSpec) -> Shapes:
        """The checkpoint tensors of one such MLP, by their names within it."""
        hidden, inner = spec.hidden_size, moe.intermediate_size
        shapes: Shapes = {"gate.weight": (moe.num_experts, hidden)}
        for expert in range(moe.num_experts):
            shapes |= {
                f"experts.{expert}.gate_proj.weight": (inner, hidden),
                f"experts.{expert}.up_proj.weight": (inner, hidden),
                f"experts.{expert}.down_proj.weight": (hidden, inner),
            }
        return shapes

    @classmethod
    def take(cls, tensors: Tensors, prefix: str, moe: MoeSpec) -> SparseMlp:
        """Stack the experts' tensors, removing them from `tensors`."""
        experts = [f"{prefix}experts.{expert}." for expert in range(moe.num_experts)]
        return cls(
            moe,
            router=tensors.pop(f"{prefix}gate.weight"),
            gate_up=torch.stack([take_fused(tensors, name, "gate_proj.weight", "up_proj.weight") for name in experts]),
            down=torch.stack([tensors.pop(f"{name}down_proj.weight") for name in experts]),
        )

    def forward(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`. A token's result is the sum over its own experts in its router's order,
        whatever other tokens are there."""
        weights, experts = self.route(x, ops)
        return ops.experts_mlp(x, self.gate_up, self.down, weights, experts)

    def route(self, x: torch.Tensor, ops: LayerOps) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token: their weights, in `x`'s dtype, and ids, both `[n, experts_per_token]`, the most
        likely first."""
        return ops.route(F.linear(x, self.router), self.moe.experts_per_token, self.moe.norm_topk_prob)

"""Mixture of experts in place of the MLP of a decoder layer, as Qwen3-MoE has it (arXiv 2505.09388).

The router sends each token to its most likely experts. Tokens are sorted by expert so that each expert that anyone
chose runs once over all of its tokens. How many tokens each has is read back to the host: on a GPU one synchronisation
for each such layer, so this form cannot be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.spec import DecoderSpec, MoeSpec
from dflash_backend.models.mlp import Shapes, Tensors, take_fused


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`. A token's result is the sum over its own experts in its router's order,
        whatever other tokens are there."""
        weights, experts = self.route(x)
        num_tokens, per_token = experts.shape
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.moe.num_experts).tolist()
        # Entry i of the sorted list belongs to token order[i] // per_token.
        chunks = enumerate(x[order // per_token].split(counts))
        done = torch.cat([self.run_expert(expert, chunk) for expert, chunk in chunks if len(chunk)])
        outputs = torch.empty_like(done)
        outputs[order] = done
        return (outputs.view(num_tokens, per_token, -1) * weights[:, :, None]).sum(dim=1)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token: their weights, in `x`'s dtype, and ids, both `[n, experts_per_token]`, the most
        likely first."""
        probabilities = F.softmax(F.linear(x, self.router), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`, one expert alone."""
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[expert])

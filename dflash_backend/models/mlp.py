"""The MLPs of a decoder layer: gated (Shazeer, arXiv 2002.05202), and a mixture of experts, as Qwen3-MoE has it
(arXiv 2505.09388), with a shared expert Qwen3-Next and, with tensors of its own (`gpt_oss.py`), gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_backend.checkpoints.spec import MoeSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.experts import ExpertWeight, read_experts, run_experts
from dflash_backend.models.linear import Linear, Parts, ProductOf
from dflash_backend.models.ops import LayerOps


class Mlp(Protocol):
    """What a decoder layer has behind its attention."""

    def with_product(self, product_of: ProductOf) -> Mlp:
        """The same weights, multiplied by what `product_of` chooses for each."""

    def forward(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`."""


@dataclass(frozen=True)
class DenseMlp(Parts):
    """gate_up: hidden -> 2 * intermediate, gate before up; down: intermediate -> hidden. is_gelu: the gate is GELU, by
    its tanh form, else SiLU."""

    gate_up: Linear
    down: Linear
    is_gelu: bool = False

    @classmethod
    def read(
        cls, source: WeightSource, prefix: str, hidden: int, inner: int, bias: bool, is_gelu: bool = False
    ) -> DenseMlp:
        """The MLP whose tensors' names begin with `prefix`. hidden, inner: size of a token, outside and inside."""
        return cls(
            gate_up=Linear.read(source, prefix, {"gate_proj": inner, "up_proj": inner}, hidden, bias),
            down=Linear.read(source, prefix, {"down_proj": hidden}, inner, bias),
            is_gelu=is_gelu,
        )

    def forward(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`."""
        return ops.gated_mlp(self.gate_up, self.down, x, self.is_gelu)


@dataclass(frozen=True)
class SparseMlp(Parts):
    """The router sends each token to its most likely experts, each of which runs over all of its tokens.

    router: hidden -> num_experts. gate_up: `[num_experts, 2 * intermediate, hidden]`; down:
    `[num_experts, hidden, intermediate]`; or both quantised. biases: `[num_experts, 2 * intermediate]` and
    `[num_experts, hidden]`, or None. The kernels read nothing back to the host, so that a captured graph holds for
    every routing; torch waits for the device.
    """

    moe: MoeSpec
    router: Linear
    gate_up: ExpertWeight
    down: ExpertWeight
    biases: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def read(cls, source: WeightSource, prefix: str, hidden: int, moe: MoeSpec) -> SparseMlp:
        """The MLP whose tensors' names begin with `prefix`. hidden: size of a token."""
        router = Linear.read(source, prefix, {"gate": moe.num_experts}, hidden)
        return cls(moe, router, *read_experts(source, prefix, hidden, moe))

    def forward(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`. A token's result is the sum over its own experts in its router's order,
        whatever other tokens are there."""
        weights, experts = self.route(x, ops)
        swiglu = self.moe.swiglu
        clamp = None if swiglu is None else (swiglu.alpha, swiglu.limit)
        return run_experts(ops, x, (self.gate_up, self.down), weights, experts, self.biases, clamp)

    def route(self, x: torch.Tensor, ops: LayerOps) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token: their weights, in `x`'s dtype, and ids, both `[n, experts_per_token]`, the most
        likely first."""
        return ops.route(self.router(x), self.moe.experts_per_token, self.moe.norm_topk_prob)


@dataclass(frozen=True)
class SharedExpertMlp(Parts):
    """Experts, and one more that runs over every token, times the sigmoid of a gate: hidden -> 1."""

    sparse: SparseMlp
    shared: DenseMlp
    gate: Linear

    @classmethod
    def read(cls, source: WeightSource, prefix: str, hidden: int, moe: MoeSpec) -> SharedExpertMlp:
        """The MLP whose tensors' names begin with `prefix`. hidden: size of a token."""
        assert moe.shared_size is not None
        return cls(
            SparseMlp.read(source, prefix, hidden, moe),
            DenseMlp.read(source, f"{prefix}shared_expert.", hidden, moe.shared_size, bias=False),
            Linear.read(source, prefix, {"shared_expert_gate": 1}, hidden),
        )

    def forward(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`."""
        return self.sparse.forward(x, ops) + self.gate(x).sigmoid() * self.shared.forward(x, ops)

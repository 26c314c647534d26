"""The SiLU-gated MLP of a decoder layer (Shazeer, arXiv 2002.05202), gate and up as one product.

`moe.py` has the form with experts; `layers.py` puts either into a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.ops import LayerOps

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DenseMlp:
    """gate_up: `[2 * intermediate, hidden]`; down: `[hidden, intermediate]`. Biases are None where there are none."""

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    @staticmethod
    def shapes(spec: DecoderSpec, bias: bool) -> Shapes:
        """The checkpoint tensors of one MLP, by their names within it."""
        hidden, inner = spec.hidden_size, spec.intermediate_size
        shapes: Shapes = {
            "gate_proj.weight": (inner, hidden),
            "up_proj.weight": (inner, hidden),
            "down_proj.weight": (hidden, inner),
        }
        if bias:
            shapes |= {"gate_proj.bias": (inner,), "up_proj.bias": (inner,), "down_proj.bias": (hidden,)}
        return shapes

    @classmethod
    def take(cls, tensors: Tensors, prefix: str, bias: bool) -> DenseMlp:
        """Fuse the tensors whose names begin with `prefix`, removing them from `tensors`."""
        return cls(
            gate_up=take_fused(tensors, prefix, "gate_proj.weight", "up_proj.weight"),
            gate_up_bias=take_fused(tensors, prefix, "gate_proj.bias", "up_proj.bias") if bias else None,
            down=tensors.pop(prefix + "down_proj.weight"),
            down_bias=tensors.pop(prefix + "down_proj.bias") if bias else None,
        )

    def forward(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`."""
        gated = ops.silu_mul(F.linear(x, self.gate_up, self.gate_up_bias))
        return F.linear(gated, self.down, self.down_bias)


def take_fused(tensors: Tensors, prefix: str, *names: str) -> torch.Tensor:
    """The named tensors one below the other, removed from `tensors` so that no second copy stays in memory."""
    return torch.cat([tensors.pop(prefix + name) for name in names])

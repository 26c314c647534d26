"""Quantises the weights of a plain checkpoint while it is loaded: FP8 with a scale for each row, as tools write it.

The values are those that such a checkpoint stands for, in the dtype that is served: what FP8 costs shows before one is
made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_backend.checkpoints.quantization.dequantise import CHUNK
from dflash_backend.checkpoints.quantization.scheme import damaged
from dflash_backend.checkpoints.weights import WeightSource, whole_shape

FP8 = "fp8"
CODE = torch.float8_e4m3fn
LARGEST = torch.finfo(CODE).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# The experts of a layer in one tensor `[num_experts, out_features, in_features]`, by the ends of their names.
STACKED = ("experts.gate_up_proj", "experts.down_proj")
# Projections that published FP8 checkpoints leave as they are, by the ends of their names.
KEPT = frozenset(("lm_head", "gate", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b"))


class Fp8Source(WeightSource):
    """Another source, whose projections have the weights that FP8 would hold in their place. The LM head, routers, the
    gates of shared experts and of delta nets, and all that is no projection stay as they are."""

    def __init__(self, plain: WeightSource) -> None:
        super().__init__(plain.dtype, plain.device)
        self._plain = plain

    def read(self, name: str, out: torch.Tensor) -> None:
        self._plain.read(name, out)
        if name.endswith(STACKED):
            round_to_fp8(name, out)

    def read_projection(self, name: str, out: torch.Tensor) -> None:
        """Raises `CheckpointError` for weights that are not finite."""
        self._plain.read_projection(name, out)
        projection = name.removesuffix(".weight")
        if projection.rpartition(".")[2] not in KEPT:
            round_to_fp8(projection, out)

    def read_slice(self, name: str, out: torch.Tensor, dim: int, parts: Sequence[int], num_parts: int) -> None:
        """The whole is rounded first where it is, since a row has one scale."""
        if out.is_meta or not name.endswith(STACKED):
            self._plain.read_slice(name, out, dim, parts, num_parts)
            return
        self.read(name, whole := out.new_empty(whole_shape(out, dim, parts, num_parts)))
        _take(whole, out, dim, parts, num_parts)

    def read_projection_slice(
        self, name: str, out: torch.Tensor, dim: int, parts: Sequence[int], num_parts: int
    ) -> None:
        if out.is_meta:
            self._plain.read_projection_slice(name, out, dim, parts, num_parts)
            return
        self.read_projection(name, whole := out.new_empty(whole_shape(out, dim, parts, num_parts)))
        _take(whole, out, dim, parts, num_parts)


def _take(whole: torch.Tensor, out: torch.Tensor, dim: int, parts: Sequence[int], num_parts: int) -> None:
    chunks = whole.chunk(num_parts, dim)
    out.copy_(torch.cat([chunks[part] for part in parts], dim))


def round_to_fp8(projection: str, weight: torch.Tensor) -> None:
    """Make each row of `weight`, `[..., in_features]` and contiguous, what FP8 holds of it: `code * scale` in float32,
    the scale the row's largest number by that of e4m3. Raises `CheckpointError` where a number is not finite."""
    if weight.device.type == "meta":
        return
    rows = weight.view(-1, weight.shape[-1])
    step = max(1, CHUNK // rows.shape[1])
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        numbers = part.float()
        largest = numbers.abs().amax(dim=1, keepdim=True)
        if not bool(largest.isfinite().all()):
            raise damaged(projection, "has numbers that are not finite")
        scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
        part.copy_((numbers / scale).to(CODE).float() * scale)

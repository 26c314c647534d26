"""The weights of a layer's experts: as numbers, or quantised, and what multiplies by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflash_backend.checkpoints.spec import MoeSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.linear import in_products, read_kept
from dflash_kernels.activation import Clamp
from dflash_kernels.moe import Biases
from dflash_kernels.quantised_weight import QuantisedWeight, WeightStack

if TYPE_CHECKING:
    from dflash_backend.models.ops import LayerOps

ExpertWeight = torch.Tensor | QuantisedWeight
"""Of all experts of a layer: numbers `[num_experts, out_features, in_features]`, or one quantised weight, in which the
rows of the experts lie below one another."""
ExpertWeights = tuple[ExpertWeight, ExpertWeight]
"""The projections into the experts, gate above up, and those out of them: both numbers, or both quantised."""


def read_experts(source: WeightSource, prefix: str, hidden: int, moe: MoeSpec) -> ExpertWeights:
    """The experts of a layer, whose tensors' names begin with `prefix`. hidden: size of a token.

    They stay quantised where all of them can. Those of one projection are of one scheme then; where they are of
    several, some are not quantised, or columns are in an order of their own, all of the layer's become numbers.
    """
    read = _read_stacked if moe.stacked else _read_one_by_one
    return read(source, f"{prefix}experts.", moe.num_experts, hidden, moe.intermediate_size)


def _read_stacked(source: WeightSource, prefix: str, experts: int, hidden: int, inner: int) -> ExpertWeights:
    """From one tensor of all experts for each projection."""
    names, rows, columns = (f"{prefix}gate_up_proj", f"{prefix}down_proj"), (2 * inner, hidden), (hidden, inner)
    shapes = list(zip(names, (experts, experts), rows, columns, strict=True))
    if all(source.keeps_experts(name, out, width) for name, _, out, width in shapes):
        gate_up, down = (in_products(source.read_kept_experts(*each)) for each in shapes)
        return gate_up, down
    numbers, of_down = (source.tensor(*each) for each in shapes)
    return numbers, of_down


def _read_one_by_one(source: WeightSource, prefix: str, experts: int, hidden: int, inner: int) -> ExpertWeights:
    """From a tensor for each expert and projection, or several where they are quantised."""
    gates, ups, downs = (
        [f"{prefix}{expert}.{kind}_proj.weight" for expert in range(experts)] for kind in ("gate", "up", "down")
    )
    kept_into = source.keeps(dict.fromkeys(gates + ups, inner), hidden, ordered=False)
    if kept_into and source.keeps(dict.fromkeys(downs, hidden), inner, ordered=False):
        into, out_of = WeightStack(experts), WeightStack(experts)
        for gate, up, down in zip(gates, ups, downs, strict=True):
            into.add(read_kept(source, {gate: inner, up: inner}, hidden)[0])
            out_of.add(read_kept(source, {down: hidden}, inner)[0])
        return into.whole(), out_of.whole()
    gate_up, of_down = source.empty(experts, 2 * inner, hidden), source.empty(experts, hidden, inner)
    for expert, names in enumerate(zip(gates, ups, downs, strict=True)):
        for name, out in zip(names, (*gate_up[expert].split(inner), of_down[expert]), strict=True):
            source.read_projection(name, out)
    return gate_up, of_down


def run_experts(
    ops: LayerOps,
    x: torch.Tensor,
    of_experts: ExpertWeights,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """`[n, hidden]` -> `[n, hidden]`, as `moe.experts_mlp_reference`."""
    gate_up, down = of_experts
    if isinstance(gate_up, QuantisedWeight):
        assert isinstance(down, QuantisedWeight)
        return ops.quantised_experts_mlp(x, gate_up, down, weights, experts, biases, clamp, is_gelu=is_gelu)
    assert isinstance(down, torch.Tensor)
    return ops.experts_mlp(x, gate_up, down, weights, experts, biases, clamp, is_gelu=is_gelu)

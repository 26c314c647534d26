"""The mixture of experts: routing, one run for each expert, and no token's result depends on the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dflash_backend.checkpoints.spec import MoeSpec
from dflash_backend.models.linear import Linear
from dflash_backend.models.mlp import SparseMlp
from dflash_backend.models.ops import LayerOps, TritonLayerOps
from tests.models.sources import TensorSource

pytestmark = pytest.mark.usefixtures("single_thread")
HIDDEN, INNER, EXPERTS = 16, 12, 6


def make(experts_per_token: int = 2, norm_topk_prob: bool = True) -> SparseMlp:
    generator = torch.Generator().manual_seed(0)
    moe = MoeSpec(EXPERTS, experts_per_token, INNER, norm_topk_prob, sparse_layers=(True,))
    tensors = {"mlp.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = torch.randn(shape, generator=generator)
    source = TensorSource(tensors)
    mlp = SparseMlp.read(source, "mlp.", HIDDEN, moe)
    assert not source.unread
    return mlp


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))


def one_by_one(mlp: SparseMlp, x: torch.Tensor) -> torch.Tensor:
    """Every expert for every token, weighted by what the router gives it."""
    probabilities = (x @ mlp.router.weight.T).softmax(-1)
    kept = probabilities.sort(descending=True).values[:, mlp.moe.experts_per_token - 1]
    weights = torch.where(probabilities >= kept[:, None], probabilities, 0.0)
    if mlp.moe.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    outputs = []
    for gate_up, down in zip(mlp.gate_up, mlp.down, strict=True):
        outputs.append((F.silu(x @ gate_up[:INNER].T) * (x @ gate_up[INNER:].T)) @ down.T)
    return (torch.stack(outputs, dim=1) * weights[:, :, None]).sum(1)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("experts_per_token", [1, 2, EXPERTS])
@pytest.mark.parametrize("count", [1, 40])
def test_the_experts_of_each_token_are_summed_by_their_weights(
    count: int, experts_per_token: int, norm_topk_prob: bool
) -> None:
    mlp, x = make(experts_per_token, norm_topk_prob), tokens(count)
    torch.testing.assert_close(mlp.forward(x, LayerOps()), one_by_one(mlp, x), atol=1e-4, rtol=1e-5)


def test_a_tokens_result_does_not_depend_on_what_else_is_in_the_batch() -> None:
    mlp, x = make(), tokens(40)
    together = mlp.forward(x, LayerOps())
    alone = torch.cat([mlp.forward(one[None], LayerOps()) for one in x])
    reversed_order = mlp.forward(x.flip(0), LayerOps()).flip(0)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together, reversed_order, atol=1e-5, rtol=1e-5)


class CountRows(TorchFunctionMode):
    """Notes how many rows each matrix product has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            self.rows.append(len(args[0]))
        return function(*args, **(kwargs or {}))


def test_each_expert_that_is_chosen_runs_once_over_its_tokens() -> None:
    mlp, x = make(), tokens(3)
    with CountRows() as products:
        mlp.forward(x, LayerOps())
    chosen = mlp.route(x, LayerOps())[1].flatten().bincount(minlength=EXPERTS)
    # The router's product, then gate_up and down of each expert.
    assert products.rows == [3] + [int(count) for count in chosen if count for _ in range(2)]


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_kernels_compute_what_torch_computes(norm_topk_prob: bool) -> None:
    mlp, x = make(3, norm_topk_prob), tokens(9)
    torch.testing.assert_close(mlp.forward(x, TritonLayerOps()), mlp.forward(x, LayerOps()), atol=1e-4, rtol=1e-4)


def test_the_router_weighs_in_float32_whatever_the_dtype() -> None:
    mlp = make()
    half = dataclasses.replace(mlp, router=Linear(mlp.router.weight.bfloat16()))
    x = tokens(8).bfloat16()
    weights, _ = half.route(x, LayerOps())
    logits = half.router(x)
    exact = logits.float().softmax(-1).topk(2).values
    expected = exact / exact.sum(-1, keepdim=True)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, expected.bfloat16())

"""The mixture of experts: routing, one run for each expert, and no token's result depends on the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.spec import MoeSpec
from dflash_backend.models.moe import SparseMlp

HIDDEN, INNER, EXPERTS = 16, 12, 6


def make(experts_per_token: int = 2, norm_topk_prob: bool = True) -> SparseMlp:
    generator = torch.Generator().manual_seed(0)
    moe = MoeSpec(EXPERTS, experts_per_token, INNER, norm_topk_prob, sparse_layers=(True,))
    tensors = {"mlp.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = torch.randn(shape, generator=generator)
    mlp = SparseMlp.take(tensors, "mlp.", moe)
    assert not tensors
    return mlp


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))


def one_by_one(mlp: SparseMlp, x: torch.Tensor) -> torch.Tensor:
    """Every expert for every token, weighted by what the router gives it."""
    probabilities = (x @ mlp.router.T).softmax(-1)
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
    torch.testing.assert_close(mlp.forward(x), one_by_one(mlp, x), atol=1e-4, rtol=1e-5)


def test_a_tokens_result_does_not_depend_on_what_else_is_in_the_batch() -> None:
    mlp, x = make(), tokens(40)
    together = mlp.forward(x)
    alone = torch.cat([mlp.forward(one[None]) for one in x])
    reversed_order = mlp.forward(x.flip(0)).flip(0)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together, reversed_order, atol=1e-5, rtol=1e-5)


class Counting(SparseMlp):
    """Says which experts ran over how many tokens."""

    def run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        RUNS.append((expert, len(x)))
        return super().run_expert(expert, x)


RUNS: list[tuple[int, int]] = []


def test_each_expert_that_is_chosen_runs_once_over_its_tokens() -> None:
    mlp = Counting(**{field.name: getattr(make(), field.name) for field in dataclasses.fields(SparseMlp)})
    x = tokens(3)
    RUNS.clear()
    mlp.forward(x)
    chosen = mlp.route(x)[1].flatten().bincount(minlength=EXPERTS)
    assert [(expert, int(count)) for expert, count in enumerate(chosen) if count] == RUNS
    assert sum(count for _, count in RUNS) == 3 * mlp.moe.experts_per_token


def test_the_router_weighs_in_float32_whatever_the_dtype() -> None:
    mlp = make()
    half = dataclasses.replace(mlp, router=mlp.router.bfloat16())
    x = tokens(8).bfloat16()
    weights, _ = half.route(x)
    logits = F.linear(x, half.router)
    exact = logits.float().softmax(-1).topk(2).values
    expected = exact / exact.sum(-1, keepdim=True)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, expected.bfloat16())

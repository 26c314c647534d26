"""Padded steps that take prompts beside decode rows: what a captured graph runs, here operation by operation."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.core.plan import DraftBudget, ScheduledRequest, SchedulerOutput
from dflash_backend.worker.batch import BatchTraits, HostBatch
from dflash_backend.worker.graphs import MIXED_TOKENS, TOKEN_SIZES, PaddedBatch, mixed_shapes, smallest_mixed
from dflash_backend.worker.runner import ModelRunner
from tests.support.scale import SCALE
from tests.worker.engines import Outputs, engine, memory, on_device_runner, triton_engine, unchanged, unpacked

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [9, 8, 7], "c": [5] * 11}
LATER = {"d": list(range(3, 33)), "e": list(range(5, 50))}
SHAPES = [(4, 48), (8, 96), (8, 160)]
# Prompts beside decode rows have 20 tokens of each step.
SIZES = {"max_num_seqs": 8, "max_prefill_tokens_per_step": 20, "max_num_batched_tokens": 200}


@pytest.fixture
def pair(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | SIZES


def mixed_plan(pair: dict[str, Any], **sampling: dict[str, Any]) -> tuple[ModelRunner, SchedulerOutput]:
    """A runner that has run prompts, and a plan in which one more ends and another goes on, beside decode rows."""
    built = on_device_runner(engine(**pair), overlap=False)
    outputs = Outputs(built)
    common = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    for name, prompt in PROMPTS.items():
        outputs.add(name, prompt, **(common | sampling.get(name, {})))
    outputs.step()
    for name, prompt in LATER.items():
        outputs.add(name, prompt, **(common | sampling.get(name, {})))
    outputs.step()
    plan = built.core.scheduler.plan(0.0, in_flight=False)
    assert plan is not None
    assert isinstance(built.runner, ModelRunner)
    built.runner.requests.update(plan)
    built.runner.prepare(use_graphs=False, progress=lambda message, fraction: None, mixed=SHAPES)
    return built.runner, plan


def step_of(runner: ModelRunner, num_tokens: int) -> PaddedBatch:
    return next(step for step in runner.graphs.mixed(sampled=True) if step.inputs.num_tokens == num_tokens)


@pytest.mark.parametrize("size", [96, 160])
@pytest.mark.parametrize("budget", [None, 5])
def test_a_mixed_step_does_what_the_ragged_step_does(pair: dict[str, Any], size: int, budget: int | None) -> None:
    """The end of one prompt and a chunk of another, which chooses no token, beside greedy and sampled decode rows; all
    drafts are verified, or some."""
    runner, plan = mixed_plan(pair, b={"temperature": 0.7, "seed": 3}, d={"temperature": 0.9, "seed": 4})
    assert sorted(row.num_new for row in plan.rows) == [1, 1, 1, 10, 10]
    assert sorted(row.sample for row in plan.rows) == [False, True, True, True, True]
    k = runner.model.state.k
    drafts = None if budget is None else DraftBudget(budget, 1.0, [0.1 * i for i in range(k)], [0.5, 0, 0, 0.2, 0])
    runner.model.state.confidence.normal_(generator=torch.Generator().manual_seed(3))
    rows = HostBatch.of(plan.rows, runner.requests, drafts)
    before = [tensor.clone() for tensor in memory(runner)]

    inputs = runner.layouts.send_ragged(rows)
    ragged = unpacked(runner, runner.model.run(inputs))
    after_ragged = [tensor.clone() for tensor in memory(runner)]

    for tensor, value in zip(memory(runner), before, strict=True):
        tensor.copy_(value)
    step = step_of(runner, size)
    if budget is not None:
        # A padded step verifies as many drafts as it has tokens for, which are more.
        step.inputs.budget[0] = budget  # type: ignore[index]
    runner.layouts.send_padded(rows, step.inputs.num_rows, step.inputs.num_tokens)
    if budget is not None:
        step.inputs.budget[0] = budget  # type: ignore[index]
    padded = unpacked(runner, step.run())

    for ours, theirs in zip(ragged[:3], padded[:3], strict=True):
        assert ours[:5] == theirs[:5]
    assert sum(padded[1]) == (3 * k if budget is None else budget)
    for ours, theirs in zip(memory(runner), after_ragged, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(after_ragged, before, strict=True))


def test_a_budget_has_the_tokens_that_prompts_leave(pair: dict[str, Any]) -> None:
    """Of 30 tokens 13 are known ones of four rows, and 21 drafts ask for the others."""
    runner, plan = mixed_plan(pair)
    runner.prepare(use_graphs=False, progress=lambda message, fraction: None, mixed=[(4, 30)])
    four = sorted(plan.rows, key=lambda row: row.num_new)[:4]
    drafts = DraftBudget(5, 1.0, [0.0] * runner.model.state.k, [0.0] * 4)
    rows = HostBatch.of(four, runner.requests, drafts)
    assert (rows.num_new.sum(), rows.num_draft.sum()) == (13, 21)
    (step,) = runner.graphs.mixed(sampled=True)
    runner.layouts.send_padded(rows, 4, 30)
    padded = unpacked(runner, step.run())
    assert sum(padded[1]) == 17


@pytest.mark.parametrize("sampled", [False, True])
def test_padding_leaves_kv_and_state_as_they_are_to_the_bit(pair: dict[str, Any], sampled: bool) -> None:
    runner, _ = mixed_plan(pair)
    assert len(runner.graphs.mixed(sampled)) == len(SHAPES)
    with unchanged(memory(runner)):
        for step in runner.graphs.mixed(sampled):
            runner.layouts.send_nothing(step.inputs.num_rows, step.inputs.num_tokens)
            step.run()


def test_the_smallest_step_that_is_worth_its_padding_is_taken(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_backend.worker.graphs.CHEAP_TOKENS", 48)
    runner, plan = mixed_plan(pair)
    rows = HostBatch.of(plan.rows, runner.requests)
    num_tokens = int(rows.query_lens.sum())
    assert num_tokens == 23 + 3 * runner.model.state.k == 44
    assert runner.graphs.find(rows) is None, "5 rows do not fit 48 tokens' four, and 96 tokens are too many"
    four = runner.graphs.find(HostBatch.of(plan.rows[:4], runner.requests))
    assert four is not None
    assert four.inputs.num_tokens == 48


def chunk(**changes: int) -> ScheduledRequest:
    values = {"num_computed": 0, "num_new": 10, "num_draft": 0, "num_next_draft": 3, "sample": True}
    return ScheduledRequest("d", **(values | {"num_unverified_drafts": 0, "new_block_ids": []} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_new": 40}, 48),
        ({"num_new": 74}, 96),
        ({"num_new": 73}, None),  # more than 1.3 times what it has
        ({"num_new": 124}, 160),
        ({"num_new": 123}, None),
        ({"num_new": 161}, None),
        ({"num_new": 40, "sample": False}, None),
        ({"num_new": 40, "num_next_draft": 0}, None),
    ],
)
def test_which_steps_run_without_a_graph(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], expected: int | None
) -> None:
    """Much padding, more tokens than any graph has, logits that nobody asks for, drafts that nobody proposes."""
    runner, _ = mixed_plan(pair)
    monkeypatch.setattr("dflash_backend.worker.graphs.CHEAP_TOKENS", 48)
    found = runner.graphs.find(HostBatch.of([chunk(**changes)], runner.requests))
    assert (found and found.inputs.num_tokens) == expected


def test_the_shapes_of_an_engine() -> None:
    shapes = mixed_shapes(max_rows=256, max_tokens=8192, decode_query_len=16)
    assert [tokens for _, tokens in shapes] == list(MIXED_TOKENS)
    assert shapes[0] == (4, 64)
    assert shapes[-1] == (32, 512)
    assert mixed_shapes(8, 207, 16) == [(4, 64), (8, 128), (8, 160)]
    assert mixed_shapes(256, 64, 1) == [(64, 64)]
    assert mixed_shapes(256, 8192, 64)[0] == (2, 128)
    assert smallest_mixed([], HostBatch([], np.zeros((0, 7), np.int64), BatchTraits(False, False))) is None


def test_up_to_the_last_size_every_number_of_tokens_has_a_step() -> None:
    steps: Any = [
        SimpleNamespace(num_rows=rows, num_tokens=tokens, traits=SimpleNamespace(drafts=True))
        for rows, tokens in mixed_shapes(max_rows=256, max_tokens=8192, decode_query_len=16)
    ]
    found = []
    for tokens in range(1, 514):
        batch: Any = SimpleNamespace(
            req_idx=[0],
            num_new=np.array([tokens]),
            num_verified=0,
            num_next_draft=np.array([15]),
            traits=SimpleNamespace(chooses=True),
        )
        number = smallest_mixed(steps, batch)
        found.append(None if number is None else steps[number].num_tokens)
    assert found[-1] is None
    for tokens, size in enumerate(found[:-1], 1):
        assert size == min(size for size in MIXED_TOKENS if size >= tokens), tokens
    assert max(size / tokens for tokens, size in enumerate(found[:-1], 1) if tokens > 128) < 1.3


def test_steps_with_prompts_have_sizes_that_are_worth_padding_to() -> None:
    assert MIXED_TOKENS == (64, 128, 160, 208, 256, 320, 384, 432, 512)
    assert set(MIXED_TOKENS[1:]) < set(TOKEN_SIZES)


REQUESTS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"temperature": 0.8, "seed": 3},
    "c": {"repetition_penalty": 1.3},
    "d": {"logprobs": 2},
    "e": {"temperature": 0.7, "top_k": 5, "seed": 9, "min_tokens": 5},
    "f": {"k": 0},
    "g": {"logit_bias": {7: 3.0}},
}


def run(built: Any, names: Collection[str] = REQUESTS, max_tokens: int = 9) -> Outputs:
    """Requests that come one after another, every other step."""
    outputs = Outputs(built)
    for number, name in enumerate(names):
        prompt = [(5 * number + 3 * i) % 50 + 3 for i in range(9 + 11 * (number % 4))]
        common = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        outputs.add(name, prompt, **(common | REQUESTS[name]))
        outputs.step()
        outputs.step()
    outputs.finish()
    return outputs


def watched(runner: ModelRunner) -> list[int]:
    """Tokens of each mixed step that is run from now on."""
    found: list[int] = []
    find = runner.graphs.find

    def watching(batch: HostBatch) -> PaddedBatch | None:
        step = find(batch)
        if step is not None and not batch.decode_only:
            found.append(step.inputs.num_tokens)
        return step

    runner.graphs.find = watching  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("adaptive", [False, True])
def test_text_is_the_same_with_mixed_steps(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch, adaptive: bool
) -> None:
    """Special rows among them, with steps in flight."""
    monkeypatch.setattr("dflash_backend.worker.graphs.CHEAP_TOKENS", 48)
    sizes = pair | {"kv_write_guard": False, "adaptive_speculation": adaptive}
    expected = run(engine(**sizes))
    built = on_device_runner(engine(**sizes), mixed=SHAPES)
    tokens = watched(built.runner)
    outputs = run(built)
    assert outputs.tokens == expected.tokens
    assert len(tokens) >= (2 if adaptive else 5)
    ours, theirs = ([entry.token_ids for entry in each.logprobs["d"]] for each in (outputs, expected))
    assert ours == theirs


@pytest.mark.slow
def test_text_is_the_same_with_interpreted_kernels(few_layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_backend.worker.graphs.CHEAP_TOKENS", 48)
    sizes = few_layers | SIZES | {"kv_write_guard": False}
    some = (REQUESTS, 9) if SCALE >= 4 else ("abdg", 5)
    expected = run(engine(**sizes), *some)
    built = triton_engine(**sizes)
    built.runner.prepare(use_graphs=False, progress=lambda message, fraction: None, mixed=SHAPES[:2])
    tokens = watched(built.runner)
    assert run(built, *some).tokens == expected.tokens
    assert tokens

"""The runner behind `Worker`, with the steps of a GPU: in flight, of ended requests, out of memory."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.core.plan import (
    DraftBudget,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    StepOutOfMemory,
)
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.messages import SamplingParams
from dflash_backend.worker.logits import SpecialRows
from dflash_backend.worker.runner import BatchInFlight, ModelRunner, evenly_truncated
from dflash_backend.worker.step import PHASES
from tests.worker.engines import (
    device_runner,
    engine,
    kv_tensors,
    on_device_runner,
    outputs_of,
    state_tensors,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("single_thread")
PROMPT = [1, 2, 3, 4, 5, 6]
K = 7
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def runner(settings: dict[str, Any]) -> ModelRunner:
    return device_runner(engine(**settings))


def new(request_id: str, sampling: SamplingParams = GREEDY, prompt: list[int] = PROMPT) -> NewRequest:
    return NewRequest(request_id, prompt, len(prompt), sampling, (), seed=1)


def prefill(step_id: int, request_id: str, blocks: list[int], sampling: SamplingParams = GREEDY) -> SchedulerOutput:
    """The whole prompt in one step, and drafts behind it."""
    row = ScheduledRequest(request_id, 0, len(PROMPT), 0, True, K, blocks)
    return SchedulerOutput(step_id, [row], [new(request_id, sampling)])


def decode(
    step_id: int, request_id: str, num_computed: int, num_unverified_drafts: int = 0, **more: Any
) -> SchedulerOutput:
    """The last token and K drafts."""
    row = ScheduledRequest(request_id, num_computed, 1, K, True, K, [], num_unverified_drafts)
    return SchedulerOutput(step_id, [row], **more)


def run(runner: ModelRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
    runner.submit(plan)
    return runner.collect_results()


def test_results_come_in_the_order_of_the_steps_with_rows_as_planned(runner: ModelRunner) -> None:
    first = prefill(1, "a", [0, 1, 2, 3, 4, 5])
    other = prefill(1, "b", [6, 7, 8, 9, 10, 11])
    runner.submit(SchedulerOutput(1, [*other.rows, *first.rows], [*first.new_requests, *other.new_requests]))
    runner.submit(decode(2, "a", 6))
    results = [runner.collect_results()]
    phases = [runner.collect_drafts(()).phase_seconds]
    results.append(runner.collect_results())
    phases.append(runner.collect_drafts(()).phase_seconds)
    assert [result.step_id for result in results] == [1, 2]
    assert [row.request_id for row in results[0].rows] == ["b", "a"]
    assert results[0].rows[0].token_ids == results[0].rows[1].token_ids
    for each in phases:
        assert set(each) == {"verify", "accept", "inject", "draft"}
        assert all(0.0 < seconds < 60.0 for seconds in each.values())


def test_a_row_with_unverified_drafts_goes_on_where_the_step_before_it_ended(runner: ModelRunner) -> None:
    known = [run(runner, prefill(1, "a", list(range(8)))).rows[0]]
    known.append(run(runner, decode(2, "a", 6)).rows[0])
    known.append(run(runner, decode(3, "a", 7 + known[1].num_accepted)).rows[0])
    assert known[1].num_accepted < K, "the upper bound must be wrong for this to show anything"
    run(runner, SchedulerOutput(4, [], finished_req_ids=["a"]))

    runner.submit(prefill(5, "a", list(range(8))))
    runner.submit(decode(6, "a", 6))
    unverified = [runner.collect_results().rows[0]]
    runner.submit(decode(7, "a", 7 + K, num_unverified_drafts=K))
    unverified += [runner.collect_results().rows[0], runner.collect_results().rows[0]]
    assert unverified == known


def test_logits_are_computed_where_a_row_chooses_a_token_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a large model reads a gigabyte of weights."""
    expected = run(runner, prefill(1, "whole", [0, 1, 2, 3])).rows[0].token_ids
    num_logits = []
    logits = runner.model.target.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        num_logits.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(runner.model.target, "logits", counted)
    chunk = ScheduledRequest("a", 0, 4, 0, False, 0, [4, 5, 6, 7])
    assert run(runner, SchedulerOutput(2, [chunk], [new("a")])).rows[0].token_ids == []
    rest = ScheduledRequest("a", 4, 2, 0, True, 0, [])
    assert run(runner, SchedulerOutput(3, [rest])).rows[0].token_ids == expected
    assert num_logits == [1]


def test_a_third_step_must_wait_for_the_first_result(runner: ModelRunner) -> None:
    runner.submit(SchedulerOutput(1, []))
    runner.submit(SchedulerOutput(2, []))
    with pytest.raises(RuntimeError, match="step 3 was submitted with 2 steps not collected"):
        runner.submit(SchedulerOutput(3, []))
    assert runner.collect_results() == ModelRunnerOutput(1, [])


def test_a_result_needs_nothing_of_a_request_that_has_been_removed(runner: ModelRunner) -> None:
    runner.submit(prefill(1, "a", [0, 1, 2, 3]))
    replaced = prefill(2, "a", [4, 5, 6, 7], SamplingParams(temperature=0.0, logprobs=1))
    runner.submit(dataclasses.replace(replaced, finished_req_ids=["a"]))
    first, second = runner.collect_results().rows[0], runner.collect_results().rows[0]
    assert first.token_ids == second.token_ids
    assert first.logprobs is None
    assert second.logprobs is not None


def test_a_row_of_an_ended_request_writes_nothing_past_its_blocks(runner: ModelRunner) -> None:
    """It starts where its blocks end, as after the last step of a request that was sure of no more."""
    run(runner, prefill(1, "a", [0, 1, 2, 3]))
    runner.model.state.computed[runner.requests.records["a"].index] = 16
    with unchanged(kv_tensors(runner)):
        result = run(runner, decode(2, "a", 14, num_unverified_drafts=K))
    assert len(result.rows[0].token_ids) == result.rows[0].num_accepted + 1


def test_rejected_drafts_leave_no_context_kv(runner: ModelRunner) -> None:
    """Without drafts behind the step nothing of the drafter writes there either."""
    run(runner, prefill(1, "a", list(range(8))))
    before = [layer.slots.clone() for layer in runner.model.kv.draft]
    row = ScheduledRequest("a", 6, 1, K, True, 0, [])
    num_accepted = run(runner, SchedulerOutput(2, [row])).rows[0].num_accepted
    assert num_accepted < K
    end = 7 + num_accepted
    for layer, then in zip(runner.model.kv.draft, before, strict=True):
        assert torch.equal(layer.slots[end:], then[end:])
        assert not torch.equal(layer.slots[6:end], then[6:end])


def test_special_logits_of_a_row_in_flight_begin_where_the_step_before_it_ended(runner: ModelRunner) -> None:
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2, bad_words_token_ids=((5, 6),),
        min_tokens=9, stop_token_ids=tuple(range(8, 50)),
    )  # fmt: skip
    known = [run(runner, prefill(1, "a", list(range(8)), sampling)).rows[0]]
    known.append(run(runner, decode(2, "a", 6)).rows[0])
    known.append(run(runner, decode(3, "a", 7 + known[1].num_accepted)).rows[0])
    assert known[1].num_accepted < K, "the upper bound must be wrong for this to show anything"
    run(runner, SchedulerOutput(4, [], finished_req_ids=["a"]))

    runner.submit(prefill(5, "a", list(range(8)), sampling))
    runner.submit(decode(6, "a", 6))
    unverified = [runner.collect_results().rows[0]]
    runner.submit(decode(7, "a", 7 + K, num_unverified_drafts=K))
    unverified += [runner.collect_results().rows[0], runner.collect_results().rows[0]]
    assert [row.token_ids for row in unverified] == [row.token_ids for row in known]
    assert [row.logprobs for row in unverified] == [row.logprobs for row in known]


def lack_memory(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: set[int]) -> None:
    """The method does its work, and then memory does not suffice at these `calls`, counted from 1."""
    method, numbers = getattr(owner, name), itertools.count(1)

    def lacking(*arguments: Any) -> Any:
        result = method(*arguments)
        if next(numbers) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return result

    monkeypatch.setattr(owner, name, lacking)


@pytest.mark.parametrize(
    ("owner", "name", "sampling"),
    [
        # At the latest moment: when the drafter runs, accepted tokens are in the state already.
        (DFlashDrafter, "propose", GREEDY),
        (SpecialRows, "logprobs", SamplingParams(temperature=0.9, max_tokens=30, ignore_eos=True, logprobs=2)),
    ],
)
def test_a_step_that_does_not_fit_leaves_the_requests_as_they_were(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, sampling: SamplingParams
) -> None:
    plans = [prefill(1, "a", list(range(8)), sampling), decode(2, "a", 6)]
    untroubled = device_runner(engine(**settings))
    expected = [run(untroubled, plan).rows for plan in plans]

    runner = device_runner(engine(**settings))
    assert run(runner, plans[0]).rows == expected[0]
    message = "step 2 with 1 rows and 8 tokens does not fit the memory of cpu"
    with monkeypatch.context() as short:
        lack_memory(short, owner, name, {1})
        with unchanged(state_tensors(runner)), pytest.raises(StepOutOfMemory, match=message):
            runner.submit(plans[1])
    assert run(runner, plans[1]).rows == expected[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_survive_steps_that_do_not_fit(
    settings: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for calls in (set(), {2, 3, 5}):
        built = on_device_runner(engine(**settings), overlap)
        lack_memory(monkeypatch, DFlashDrafter, "propose", calls)
        temperatures = [0.9, 0.0, 0.9, 0.0]
        sampling = [{"temperature": value, "seed": i, "max_tokens": 20} for i, value in enumerate(temperatures)]
        outputs.append(outputs_of(built, [[*PROMPT, i] for i in range(4)], sampling).tokens)
    assert outputs[0] == outputs[1]
    assert built.core.stats().num_preemptions > 0


def test_each_phase_has_the_time_of_its_own_work(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what passes between verifying and drafting, where the host sends tokens, is no phase's."""
    step, passed = runner.model, 0
    assert step.drafter is not None

    def takes(milliseconds: int, owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def slow(*arguments: Any, **options: Any) -> Any:
            nonlocal passed
            passed += milliseconds * 1_000_000
            return work(*arguments, **options)

        monkeypatch.setattr(owner, name, slow)

    clock = SimpleNamespace(perf_counter_ns=lambda: passed)
    monkeypatch.setattr("dflash_backend.worker.step.time", clock)
    takes(1, step.target, "forward")
    takes(2, type(step.ops), "accept")
    takes(4, step.drafter, "inject")
    takes(8, step.drafter, "propose")
    takes(16, type(step), "inject")
    runner.submit(prefill(1, "a", [0, 1, 2, 3, 4, 5]))
    runner.collect_results()
    found = runner.collect_drafts(()).phase_seconds
    assert found == {"verify": 0.001, "accept": 0.002, "inject": 0.004, "draft": 0.008}


@pytest.mark.parametrize(
    ("num_draft", "budget", "kept"),
    [
        ([7, 7, 7], 4, [1, 1, 1]),
        ([7, 7, 7], 2, [0, 0, 0]),
        ([7, 0, 7], 5, [2, 0, 2]),
        ([7, 1, 7], 9, [3, 1, 3]),
        ([0, 0, 0], 5, [0, 0, 0]),
        ([3, 2, 1], 60, [3, 2, 1]),
    ],
)
def test_rows_that_are_cut_alike_keep_within_the_budget(num_draft: list[int], budget: int, kept: list[int]) -> None:
    rows = [ScheduledRequest(str(i), 9, 1, count, True, K, []) for i, count in enumerate(num_draft)]
    cut = evenly_truncated(rows, DraftBudget(budget, 1.0, [0.0] * K, [0.0] * len(rows)))
    assert [row.num_draft for row in cut] == kept
    assert sum(kept) <= budget


def test_the_phases_of_a_step_are_those_of_its_slowest_part(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts run side by side."""
    seconds = [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 1.0], [2.0, 1.0, 1.0, 1.0]]
    monkeypatch.setattr(
        runner.model,
        "unpacked_report",
        lambda step, part: (seconds[part], np.zeros(0), np.zeros((0, K))),
        raising=False,
    )
    parts: Any = [
        SimpleNamespace(
            draft_report=SimpleNamespace(wait=lambda number=number: number),
            step=SimpleNamespace(num_rows=0), rows=[], grammars=None, proposed=None,
        )
        for number in range(3)
    ]  # fmt: skip
    runner._awaiting_drafts = BatchInFlight(SchedulerOutput(1, []), parts)
    assert runner.collect_drafts(()).phase_seconds == dict(zip(PHASES, seconds[1], strict=True))

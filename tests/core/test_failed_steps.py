"""Steps that the worker cannot run: the request at fault ends with an error, and the others lose nothing."""

from __future__ import annotations

import itertools

import pytest

from dflash_backend.core.plan import SchedulerOutput, StepFailed, StepOutOfMemory
from dflash_backend.messages import EngineCoreOutputs, RequestFailed
from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import make_config, make_request
from tests.core.toy_worker import OverlappingToy

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
MODES = pytest.mark.parametrize("lag", [None, 1, 2], ids=["no overlap", "lag 1", "lag 2"])


def _runs(request_id: str, plan: SchedulerOutput) -> bool:
    return any(row.request_id == request_id for row in plan.rows)


def _failures(engine: CheckedEngine) -> dict[str, str]:
    """Run to the end; what ended with an error, and why."""
    engine.run()
    assert all(rejected.status == "INTERNAL" for rejected in engine.failed)
    return {rejected.request_id: rejected.message for rejected in engine.failed}


@MODES
@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_request_that_fails_alone_ends_and_the_others_go_on(lag: int | None, at: str) -> None:
    engine = CheckedEngine(make_config(), lag)
    others = [make_request(f"r{i}", [i, *PROMPT], seed=i, max_tokens=20) for i in range(4)]
    engine.add(*others[:2], make_request("bad", PROMPT, max_tokens=20), *others[2:])
    engine.worker.fails = lambda plan: any(
        row.request_id == "bad" and (at == "prefill" or row.num_draft > 0) for row in plan.rows
    )
    failed = _failures(engine)
    assert list(failed) == ["bad"]
    assert failed["bad"] == (
        "a step with this request failed (ValueError: something about a row); the server's log has the whole error"
    )
    engine.finish()


@MODES
def test_a_step_that_fails_once_costs_no_request_anything(lag: int | None) -> None:
    engine = CheckedEngine(make_config(), lag)
    requests = [make_request(f"r{i}", [i, *PROMPT], seed=i, temperature=i % 2, max_tokens=20) for i in range(5)]
    engine.add(*requests)
    failing = iter([False, False, True])
    engine.worker.fails = lambda plan: next(failing, False)
    assert _failures(engine) == {}
    assert engine.worker.num_failed == 1
    engine.finish()
    assert engine.core.stats().num_preemptions == 0, "no blocks were taken for others"
    assert all(output.stats.num_preemptions == 0 for output in engine.outputs.values())


@MODES
def test_the_engine_says_that_it_goes_on_while_requests_of_a_failed_step_run_alone(lag: int | None) -> None:
    """All of them in one call of `step`: with long prompts that would be taken for a hang."""
    engine = CheckedEngine(make_config(max_num_batched_tokens=16, enable_prefix_caching=False), lag)
    engine.add(*(make_request(f"r{i}", [i, *PROMPT * 5], seed=i, max_tokens=20) for i in range(3)))
    failing, beats = iter([*[False] * 6, True]), []
    engine.worker.fails = lambda plan: next(failing, False)
    engine.core.beat = lambda: beats.append(engine.worker.num_steps)
    assert _failures(engine) == {}
    assert len(beats) > 3 * 4
    assert max(after - before for before, after in itertools.pairwise(beats)) == 1, "one after every step"


@pytest.mark.parametrize("at", [1, 3, 4])
@MODES
def test_a_step_whose_result_cannot_be_taken_in_costs_no_request_anything(lag: int | None, at: int) -> None:
    """With overlap the step behind it is in flight, and follows from what is not known."""
    engine = CheckedEngine(make_config(), lag)
    engine.add(*[make_request(f"r{i}", [i, *PROMPT], seed=i, temperature=i % 2, max_tokens=20) for i in range(5)])
    calls = itertools.count(1)
    engine.worker.fails_to_collect = lambda: next(calls) == at
    assert _failures(engine) == {}
    assert engine.worker.num_failed == 1
    engine.finish()


@pytest.mark.parametrize(("error", "num_preemptions"), [(StepFailed("a mask"), 0), (StepOutOfMemory("full"), 1)])
@pytest.mark.parametrize("at", [2, 4])
def test_a_step_that_cannot_go_on_with_the_drafts_it_waited_for_costs_no_request_anything(
    error: StepFailed | StepOutOfMemory, num_preemptions: int, at: int
) -> None:
    engine = CheckedEngine(make_config(), 1)
    engine.add(*[make_request(f"r{i}", [i, *PROMPT], seed=i, temperature=i % 2, max_tokens=20) for i in range(5)])
    calls = itertools.count(1)
    assert isinstance(engine.worker, OverlappingToy)
    engine.worker.next_error = lambda plan: error if next(calls) == at else None
    assert _failures(engine) == {}
    assert engine.worker.num_failed == 1
    assert engine.core.stats().num_preemptions == num_preemptions
    engine.finish()


def test_a_request_alone_for_which_memory_lacks_after_it_waited_ends() -> None:
    engine = CheckedEngine(make_config(), 1)
    engine.add(make_request("large", PROMPT, max_tokens=20))
    assert isinstance(engine.worker, OverlappingToy)
    engine.worker.next_error = lambda plan: StepOutOfMemory("full")
    failed = _failures(engine)
    assert list(failed) == ["large"]
    assert failed["large"].startswith("a step of this request alone does not fit the device's memory (full)")


@pytest.mark.parametrize("others_fail", [False, True])
@MODES
def test_requests_that_fail_only_together_end_and_the_engine_goes_on(
    lag: int | None, others_fail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while other requests fail, for reasons of their own, in the same steps."""
    engine = CheckedEngine(make_config(), lag)
    isolate = engine.core._isolate

    def beside_another(plan: SchedulerOutput, message: str, outputs: EngineCoreOutputs) -> None:
        if others_fail:
            outputs.failed.append(RequestFailed("other", "INTERNAL", "a grammar"))
        isolate(plan, message, outputs)

    monkeypatch.setattr(engine.core, "_isolate", beside_another)
    engine.add(*[make_request(name, PROMPT, max_tokens=40) for name in "ab"])
    engine.worker.fails = lambda plan: _runs("a", plan) and _runs("b", plan)
    failed = _failures(engine)
    assert set(failed) - {"other"} == {"a", "b"}
    assert all(0 < len(engine.outputs[name].token_ids) < 40 for name in "ab"), "each went on by itself between"
    engine.worker.fails = lambda plan: False
    (output,) = engine.run(make_request("next", PROMPT, max_tokens=5))
    assert len(output.token_ids) == 5


@MODES
def test_a_request_may_be_cancelled_between_a_failed_step_and_its_repetition(lag: int | None) -> None:
    engine = CheckedEngine(make_config(), lag)
    engine.add(*[make_request(name, PROMPT, max_tokens=6) for name in ("stays", "leaves")])
    failing = iter([False, True])
    engine.worker.fails = lambda plan: next(failing, False)
    engine.steps(2)
    engine.abort("leaves")
    assert _failures(engine) == {}
    assert len(engine.outputs["stays"].token_ids) == 6


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("changes", [{}, {"num_state_snapshots": 6}], ids=["attention", "recurrent"])
def test_a_step_that_fails_once_its_tokens_were_sent_leaves_nothing_half_written_to_be_found(
    at: int, changes: dict[str, int]
) -> None:
    """On a CPU, where drafting comes last: published blocks would lack the drafter's KV, and copies of states."""
    engine = CheckedEngine(make_config(**changes))
    requests = [make_request(f"r{i}", [i, *PROMPT * 3], seed=i, temperature=i % 2, max_tokens=20) for i in range(4)]
    engine.add(*requests)
    calls = itertools.count(1)
    engine.worker.fails_to_draft = lambda plan: next(calls) == at
    assert _failures(engine) == {}
    assert engine.worker.num_failed == 1
    # The same beginnings again: what is found is whole. A request that was run again makes no copies of its state.
    for turn in range(2):
        engine.add(*[make_request(f"turn {turn} {i}", [i, *PROMPT * 3, 8], max_tokens=12) for i in range(4)])
        engine.finish()
    assert engine.core.stats().prefix_cache_hits > 0


def test_an_answer_that_ended_with_a_step_that_fails_afterwards_is_whole() -> None:
    engine = CheckedEngine(make_config())
    engine.worker.fails_to_draft = lambda plan: True
    engine.add(make_request("short", PROMPT * 2, max_tokens=1))
    assert _failures(engine) == {}
    engine.worker.fails_to_draft = lambda plan: False
    engine.add(make_request("next", [*PROMPT * 2, 5], max_tokens=12))
    engine.finish()
    assert engine.worker.num_failed == 1


def test_a_request_whose_drafting_fails_alone_ends_and_the_others_go_on() -> None:
    engine = CheckedEngine(make_config())
    engine.add(*[make_request(name, [i, *PROMPT], max_tokens=20) for i, name in enumerate(("a", "bad", "b"))])
    engine.worker.fails_to_draft = lambda plan: _runs("bad", plan)
    failed = _failures(engine)
    assert list(failed) == ["bad"]
    assert "something about a draft" in failed["bad"]
    engine.finish()

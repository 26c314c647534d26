"""Steps that the worker cannot run: whoever is at fault ends with an error, and nobody else loses anything."""

from __future__ import annotations

import random

import pytest
from checked_engine import CheckedEngine
from toy_core import Engine, make_config, make_request
from toy_reference import expected_output

from dflash_backend.core.plan import StepPlan

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
MODES = pytest.mark.parametrize("lag", [None, lambda: 1, lambda: 2], ids=["no overlap", "lag 1", "lag 2"])


def _engine(lag: object, **changes: object) -> Engine:
    return CheckedEngine(make_config(**changes), lag=lag)


def _runs(request_id: str, plan: StepPlan) -> bool:
    return any(row.request_id == request_id for row in plan.rows)


def _failures(engine: Engine) -> dict[str, str]:
    """Run to the end; what ended with an error, and why."""
    while engine.core.has_unfinished():
        engine.step()
    assert all(rejected.status == "INTERNAL" for rejected in engine.failed)
    return {rejected.request_id: rejected.message for rejected in engine.failed}


@MODES
@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_request_that_fails_alone_ends_and_the_others_are_none_the_wiser(lag: object, at: str) -> None:
    engine = _engine(lag)
    others = [make_request(f"r{i}", [i, *PROMPT], seed=i, max_tokens=20) for i in range(4)]
    for request in [*others[:2], make_request("bad", PROMPT, max_tokens=20), *others[2:]]:
        engine.add(request)
    engine.worker.fails = lambda plan: any(
        row.request_id == "bad" and (at == "prefill" or row.num_draft > 0) for row in plan.rows
    )
    failed = _failures(engine)
    assert list(failed) == ["bad"]
    assert failed["bad"] == (
        "a step with this request failed (ValueError: something about a row); the server's log has the whole error"
    )
    for i, request in enumerate(others):
        output = engine.outputs[f"r{i}"]
        assert (output.token_ids, output.finish_reason) == expected_output(request, make_config(), i)
    engine.core.check_invariants()
    assert engine.core.scheduler.kv.pool.usage == 0.0


@MODES
def test_a_step_that_fails_once_costs_nobody_anything(lag: object) -> None:
    engine = _engine(lag)
    requests = [make_request(f"r{i}", [i, *PROMPT], seed=i, temperature=i % 2, max_tokens=20) for i in range(5)]
    for request in requests:
        engine.add(request)
    failing = iter([False, False, True])
    engine.worker.fails = lambda plan: next(failing, False)
    assert _failures(engine) == {}
    assert engine.worker.num_failed == 1
    for i, request in enumerate(requests):
        assert engine.outputs[f"r{i}"].token_ids == expected_output(request, make_config(), i)[0]


@MODES
def test_requests_that_fail_only_together_end_and_the_engine_goes_on(lag: object) -> None:
    engine = _engine(lag)
    for name in ("a", "b"):
        engine.add(make_request(name, PROMPT, max_tokens=40))
    engine.worker.fails = lambda plan: _runs("a", plan) and _runs("b", plan)
    failed = _failures(engine)
    assert set(failed) == {"a", "b"}
    assert all(0 < len(engine.outputs[name].token_ids) < 40 for name in failed), "each went on by itself between"
    engine.worker.fails = lambda plan: False
    (output,) = engine.run(make_request("next", PROMPT, max_tokens=5))
    assert len(output.token_ids) == 5


@MODES
def test_a_request_may_be_cancelled_between_a_failed_step_and_the_look_into_it(lag: object) -> None:
    engine = _engine(lag)
    engine.add(make_request("stays", PROMPT, max_tokens=6))
    engine.add(make_request("leaves", PROMPT, max_tokens=6))
    failing = iter([False, True])
    engine.worker.fails = lambda plan: next(failing, False)
    engine.step()
    engine.step()
    engine.abort("leaves")
    assert _failures(engine) == {}
    assert len(engine.outputs["stays"].token_ids) == 6


@MODES
@pytest.mark.parametrize("seed", range(8))
def test_random_failures_among_random_requests(lag: object, seed: int) -> None:
    rng = random.Random(seed)
    config = make_config(num_blocks=rng.choice([12, 24]), max_num_batched_tokens=rng.choice([12, 40]))
    engine = CheckedEngine(config, lag=lag)
    requests = {}
    for index in range(14):
        name = f"bad{index}" if rng.random() < 0.2 else f"r{index}"
        prompt = [rng.randrange(5) for _ in range(rng.randint(1, 12))]
        requests[name] = make_request(
            name, prompt, seed=index, temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 12)
        )
    once = {rng.randrange(30)}
    numbers = iter(range(10_000))

    def fails(plan: StepPlan) -> bool:
        passing = len(plan.rows) > 1 and next(numbers) in once
        return passing or any(row.request_id.startswith("bad") for row in plan.rows)

    engine.worker.fails = fails
    for request in requests.values():
        engine.add(request)
        if rng.random() < 0.5:
            engine.step()
    engine.finish()
    ended = {name for name, output in engine.outputs.items() if output.finish_reason is not None}
    assert ended == {name for name in requests if not name.startswith("bad")}

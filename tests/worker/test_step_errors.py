"""A step that fails for one of its requests' sake, with the steps of a CPU and of a GPU, with a real model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checks.core_state import check_core
from dflash_backend.core.plan import NewRequest, StepFailed
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.worker.kv_cache import KVWriteError
from dflash_backend.worker.state import RequestRecord, RequestStates
from tests.worker.engines import Outputs, engine, on_device_runner

pytestmark = pytest.mark.usefixtures("single_thread")
Build = Callable[[], BuiltEngine]


@pytest.fixture(params=[lambda built: built, on_device_runner], ids=["cpu", "device"])
def build(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Build:
    """Makes engines, with the steps of a CPU or of a GPU."""
    return lambda: request.param(engine(**settings))


def _finish(outputs: Outputs) -> dict[str, str]:
    """Run to the end; what ended with an error, and why."""
    while outputs.core.has_unfinished():
        outputs.step()
        check_core(outputs.core)
    return {rejected.request_id: rejected.message for rejected in outputs.failed}


def _add_others(outputs: Outputs) -> None:
    outputs.add("greedy", [1, 2, 3], max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs.add("sampled", [4, 5, 6, 7, 8], max_tokens=12, temperature=0.9, seed=2, ignore_eos=True)


def _undisturbed(build: Build) -> dict[str, list[int]]:
    """The tokens of the others when nothing fails."""
    outputs = Outputs(build())
    _add_others(outputs)
    assert _finish(outputs) == {}
    return outputs.tokens


@pytest.mark.parametrize("breaks_in", ["a new request", "a decode row"])
def test_the_request_at_fault_ends_and_the_others_get_what_they_get_without_it(
    build: Build, breaks_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _undisturbed(build)
    built = build()
    outputs = Outputs(built)
    outputs.add("bad", [9, 9], max_tokens=12, temperature=0.0, ignore_eos=True, seed=666)
    _add_others(outputs)
    if breaks_in == "a new request":
        add = RequestStates.add

        def breaking(self: RequestStates, new: NewRequest) -> RequestRecord:
            record = add(self, new)
            if new.seed == 666:
                raise IndexError("no place for this one")
            return record

        monkeypatch.setattr(RequestStates, "add", breaking)
    else:
        submit = built.runner.submit

        def failing(plan: Any) -> None:
            if any(row.request_id == "bad" and row.num_draft for row in plan.rows):
                submit(plan)  # the step runs, and its result is lost
                built.runner._in_flight.pop()
                raise StepFailed("TypeError: something about a row")
            submit(plan)

        monkeypatch.setattr(built.runner, "submit", failing)
    failed = _finish(outputs)
    assert list(failed) == ["bad"]
    assert "a step with this request failed" in failed["bad"]
    assert {name: outputs.tokens[name] for name in expected} == expected


def test_an_error_in_the_middle_of_a_step_is_contained(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after the target ran: all requests go on, and yield what they yield otherwise."""
    expected = _undisturbed(build)
    built = build()
    calls = iter(range(10_000))
    inject = built.runner.model.drafter.inject

    def breaking(*arguments: Any, **options: Any) -> None:
        inject(*arguments, **options)
        if next(calls) == 2:
            raise RuntimeError("once")

    monkeypatch.setattr(built.runner.model.drafter, "inject", breaking)
    outputs = Outputs(built)
    _add_others(outputs)
    assert _finish(outputs) == {}
    assert next(calls) > 3
    assert outputs.tokens == expected


def test_a_write_into_a_block_of_others_still_ends_the_engine(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build()

    def breaking(*arguments: Any, **options: Any) -> torch.Tensor:
        raise KVWriteError("kv_write_guard: a breach")

    monkeypatch.setattr(built.runner.model.drafter, "inject", breaking)
    outputs = Outputs(built)
    _add_others(outputs)
    with pytest.raises(KVWriteError):
        _finish(outputs)

"""`kv_write_guard` stops a step that would write where its request may not (invariant OWN), with the steps of a CPU and
of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_backend.core.kv.manager import KVManager
from dflash_backend.core.plan import NewRequest, ScheduledRequest, SchedulerOutput
from dflash_backend.messages import SamplingParams
from dflash_backend.worker.kv_cache import KVWriteError, WriteGuard
from dflash_backend.worker.runner import ModelRunner
from tests.worker.engines import Outputs, device_runner, engine

pytestmark = pytest.mark.usefixtures("single_thread")
PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture(params=[lambda built: built.runner, device_runner], ids=["cpu", "device"])
def runner(request: pytest.FixtureRequest, settings: dict[str, Any]) -> ModelRunner:
    return request.param(engine(**settings))


def guard(allowed: dict[str, frozenset[int]]) -> WriteGuard:
    rows = [ScheduledRequest(request_id, 0, 1, 0, True, 0, []) for request_id in allowed]
    return WriteGuard(SchedulerOutput(3, rows, writable_block_ids=allowed), rows, block_size=4)


def prefill(blocks: list[int], writable: set[int]) -> SchedulerOutput:
    """The whole prompt and 7 drafts behind it: positions 0 to 13, which lie in four blocks."""
    row = ScheduledRequest("a", 0, len(PROMPT), 0, True, 7, blocks)
    new = NewRequest("a", PROMPT, len(PROMPT), SamplingParams(temperature=0.0, max_tokens=30), (), seed=1)
    return SchedulerOutput(1, [row], [new], writable_block_ids={"a": frozenset(writable)})


def whole_step(runner: ModelRunner, plan: SchedulerOutput) -> None:
    """A step with its drafts."""
    runner.submit(plan)
    runner.collect_results()
    runner.collect_drafts(())


def test_a_slot_in_another_requests_block_is_named_with_step_phase_and_request() -> None:
    with pytest.raises(KVWriteError, match="step 3, phase draft: request b would write block 2"):
        guard({"a": frozenset({1, 2}), "b": frozenset({5})}).check("draft", torch.tensor([0, 1]), torch.tensor([9, 10]))


def test_a_slot_written_twice_is_a_breach() -> None:
    with pytest.raises(KVWriteError, match="a slot would be written twice"):
        guard({"a": frozenset({0})}).check("inject", torch.tensor([0, 0]), torch.tensor([1, 1]))


def test_a_write_of_a_padding_token_is_a_breach() -> None:
    with pytest.raises(KVWriteError, match="a padding token would write slot 2"):
        guard({"a": frozenset({0})}).check("verify", torch.tensor([0, -1]), torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("blocks", "breach"), [([0, 1, 2, 3], "would write block 3"), ([0, 1, 2], "has no block for some")]
)
def test_drafting_past_the_blocks_that_were_reserved_stops_the_step(
    runner: ModelRunner, blocks: list[int], breach: str
) -> None:
    """RESERVE broken: with too little lookahead the drafter's queries land in a block of another request, or without
    the guard nowhere."""
    with pytest.raises(KVWriteError, match=f"step 1, phase draft: request a {breach}"):
        whole_step(runner, prefill(blocks, writable={0, 1, 2}))


@pytest.mark.parametrize("phase", ["verify", "inject", "draft"])
def test_each_phase_that_writes_is_checked(phase: str, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """One phase at a time, since a breach in an earlier one would hide that a later one is not checked."""
    check = WriteGuard.check

    def filtered(guard: WriteGuard, name: str, *rest: Any) -> None:
        if name == phase:
            check(guard, name, *rest)

    monkeypatch.setattr(WriteGuard, "check", filtered)
    with pytest.raises(KVWriteError, match=f"step 1, phase {phase}: request a would write block"):
        whole_step(runner, prefill([0, 1, 2, 3], writable=set()))


def test_the_setting_has_the_core_say_what_may_be_written(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correct core's steps pass; one that gives its requests no blocks is stopped."""
    outputs = Outputs(engine(**settings))
    for index in range(3):
        outputs.add(f"r{index}", PROMPT, max_tokens=20, temperature=0.0)
    outputs.finish()
    monkeypatch.setattr(KVManager, "writable_blocks", lambda manager, request: [frozenset()])
    outputs.add("r3", PROMPT, max_tokens=20, temperature=0.0)
    with pytest.raises(KVWriteError, match="phase verify: request r3"):
        outputs.finish()

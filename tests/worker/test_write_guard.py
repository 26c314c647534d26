"""`kv_write_guard` stops a step that would write where its request may not (invariant OWN)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.config import EngineConfig
from dflash_backend.core.plan import ScheduledRequest, StepPlan, StepResult
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import GenerationRequest, SamplingParams
from dflash_backend.worker.write_guard import KVWriteError, WriteGuard
from tests.tiny_models import make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def engine(pair: dict[str, str]) -> BuiltEngine:
    return build_engine(EngineConfig.from_values({**pair, "kv_block_size": 4, "kv_write_guard": True}))


def guard(allowed: dict[str, frozenset[int]]) -> WriteGuard:
    rows = [ScheduledRequest(request_id, 0, 1, 0, True, 0, []) for request_id in allowed]
    return WriteGuard(StepPlan(3, rows, writable_block_ids=allowed), rows, block_size=4)


PHASES_THAT_WRITE = ("verify", "inject", "draft")


def check_only(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the guard see the writes of one phase alone."""
    check = WriteGuard.check

    def filtered(guard: WriteGuard, name: str, *rest: Any) -> None:
        if name == phase:
            check(guard, name, *rest)

    monkeypatch.setattr(WriteGuard, "check", filtered)


def test_a_slot_in_another_requests_block_is_named_with_step_phase_and_request() -> None:
    with pytest.raises(KVWriteError, match="step 3, phase draft: request b would write block 2"):
        guard({"a": frozenset({1, 2}), "b": frozenset({5})}).check("draft", torch.tensor([0, 1]), torch.tensor([9, 10]))


def test_a_slot_written_twice_is_a_breach() -> None:
    with pytest.raises(KVWriteError, match="a slot would be written twice"):
        guard({"a": frozenset({0})}).check("inject", torch.tensor([0, 0]), torch.tensor([1, 1]))


def test_a_write_of_a_padding_token_is_a_breach() -> None:
    with pytest.raises(KVWriteError, match="a padding token would write slot 2"):
        guard({"a": frozenset({0})}).check("verify", torch.tensor([0, -1]), torch.tensor([1, 2]))


class StingyWorker:
    """Runs plans as if the core had forgotten some of the lookahead: the last block is not the request's any more."""

    def __init__(self, built: BuiltEngine) -> None:
        self.runner = built.runner
        self.overlaps = False

    def submit(self, plan: StepPlan) -> None:
        assert plan.writable_block_ids is not None
        fewer = {key: blocks - {max(blocks)} for key, blocks in plan.writable_block_ids.items()}
        self.runner.submit(dataclasses.replace(plan, writable_block_ids=fewer))

    def collect(self) -> StepResult:
        return self.runner.collect()


def test_drafting_into_a_block_that_was_not_reserved_stops_the_step(pair: Path) -> None:
    """RESERVE broken: with too little lookahead the drafter's queries land in a block of another request."""
    built = engine(pair)
    built.core._worker = StingyWorker(built)
    # 6 prompt tokens and a block of 8 from position 6: blocks 0 to 3, of which the draft alone reaches the last.
    request = GenerationRequest("r", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=20, temperature=0.0))
    built.core.add_request(request)
    with pytest.raises(KVWriteError, match="phase draft: request r"):
        built.core.step()


class RightlessWorker(StingyWorker):
    """Runs plans that give no request any block to write."""

    def submit(self, plan: StepPlan) -> None:
        assert plan.writable_block_ids is not None
        nothing = dict.fromkeys(plan.writable_block_ids, frozenset[int]())
        self.runner.submit(dataclasses.replace(plan, writable_block_ids=nothing))


@pytest.mark.parametrize("phase", PHASES_THAT_WRITE)
def test_each_phase_that_writes_is_checked(phase: str, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One phase at a time, since a breach in an earlier one would hide that a later one is not checked."""
    check_only(phase, monkeypatch)
    built = engine(pair)
    built.core._worker = RightlessWorker(built)
    request = GenerationRequest("r", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=20, temperature=0.0))
    built.core.add_request(request)
    with pytest.raises(KVWriteError, match=f"phase {phase}: request r"):
        built.core.step()


def test_guarded_steps_of_a_correct_core_pass(pair: Path) -> None:
    built = engine(pair)
    assert isinstance(built.core.config, SchedulerConfig)
    for index in range(3):
        request = GenerationRequest(f"r{index}", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=20, temperature=0.0))
        built.core.add_request(request)
    while built.core.has_unfinished():
        built.core.step()
    built.core.check_invariants()

"""A step's tokens leave before its drafts are made: the core returns them, the engine's process sends them, then a
worker on a CPU injects and drafts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.engine.process import EngineLoop
from dflash_backend.messages import EngineCoreOutputs, GenerationRequest, SamplingParams
from tests.worker.engines import engine

pytestmark = pytest.mark.usefixtures("single_thread")


def test_the_engines_process_sends_a_steps_tokens_before_the_drafter_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(name: str) -> None:
        method = getattr(DFlashDrafter, name)
        monkeypatch.setattr(DFlashDrafter, name, lambda *args: (events.append(name), method(*args))[1])

    noted("inject")
    noted("propose")
    built = engine(max_num_seqs=1, max_model_len=256, kv_cache_gb=0.1)
    built.core.add_request(
        GenerationRequest("a", list(range(5, 25)), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), ())
    )

    class Channel:
        def receive(self, timeout_ms: int) -> list[bytes]:
            if not built.core.has_unfinished():
                loop.end()
            return []

        def send(self, message: Any) -> None:
            if isinstance(message, EngineCoreOutputs) and message.deltas:
                events.append(f"{sum(len(delta.token_ids) for delta in message.deltas)} tokens")

    whole: Any = SimpleNamespace(core=built.core, check=lambda: None, trace=None, drafters=None)
    loop = EngineLoop(whole, Channel())  # type: ignore[arg-type]
    loop.run()
    steps = [index for index, event in enumerate(events) if event.endswith("tokens")]
    assert steps[0] == 0
    assert sum(int(events[index].split()[0]) for index in steps) == 40
    # Near its end a request drafts no more.
    for begin, end in itertools.pairwise(steps):
        assert events[begin + 1 : end] in (["inject", "propose"], ["inject"]), events
    # The last step's request has ended: it proposes nothing.
    assert events[steps[-1] + 1 :] in ([], ["inject"]), events


def test_what_a_step_did_is_told_with_the_step_after_or_once_nothing_is_left() -> None:
    core = engine(max_num_seqs=1, max_model_len=256, kv_cache_gb=0.1).core
    core.add_request(
        GenerationRequest("a", list(range(5, 25)), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), ())
    )
    assert core.step().phase_seconds == {}
    while core.has_unfinished():
        assert set(core.step().phase_seconds) == {"verify", "accept", "inject", "draft"}
    core.collect_drafts()
    idle = core.idle_outputs()
    assert set(idle.phase_seconds) == {"verify", "accept", "inject", "draft"}
    assert idle.stats is not None
    assert idle.stats.num_generation_tokens == 2
    assert core.idle_outputs().phase_seconds == {}

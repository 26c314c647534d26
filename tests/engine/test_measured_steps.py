"""What steps take on a CPU is measured before the first request."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import DraftOutput
from dflash_backend.engine import measured_steps as module
from dflash_backend.engine.measured_steps import TimedWorker, measured_steps
from tests.core.toy_engine import make_config, make_request
from tests.core.toy_worker import ToyWorker
from tests.worker.engines import engine, outputs_of

SETTINGS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256, "kv_cache_gb": 0.05, "adaptive_speculation": True}
PROMPTS, SAMPLING = [[1, 2, 3, 4, 5, 6], [9, 8, 7]], [{"max_tokens": 12, "temperature": 0.0}] * 2


def test_an_engine_begins_with_the_times_of_all_kinds_of_steps() -> None:
    built = engine(**SETTINGS)
    k = built.core.config.num_speculative_tokens
    found = {(each.num_rows, each.num_tokens, each.draft_width): each for each in built.core.config.measured_steps}
    assert set(found) == {
        (rows, rows * (1 + drafts), drafts) for rows in (1, 4, 6) for drafts in (0, round(k / 4), k)
    }, "without prompts, which only begin them"
    assert all(each.target_s > 0 and (each.draft_s > 0) == (each.draft_width > 0) for each in found.values())
    assert not built.runner.requests.records
    assert not built.core.has_unfinished()
    assert built.core.stats().num_steps == 0
    fixed = outputs_of(engine(**SETTINGS | {"adaptive_speculation": False}), PROMPTS, SAMPLING).tokens
    assert outputs_of(built, PROMPTS, SAMPLING).tokens == fixed


@pytest.mark.parametrize("changed", [{"adaptive_speculation": False}, {"draft_model": ""}, {"max_model_len": 2}])
def test_nothing_is_measured_where_nothing_is_decided_or_fits(changed: dict[str, Any]) -> None:
    assert engine(**SETTINGS | changed).core.config.measured_steps == ()


def test_slow_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_S", 0.0)
    built = engine(**SETTINGS)
    assert built.core.config.measured_steps == (), "the prompt's alone has run"
    outputs = outputs_of(built, PROMPTS, SAMPLING)
    assert [len(outputs.tokens[name]) for name in ("0", "1")] == [12, 12]


def test_a_pool_that_holds_few_rows_is_measured_with_those() -> None:
    config = make_config(num_blocks=6, adaptive_speculation=True)
    found = {(each.num_rows, each.draft_width) for each in measured_steps(config, ToyWorker(config), 100)}
    assert found > {(1, 0), (1, 1), (1, 3)}
    assert max(found)[0] < 8


class Drafting(ToyWorker):
    """Drafts for three milliseconds."""

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        return replace(super().collect_drafts(ended), phase_seconds={"draft": 0.003})


def test_a_time_has_its_drafting_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0.0, 0.005)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    config = make_config(adaptive_speculation=True, max_num_seqs=1)
    found = measured_steps(config, Drafting(config), 100)
    assert len(found) == 3
    for each in found:
        drafts = each.draft_width > 0
        assert (each.target_s, each.draft_s) == pytest.approx((0.002, 0.003) if drafts else (0.005, 0.0))


def test_rows_that_differ_make_no_kind() -> None:
    config = make_config()
    timed = TimedWorker(ToyWorker(config))
    core = EngineCore(config, timed)
    core.add_request(make_request("drafts", [5, 6]))
    core.add_request(make_request("does not", [7, 8], num_speculative_tokens=0))
    for _ in range(3):
        core.step()
        core.collect_drafts()
    assert timed.last_s > 0
    assert timed.shortest == {}

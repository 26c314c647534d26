"""A step verifies as many drafts as its plan has a budget for, the likeliest; the text does not depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from dflash_backend.config import asset_path
from dflash_backend.core.plan import DraftBudget, DraftOutput, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from dflash_backend.core.speculation.policy import SpeculatingRow
from dflash_backend.engine import build
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.worker.step_ops import CpuStepOps
from load_tests.prompts import load_prompts
from tests.support.budgets import choose_budgets
from tests.worker.engines import Outputs, engine, on_device_runner, outputs_of, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9, "num_speculative_tokens": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 6, "logprobs": 2},
    {"temperature": 0.0, "num_speculative_tokens": 0},
]
WEIGHT = 0.7
# A padded step looks at all the positions that a request may have.
SIZES = {"max_num_seqs": 8, "max_model_len": 192}


@cache
def prompts() -> list[list[int]]:
    encode = Tokenizer.load(asset_path("demo", "pair", "target")).encode
    return [encode(row.prompt) for row in load_prompts(len(SAMPLING))]


class Watched:
    """An engine whose worker's steps are kept, with random budgets unless the policy shall choose them."""

    def __init__(self, built: BuiltEngine, seed: int, with_budgets: bool = True) -> None:
        self.built = built
        self._rng = random.Random(seed)
        self._plans: list[SchedulerOutput] = []
        self.steps: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.confidences: list[list[list[float]]] = []
        scheduler, runner = built.core.scheduler, built.runner
        if with_budgets:
            choose_budgets(scheduler, self._budget)
        if (speculation := scheduler.speculation) is not None:
            # Not by the times of steps, which interpreted kernels take.
            speculation.skip_decision = lambda num_running: False  # type: ignore[method-assign]
            speculation.choose = self._lengths  # type: ignore[method-assign]
        submit, collect, collect_drafts = runner.submit, runner.collect_results, runner.collect_drafts

        def keep_plan(plan: SchedulerOutput) -> None:
            self._plans.append(plan)
            submit(plan)

        def keep_step() -> ModelRunnerOutput:
            result = collect()
            self.steps.append((self._plans.pop(0), result))
            return result

        def keep_drafts(ended: Collection[str]) -> DraftOutput:
            drafts = collect_drafts(ended)
            plan, _ = self.steps[-1]
            self.confidences.append(drafts.confidences or [[] for _ in plan.rows])
            return drafts

        runner.submit, runner.collect_results, runner.collect_drafts = keep_plan, keep_step, keep_drafts  # type: ignore

    def _lengths(self, rows: Sequence[SpeculatingRow], *traffic: float) -> list[int]:
        """What one of `SHAPES` proposes, for all rows."""
        length = self._rng.choice([0, 3, 7, 15, 15])
        return [min(row.k, length) for row in rows]

    def _budget(self, rows: Sequence[ScheduledRequest]) -> DraftBudget | None:
        num_there = sum(row.num_draft for row in rows)
        if self._rng.random() < 0.2:
            return None
        offsets = [0.5 - 0.1 * i for i in range(self.built.core.config.num_speculative_tokens)]
        return DraftBudget(
            self._rng.randrange(num_there + 1), WEIGHT, offsets, [self._rng.uniform(-1, 1) for _ in rows]
        )


# Without requests whose logits the host must know of: then the device decides alone.
PLAIN = [own for own in SAMPLING if not own.keys() & {"repetition_penalty", "logprobs"}]
# Steps that leave out more drafts than those of `capture_shapes`.
SHAPES = [(0, 0), (1, 3), (3, 7), (7, 15), (15, 15)]
FORMS: dict[str, Callable[[BuiltEngine], BuiltEngine]] = {
    "on a CPU": lambda built: built,
    "padded": lambda built: on_device_runner(built, shapes=SHAPES),
    "ragged": lambda built: on_device_runner(built, padded=False),
}


def watched_engine(form: str, seed: int) -> Watched:
    return Watched(FORMS[form](engine(adaptive_speculation=True, **SIZES)), seed)


@pytest.fixture(scope="module")
def ran() -> Callable[[str], tuple[Watched, dict[str, list[int]]]]:
    """An engine that has run all requests, which it does once, and its texts."""

    @cache
    def once(form: str) -> tuple[Watched, dict[str, list[int]]]:
        watched = watched_engine(form, seed=1)
        return watched, run(watched).tokens

    return once


def run(watched: Watched, sampling: list[dict[str, Any]] = SAMPLING) -> Outputs:
    return outputs_of(watched.built, prompts()[: len(sampling)], [{"max_tokens": 40, **own} for own in sampling])


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    """What the target gives without a drafter."""
    sampling = [{key: value for key, value in own.items() if key != "num_speculative_tokens"} for own in SAMPLING]
    built = engine(draft_model="", **SIZES)
    return outputs_of(built, prompts(), [{"max_tokens": 40, **own} for own in sampling]).tokens


@pytest.mark.parametrize("form", FORMS)
def test_any_budget_gives_the_same_text(
    form: str, texts: dict[str, list[int]], ran: Callable[[str], tuple[Watched, dict[str, list[int]]]]
) -> None:
    watched, found = ran(form)
    assert found == texts
    budgets = [(plan, result) for plan, result in watched.steps if plan.budget is not None]
    assert len(budgets) > 10
    for plan, result in budgets:
        verified = sum(row.num_verified for row in result.rows)
        if form == "on a CPU":
            assert verified == plan.num_drafts
        assert verified <= sum(row.num_draft for row in plan.rows)
    num_verified = sum(row.num_verified for _, result in watched.steps for row in result.rows)
    assert watched.built.core.stats().spec_decoding.num_draft_tokens <= num_verified


@pytest.mark.parametrize("form", FORMS)
def test_the_likeliest_drafts_are_verified_by_the_confidences_that_came_back(form: str) -> None:
    watched = watched_engine(form, seed=3)
    run(watched, PLAIN)
    known: dict[str, list[float]] = {}
    num_checked = 0
    for (plan, result), confidences in zip(watched.steps, watched.confidences, strict=True):
        if plan.budget is not None and plan.num_drafts:
            taken, left_out = [], []
            for row, found, effect in zip(plan.rows, result.rows, plan.budget.effects, strict=True):
                logits = np.array(plan.budget.offsets[: row.num_draft]) + effect
                logits += WEIGHT * np.array(known.get(row.request_id, []))[: row.num_draft]
                survival = np.cumprod(1 / (1 + np.exp(-logits)))
                taken += survival[: found.num_verified].tolist()
                left_out += survival[found.num_verified :].tolist()
            if form == "padded":
                assert len(taken) >= plan.num_drafts, "as many as there are tokens for"
            else:
                assert len(taken) == plan.num_drafts
            if left_out and taken:
                assert min(taken) >= max(left_out) - 1e-5
                num_checked += 1
        known |= {row.request_id: found for row, found in zip(plan.rows, confidences, strict=True) if found}
    assert num_checked >= 5


@pytest.mark.parametrize("form", FORMS)
def test_confidences_come_with_the_drafts_that_they_belong_to(
    form: str, ran: Callable[[str], tuple[Watched, dict[str, list[int]]]]
) -> None:
    watched, _ = ran(form)
    last = {row.request_id: plan.step_id for plan, _ in watched.steps for row in plan.rows}
    for (plan, _), confidences in zip(watched.steps, watched.confidences, strict=True):
        for row, found in zip(plan.rows, confidences, strict=True):
            # On a CPU the last step of all requests proposes nothing.
            assert len(found) == row.num_next_draft or (not found and last[row.request_id] == plan.step_id)
            assert all(-8.0 <= confidence <= 8.0 for confidence in found)
    sure = [c for step in watched.confidences for found in step for c in found]
    assert np.std(sure) > 1.0


def test_without_the_setting_the_drafter_is_not_asked_how_sure_the_drafter_is() -> None:
    watched = Watched(engine(**SIZES), 1)
    run(watched)
    assert not any(found for step in watched.confidences for found in step)


def test_interpreted_kernels_verify_within_a_budget_and_give_the_same_text(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(build, "capture_shapes", lambda k: [(0, 0), (1, k), (k, k)])
    few = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}, {"temperature": 0.0, "num_speculative_tokens": 2}]
    asked = [{"max_tokens": 10, **own} for own in few]
    short = [[1, 2, 3, 4, 5, 6], [9, 8, 7], [5] * 11]
    plain = outputs_of(engine(**settings), short, asked).tokens
    # With this seed the first budgets are small, so that steps have fewer tokens than drafts.
    watched = Watched(triton_engine(**settings, adaptive_speculation=True), 19)
    assert outputs_of(watched.built, short, asked).tokens == plain
    left_out = 0
    for plan, result in watched.steps:
        verified = sum(row.num_verified for row in result.rows)
        assert verified >= plan.num_drafts
        left_out += sum(row.num_draft for row in plan.rows) - verified
    assert left_out > 0


def test_only_steps_that_ask_for_confidences_compute_them(
    monkeypatch: pytest.MonkeyPatch, texts: dict[str, list[int]]
) -> None:
    """On a CPU, where the plan says it: with a cost that no budget is worth, one step in eight."""
    computed: list[int] = []
    log_odds = CpuStepOps.log_odds
    monkeypatch.setattr(
        CpuStepOps, "log_odds", staticmethod(lambda *args: computed.append(1) or log_odds(*args)), raising=True
    )
    monkeypatch.setitem(build.UNEVEN_COST, "cpu", 100.0)
    built = engine(adaptive_speculation=True, **SIZES)
    watched = Watched(built, seed=0, with_budgets=False)
    assert run(watched).tokens == texts
    drafting = [step for step in watched.steps if any(row.num_next_draft for row in step[0].rows)]
    for (plan, _), confidences in zip(watched.steps, watched.confidences, strict=True):
        for row, found in zip(plan.rows, confidences, strict=True):
            assert len(found) == (row.num_next_draft if plan.wants_confidence else 0)
        assert plan.budget is None
    assert 0 < len(computed) < len(drafting) / 2

"""What the engine does with the decision how many tokens each row drafts."""

from __future__ import annotations

import math

import pytest

from dflash_backend.core.plan import SchedulerOutput
from dflash_backend.core.speculation.costs import StepShape
from dflash_backend.core.speculation.policy import LATER_EVERY, PROBE_DRAFTS, AdaptiveSpeculation, SpeculatingRow
from tests.core.toy_engine import Engine, make_config, make_request
from tests.core.toy_model import ALL_ACCEPTED, NONE_ACCEPTED


def timed(engine: Engine, target_s: float, draft_s: float) -> Engine:
    """With a time for each token and for each draft."""
    engine.worker.target_s = lambda plan: 0.001 + target_s * plan.num_tokens
    engine.worker.draft_s = lambda plan: draft_s * sum(row.num_next_draft for row in plan.rows)
    return engine


def drafts_of(plans: list[SchedulerOutput]) -> list[int]:
    return [sum(row.num_next_draft for row in plan.rows) for plan in plans]


@pytest.mark.parametrize("lag", [None, 1])
@pytest.mark.parametrize(("seed", "share"), [(NONE_ACCEPTED, 0.2), (ALL_ACCEPTED, 0.8)])
def test_the_engine_drafts_where_drafts_are_accepted(seed: int, share: float, lag: int | None) -> None:
    config = make_config(adaptive_speculation=True, max_model_len=600, drafter_max_len=600, num_blocks=400)
    engine = timed(Engine(config, lag), 0.0005, 0.0001)
    engine.run(*(make_request(f"r{i}", [20 + i, 2], max_tokens=500, seed=seed) for i in range(2)))
    stats = engine.core.stats().speculation
    drafts = drafts_of(engine.worker.plans[8:])
    if seed == NONE_ACCEPTED:
        assert sum(drafts) < share * 2 * config.num_speculative_tokens * len(drafts)
        assert stats.num_steps_without_drafts > 0.7 * stats.num_steps
    else:
        assert sum(drafts) > share * 2 * config.num_speculative_tokens * len(drafts)
    planned = sum(row.num_draft for plan in engine.worker.plans for row in plan.rows)
    # A step that is in flight when its requests end tells nothing of their drafts.
    of_ended = 0 if lag is None else 2 * config.num_speculative_tokens
    assert planned - of_ended <= sum(stats.num_draft_tokens_per_pos) <= planned


def test_the_decision_knows_the_prompt_tokens_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        adaptive_speculation=True, max_prefill_tokens_per_step=8, max_model_len=600, drafter_max_len=600, num_blocks=400
    )
    engine = timed(Engine(config), 0.0005, 0.0001)
    speculation, seen = engine.scheduler.speculation, []
    assert speculation is not None
    choose = speculation.choose

    def watch(rows: list[SpeculatingRow], position: float, num_other: int) -> list[int]:
        seen.append(num_other)
        return choose(rows, position, num_other)

    monkeypatch.setattr(speculation, "choose", watch)
    engine.add(make_request("a", [1, 2], max_tokens=200, seed=NONE_ACCEPTED))
    engine.steps(4)
    engine.add(make_request("long", list(range(240)), max_tokens=2, seed=NONE_ACCEPTED))
    engine.steps(80)
    assert seen[:3] == [0, 0, 0]
    assert seen.count(8) >= 3, "chunks of the long prompt"
    assert seen[-1] == 0


def test_a_request_without_drafts_is_no_part_of_the_decision() -> None:
    engine = timed(Engine(make_config(adaptive_speculation=True)), 0.0005, 0.0001)
    engine.run(make_request("never", [1, 2], max_tokens=60, num_speculative_tokens=0))
    assert engine.core.stats().speculation.num_steps == 0
    assert not any(drafts_of(engine.worker.plans))


@pytest.mark.parametrize("max_tokens", range(38, 46))
def test_no_more_is_drafted_than_an_answer_has_room_for(max_tokens: int) -> None:
    engine = timed(Engine(make_config(adaptive_speculation=True)), 1e-6, 1e-6)
    engine.run(make_request("a", [1, 2], max_tokens=max_tokens, seed=ALL_ACCEPTED))
    rows = engine.rows_of("a")
    assert sum(row.num_next_draft for row in rows) > 20
    for row in rows:
        num_output = row.num_computed + row.num_new - 2  # before the row
        assert row.num_next_draft <= max(0, max_tokens - num_output - 2)


@pytest.mark.parametrize(("num_others", "first"), [(1, PROBE_DRAFTS), (3, 0)])
def test_a_new_request_begins_with_what_pays_for_the_others_and_is_tried_beside_few(
    num_others: int, first: int
) -> None:
    config = make_config(adaptive_speculation=True, max_model_len=600, drafter_max_len=600, num_blocks=400)
    engine = timed(Engine(config), 0.001, 0.001)
    for number in range(num_others):
        engine.add(make_request(f"old{number}", [1, 2 + number], max_tokens=500, seed=NONE_ACCEPTED))
    engine.steps(100)
    engine.run(make_request("new", [3, 4, 5], max_tokens=20, seed=NONE_ACCEPTED))
    assert [row.num_next_draft for row in engine.rows_of("new")][:3] == [first, 0, 0]


def test_a_prompt_that_began_while_others_drafted_rests_with_them() -> None:
    config = make_config(
        adaptive_speculation=True, max_prefill_tokens_per_step=8, max_model_len=900, drafter_max_len=900, num_blocks=600
    )
    engine = timed(Engine(config), 0.001, 0.001)
    engine.add(make_request("old", [1, 2], max_tokens=500, seed=NONE_ACCEPTED))
    engine.steps(2)
    engine.add(make_request("new", list(range(600)), max_tokens=20, seed=NONE_ACCEPTED))
    engine.steps(90)
    rows = engine.rows_of("new")
    assert [row.num_next_draft for row in rows if row.sample][:3] == [PROBE_DRAFTS, 0, 0], "and is tried"


def test_a_request_alone_with_a_long_prompt_drafts_one_block_while_drafting_rests() -> None:
    config = make_config(
        adaptive_speculation=True, max_num_batched_tokens=100, max_model_len=900, drafter_max_len=900, num_blocks=600
    )
    engine = timed(Engine(config), 0.001, 0.001)
    engine.run(make_request("old", [1, 2], max_tokens=120, seed=NONE_ACCEPTED))
    assert engine.scheduler.speculation is not None
    assert engine.scheduler.speculation.rests
    engine.run(make_request("new", list(range(350)), max_tokens=7, seed=NONE_ACCEPTED))
    rows = engine.rows_of("new")
    assert sum(not row.sample for row in rows) >= 3, "the prompt comes in chunks"
    assert [row.num_next_draft for row in rows if row.sample][:4] == [PROBE_DRAFTS, 0, 0, 0]


def test_while_drafting_rests_some_steps_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(adaptive_speculation=True, max_model_len=600, drafter_max_len=600, num_blocks=400)
    engine = timed(Engine(config), 0.001, 0.001)
    engine.add(make_request("a", [1, 2], max_tokens=500, seed=NONE_ACCEPTED))
    engine.steps(100)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    seen: list[StepShape] = []
    observe = speculation.costs.observe
    monkeypatch.setattr(speculation.costs, "observe", lambda *step: (seen.append(step[0]), observe(*step)))
    before = len(engine.worker.plans)
    engine.steps(200)
    plain = [shape for shape in seen if shape.num_tokens == 1 and not shape.num_queries]
    assert 200 // LATER_EVERY <= len(plain) <= 200 // LATER_EVERY + 1, "also behind a probe"
    drafting = [plan for plan in engine.worker.plans[before:] if plan.drafts]
    assert 0 < len(drafting) <= len([shape for shape in seen if shape.num_queries]) + 1


def test_without_the_setting_k_never_changes() -> None:
    engine = timed(Engine(make_config()), 1.0, 1.0)
    engine.run(make_request("a", [1, 2], max_tokens=40, seed=NONE_ACCEPTED))
    assert engine.core.stats().speculation.num_steps == 0
    assert set(drafts_of(engine.worker.plans)) == {0, 3}
    assert math.isclose(engine.core.stats().spec_decoding.draft_tokens_per_step or 0.0, 3.0)


def test_the_counts_have_the_last_step_in_them() -> None:
    policy, row = AdaptiveSpeculation(3), SpeculatingRow(3)
    for num_steps in range(1, 101):
        policy.choose([row], 100.0, 0)
        policy.observe_draft(row, 3, 3)
        policy.observe_step(StepShape(4, 4, 400, 1600), 1e-3, 0.0)
        if num_steps > 90:
            assert sum(policy.stats.num_draft_tokens_per_pos) == 3 * num_steps

"""A step in flight: each rule of `docs/gpu.md`, on the toy that runs its steps late. The model-based tests run all of
them together; here each has a name."""

from __future__ import annotations

import pytest

from checks.core_state import check_pool
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.messages import GenerationRequest
from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import PROMPT, Engine, crowd, make_config, make_request
from tests.core.toy_model import ALL_ACCEPTED, NONE_ACCEPTED, greedy_continuation
from tests.core.toy_worker import OverlappingToy


def overlapping(**changes: object) -> Engine:
    return Engine(make_config(**changes), lag=1)


def step_ids_in_flight(engine: Engine) -> list[int]:
    return [step.plan.step_id for step in engine.core._in_flight]


def by_step(engine: Engine, request_id: str) -> dict[int, ScheduledRequest]:
    return {plan.step_id: row for plan in engine.worker.plans for row in plan.rows if row.request_id == request_id}


def test_the_next_step_is_submitted_before_the_one_ahead_is_collected() -> None:
    engine = overlapping()
    engine.add(make_request("a", PROMPT, seed=NONE_ACCEPTED))
    for num_steps in (1, 2, 3):
        engine.step()
        assert (step_ids_in_flight(engine), len(engine.outputs["a"].token_ids)) == ([num_steps], num_steps - 1)


def test_without_the_setting_or_with_a_worker_that_does_not_overlap_nothing_stays_in_flight() -> None:
    config = make_config()
    switched_off = EngineCore(config, OverlappingToy(config))
    switched_off.add_request(make_request("a", PROMPT))
    assert switched_off.step().deltas[0].token_ids
    engine = Engine(config)
    engine.add(make_request("a", PROMPT))
    engine.step()
    assert engine.outputs["a"].token_ids
    assert step_ids_in_flight(engine) == []


def test_a_row_behind_one_in_flight_starts_at_an_upper_bound() -> None:
    engine = overlapping(block_size=1)
    engine.run(make_request("a", PROMPT, max_tokens=30, seed=NONE_ACCEPTED))
    prefill, first, second, third, *_ = engine.rows_of("a")
    assert (prefill.num_computed, prefill.num_unverified_drafts) == (0, 0)
    assert (first.num_computed, first.num_unverified_drafts) == (9, 0), "a prefill leaves no doubt"
    assert (second.num_computed, second.num_unverified_drafts) == (9 + 4, 3)
    assert (third.num_computed, third.num_unverified_drafts) == (10 + 4, 3), "counted from what is known by then"
    reserved = sum(len(row.new_block_ids) for row in (prefill, first, second))
    assert reserved == 13 + 1 + 3 + 4, "RESERVE counts from the upper bound"


@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "first_bounds", "highest"),
    [
        # One that goes on has four tokens at most, the last not computed.
        (128, 5, [0, 9, 9 + 5 - 1 - 1], 9 + 5 - 2),
        (16, 50, [0, 9, 10], 16 - 2),
    ],
)
def test_the_bound_leaves_out_outcomes_that_end_the_request(
    max_model_len: int, max_tokens: int, first_bounds: list[int], highest: int
) -> None:
    engine = overlapping(max_model_len=max_model_len)
    engine.run(make_request("a", PROMPT, max_tokens=max_tokens, seed=NONE_ACCEPTED))
    bounds = [row.num_computed for row in engine.rows_of("a")]
    assert (bounds[:3], max(bounds)) == (first_bounds, highest)


def test_a_request_that_is_sure_to_end_is_not_planned() -> None:
    for max_tokens in range(1, 12):
        engine = overlapping()
        (output,) = engine.run(make_request("a", PROMPT, max_tokens=max_tokens, seed=NONE_ACCEPTED))
        assert len(output.token_ids) == max_tokens
        assert engine.worker.num_steps == max_tokens, "each step yields one token, and none is run for nothing"


def test_where_k_depends_on_what_is_in_flight_the_request_sits_the_step_out() -> None:
    # Behind the row at 9 the drafts would be 3 after up to one accepted draft, and 0 after more.
    config = make_config(drafter_max_len=19)
    engine = Engine(config, lag=1)
    engine.add(make_request("other", [1, 2], max_tokens=60, seed=NONE_ACCEPTED))
    engine.run(make_request("a", PROMPT, max_tokens=30, seed=NONE_ACCEPTED))
    rows = by_step(engine, "a")
    assert sorted(rows)[:3] == [1, 2, 4], "step 3 has no row of it"
    assert 3 in by_step(engine, "other"), "and runs for the others"
    assert (rows[4].num_computed, rows[4].num_unverified_drafts, rows[4].num_next_draft) == (10, 0, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("limit", ["drafter_max_len", "max_model_len"])
def test_draft_blocks_start_where_they_do_without_overlap(limit: str, temperature: float) -> None:
    for length in range(14, 32):
        for seed in range(4):
            request = make_request("a", PROMPT, max_tokens=40, seed=seed, temperature=temperature)
            config = make_config(**{limit: length})
            plain, ahead = Engine(config), Engine(config, lag=2)
            assert plain.run(request)[0].token_ids == ahead.run(request)[0].token_ids
            drafted = [row.num_draft for row in plain.rows_of("a")]
            assert [row.num_draft for row in ahead.rows_of("a")][: len(drafted)] == drafted


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"min_tokens": 1},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 0},
    ],
)
def test_no_request_sits_a_step_out_for_what_it_asks_of_its_logits(sampling: dict[str, object]) -> None:
    engine = overlapping()
    special = make_request("special", PROMPT, seed=NONE_ACCEPTED, max_tokens=6, **sampling)
    other = make_request("other", PROMPT, seed=NONE_ACCEPTED, max_tokens=12)
    engine.run(special, other)
    assert sorted(by_step(engine, "special")) == list(range(1, 7))
    assert sorted(by_step(engine, "other")) == list(range(1, 13))
    assert any(row.num_unverified_drafts for row in engine.rows_of("special"))


def test_no_request_is_preempted_while_a_step_is_in_flight() -> None:
    engine = overlapping(num_blocks=20, enable_prefix_caching=False)
    engine.add(*crowd(6))
    num_preemptions = 0
    while engine.core.has_unfinished():
        in_flight = bool(step_ids_in_flight(engine))
        engine.step()
        now = engine.core.stats().num_preemptions
        assert now == num_preemptions or not in_flight
        num_preemptions = now
    assert num_preemptions > 0


def test_when_blocks_run_out_the_plan_ends_there_and_the_next_one_is_made_with_nothing_in_flight() -> None:
    engine = overlapping(num_blocks=20, enable_prefix_caching=False)
    engine.add(*crowd(6, seed=NONE_ACCEPTED))
    num_steps = 0
    while not engine.scheduler._must_drain or engine.worker.num_steps == num_steps:
        num_steps = engine.worker.num_steps
        engine.step()
    running = engine.running
    rows = [row.request_id for row in engine.worker.plans[-1].rows]
    assert 0 < len(rows) < len(running)
    assert rows == running[: len(rows)], "the oldest go on"
    assert not engine.worker.plans[-1].new_requests, "and none overtakes them"
    engine.step()
    assert step_ids_in_flight(engine) == [], "what is in flight is collected, and nothing submitted"
    engine.step()
    assert engine.core.stats().num_preemptions > 0
    assert [row.request_id for row in engine.worker.plans[-1].rows] == engine.running


def stopping_at(index: int) -> tuple[GenerationRequest, list[int]]:
    """A request that a stop token ends, and its output."""
    expected = greedy_continuation(PROMPT, index + 1)
    return make_request("a", PROMPT, max_tokens=40, seed=ALL_ACCEPTED, stop_token_ids=(expected[-1],)), expected


def test_a_request_that_ended_in_flight_runs_once_more_and_what_it_yields_is_dropped() -> None:
    request, expected = stopping_at(4)
    engine, plain = overlapping(), Engine(make_config())
    (output,), (same,) = engine.run(request), plain.run(request)
    assert (output.token_ids, output.finish_reason) == (expected, "stop")
    assert engine.worker.num_steps == plain.worker.num_steps + 1
    ahead, behind = engine.core.stats(), plain.core.stats()
    assert ahead.spec_decoding == behind.spec_decoding, "what was dropped does not count"
    assert ahead.num_generation_tokens == behind.num_generation_tokens
    assert output.stats == same.stats


def test_the_core_is_done_only_when_nothing_is_in_flight() -> None:
    request, _ = stopping_at(4)
    engine = overlapping()
    engine.add(request)
    engine.run_until_finished("a")
    assert len(step_ids_in_flight(engine)) == 1
    assert engine.core.has_unfinished()
    assert engine.core.step().deltas == []
    assert step_ids_in_flight(engine) == []
    assert not engine.core.has_unfinished()
    check_pool(engine.pool, [])
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_id_that_is_used_again_gets_nothing_of_what_is_in_flight(lag: int) -> None:
    engine = Engine(make_config(), lag=lag)
    engine.add(make_request("a", PROMPT, max_tokens=40, seed=NONE_ACCEPTED))
    engine.steps(3)
    engine.core.abort(["a"])
    engine.add(make_request("a", [1, 2, 3], max_tokens=8, seed=ALL_ACCEPTED))
    assert len(step_ids_in_flight(engine)) == 1
    engine.step()
    assert engine.outputs["a"].token_ids == [], "that step was the former's"
    engine.run()
    assert engine.outputs["a"].token_ids == greedy_continuation([1, 2, 3], 8)


@pytest.mark.parametrize("how", ["stop", "abort", "deadline"])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_request_that_is_ended_with_a_row_in_flight_frees_its_blocks_at_once(how: str, lag: int) -> None:
    # The pool holds one of them: the blocks that are given up are taken by the next, while the row is still to run.
    engine = CheckedEngine(make_config(num_blocks=8, block_size=4, max_num_seqs=1), lag=lag)
    engine.add(make_request("a", PROMPT, max_tokens=15, seed=NONE_ACCEPTED, deadline_s=100.0))
    engine.add(make_request("b", [1, *PROMPT], max_tokens=15, seed=ALL_ACCEPTED))
    engine.steps(3)
    sent = list(engine.outputs["a"].token_ids)
    held = set(engine.scheduler.running["a"].block_ids)
    assert sent
    if how == "deadline":
        engine.clock.now = 100.0
    else:
        (engine.stop if how == "stop" else engine.abort)("a")
        assert engine.pool.usage == 0.0
    engine.step()
    assert held & set(engine.scheduler.running["b"].block_ids)
    engine.finish()
    assert engine.outputs["a"].token_ids == sent
    assert engine.outputs["a"].finish_reason == ("abort" if how == "deadline" else None)


def test_a_row_that_runs_for_nothing_may_lie_past_its_blocks() -> None:
    # All drafts are accepted, so the request ends at its length: its real positions are past the bound of the plan.
    engine = CheckedEngine(make_config(block_size=1, drafter_max_len=14), lag=2)
    engine.worker.keep_plans = True
    engine.add(make_request("a", PROMPT, max_tokens=5, seed=ALL_ACCEPTED))
    engine.finish()
    prefill, verification, for_nothing = engine.rows_of("a")
    assert (verification.num_computed, verification.num_draft, verification.num_next_draft) == (9, 3, 0)
    assert (for_nothing.num_computed, for_nothing.num_unverified_drafts) == (9 + 5 - 2, 3)
    covered = sum(len(row.new_block_ids) for row in (prefill, verification, for_nothing))
    assert covered == 9 + 4, "where it starts when the row before it yields all four tokens"


@pytest.mark.parametrize("lag", [None, 0, 2])
def test_a_step_that_does_not_fit_the_memory_preempts_the_latest_and_all_finish(lag: int | None) -> None:
    engine = CheckedEngine(make_config(), lag)
    engine.worker.max_tokens_in_memory = 11  # two rows that verify three drafts, and not three
    engine.add(*crowd(6, seed=NONE_ACCEPTED))
    engine.finish()
    assert engine.worker.refused
    assert engine.failed == []
    preempted = [engine.outputs[f"r{i}"].stats.num_preemptions for i in range(6)]
    assert preempted[0] == 0
    assert sum(preempted) == engine.core.stats().num_preemptions > 0


def test_a_step_without_new_requests_that_does_not_fit_preempts_the_request_that_arrived_last() -> None:
    engine = overlapping()
    engine.add(*crowd(3, seed=NONE_ACCEPTED))
    engine.steps(2)
    engine.worker.max_tokens_in_memory = 11
    engine.step()
    assert engine.running == ["r0", "r1"]
    assert step_ids_in_flight(engine) == [], "what was in flight has been collected"
    assert all(len(engine.outputs[f"r{i}"].token_ids) == 2 for i in range(3)), "and its results are not lost"


def test_a_request_that_did_not_fit_the_memory_is_not_admitted_again_at_once() -> None:
    engine = overlapping()
    engine.worker.max_tokens_in_memory = 11
    engine.add(*crowd(3, seed=NONE_ACCEPTED))
    engine.steps(20)
    assert 0 < len(engine.worker.refused) <= 4, "one for each that waits, and again when some steps have gone by"


@pytest.mark.parametrize("lag", [None, 1])
def test_a_request_that_does_not_fit_the_memory_alone_ends_with_an_error(lag: int | None) -> None:
    engine = Engine(make_config(), lag)
    engine.worker.max_tokens_in_memory = 12
    small, large = make_request("small", PROMPT), make_request("large", [1] * 20, max_tokens=4)
    engine.add(large)
    engine.run(small)
    assert engine.outputs["small"].finish_reason == "length"
    (failure,) = engine.failed
    assert (failure.request_id, failure.status) == ("large", "INTERNAL")
    assert "no memory for 20 tokens" in failure.message
    assert "gpu_memory_utilization" in failure.message
    assert (engine.outputs["large"].token_ids, engine.outputs["large"].finish_reason) == ([], None)
    assert engine.pool.usage == 0.0
    assert engine.worker.held_ids <= {"small"}

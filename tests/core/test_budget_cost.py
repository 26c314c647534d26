"""How much longer a step takes that has a budget: learned from such steps, and where it is too much none is taken."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dflash_backend.core.request import Request
from dflash_backend.core.speculation.budget import MOST_IN_A_ROW, UnevenDrafts
from dflash_backend.core.speculation.costs import StepShape
from dflash_backend.core.speculation.policy import FASTER, FIRST_STEPS, AdaptiveSpeculation
from tests.core.toy_engine import Engine, make_config, make_request

K = 6


def engine_with(uneven_cost: float) -> Engine:
    config = make_config(
        adaptive_speculation=True,
        max_model_len=600,
        drafter_max_len=600,
        num_blocks=600,
        num_speculative_tokens=K,
        uneven_cost=uneven_cost,
    )
    return Engine(config)


def test_budgets_that_take_longer_than_thought_are_given_up_and_tried_again() -> None:
    uneven = UnevenDrafts(0.1)
    assert uneven.pays(0.3, 64)
    for _ in range(20):
        uneven.observe(1.4, 1.0)
    assert not uneven.pays(0.3, 64)
    assert uneven.pays(0.3, 1), "one row has no others that it could differ from"
    num_steps = 0
    while num_steps < 300 and not uneven.pays(0.3, 64):
        uneven.pass_step()
        num_steps += 1
    assert 30 < num_steps < 300
    for _ in range(2000):
        uneven.pass_step()
    assert uneven.pays(0.1, 64)
    assert not uneven.pays(0.09, 64), "never less than the device is known to take"


def test_a_step_that_others_delayed_does_not_end_budgets_for_long() -> None:
    uneven = UnevenDrafts(0.1)
    for _ in range(20):
        uneven.observe(1.05, 1.0)
    uneven.observe(60.0, 1.0)
    assert uneven.pays(0.3, 64)


def test_now_and_then_a_step_has_no_budget_though_it_would_pay() -> None:
    """Else the time of steps without one would never be seen again, and what it was thought to be would stay."""
    uneven = UnevenDrafts(0.1)
    taken = []
    for _ in range(10 * MOST_IN_A_ROW):
        taken.append(uneven.takes(0.5, 64))
        if taken[-1]:
            uneven.observe(1.0, 1.0)
        else:
            uneven.pass_step()
    assert 0.8 < sum(taken) / len(taken) < 1.0


def test_a_time_that_was_thought_too_long_is_seen_to_be_shorter() -> None:
    """Each budget gains, as it seems, since the drafts that it leaves out would take so long."""
    policy = AdaptiveSpeculation(K, uneven_cost=0.1)
    whole, part = (StepShape(64, 64 * (1 + each), 6400, 6400) for each in (K, 2))
    for _ in range(60):
        policy.observe_step(whole, 2.0, 0.0)
    for _ in range(40 * MOST_IN_A_ROW):
        budgeted = policy.uneven.takes(0.5, 64)
        policy.observe_step(part if budgeted else whole, 0.5 if budgeted else 1.0, 0.0, budgeted)
    assert policy.costs.target_s(whole) < 1.35


def test_each_step_without_a_budget_among_others_is_looked_at() -> None:
    """Of many steps of a kind only some are, else; these are few."""
    policy = AdaptiveSpeculation(K, uneven_cost=0.1)
    whole, part = (StepShape(64, 64 * (1 + each), 6400, 6400) for each in (K, 2))
    for _ in range(60):
        policy.observe_step(whole, 1.0, 0.0)
    times = []
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW):
            policy.observe_step(part, policy.costs.target_s(part), 0.0, budgeted=True)
        policy.observe_step(whole, 4.0, 0.0)
        times.append(policy.costs.target_s(whole))
    assert 1.0 < times[0] < times[1] < times[2]


@pytest.mark.parametrize("cost", [0.0, 0.1])
def test_steps_with_a_budget_tell_what_budgets_cost_where_that_counts(cost: float) -> None:
    policy = AdaptiveSpeculation(K, uneven_cost=cost)
    shape = StepShape(64, 64, 6400, 6400)
    for _ in range(20):
        policy.observe_step(shape, 1.0, 0.0)
    before = policy.costs.target_s(shape)
    for _ in range(20):
        policy.observe_step(shape, 1.5, 0.0, budgeted=True)
    assert policy.uneven.pays(0.3, 64) is (cost == 0)
    assert (policy.costs.target_s(shape) == before) is (cost > 0), "and are no steps of rows alike"


@pytest.mark.parametrize("seconds", [0.95, 0.8])
def test_a_step_with_a_budget_that_is_faster_than_thought_says_that_the_thought_is_wrong(seconds: float) -> None:
    """Else the time of small steps would never be seen where all of them have a budget."""
    policy = AdaptiveSpeculation(K, uneven_cost=0.1)
    shape = StepShape(64, 64, 6400, 6400)
    for _ in range(20):
        policy.observe_step(shape, 1.0, 0.0)
    for _ in range(200):
        policy.observe_step(shape, seconds, 0.0, budgeted=True)
    assert (policy.costs.target_s(shape) < 0.97) == (seconds < FASTER)


@pytest.mark.parametrize("longer", [1.0, 2.0])
def test_the_engine_gives_up_budgets_that_make_steps_longer(longer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(0.01)
    engine.worker.target_s = lambda plan: (0.004 + 0.0005 * plan.num_tokens) * (longer if plan.budget else 1.0)
    observe, times = UnevenDrafts.observe, list[float]()

    def observed(uneven: UnevenDrafts, seconds: float, expected_s: float) -> None:
        observe(uneven, seconds, expected_s)
        times.append(seconds / expected_s)

    monkeypatch.setattr(UnevenDrafts, "observe", observed)
    seeds = [1, 2, 3, 4]  # they end at about the same time
    # Those that are given up are 16 of the first 300 steps, and one of the next 200.
    tokens = 300 if longer == 1.0 else 500
    engine.run(*(make_request(f"r{i}", [20 + i, 2], max_tokens=tokens, seed=seed) for i, seed in enumerate(seeds)))
    stats = engine.core.stats().speculation
    share = stats.num_budgeted_steps / stats.num_steps
    assert share > 0.25 if longer == 1.0 else share < 0.05
    assert len(times) >= 0.8 * stats.num_budgeted_steps, "but for those of one row, and those that are faster"
    assert sorted(times)[len(times) // 2] == pytest.approx(longer, rel=0.2)


@pytest.mark.parametrize(("cost", "num_requests"), [(0.0, 4), (0.1, 4), (0.1, 1)])
def test_rows_near_their_end_draft_no_less_where_that_alone_would_make_them_differ(
    cost: float, num_requests: int
) -> None:
    engine, lengths = engine_with(cost), []
    engine.worker.target_s = lambda plan: 0.004 + 0.00001 * plan.num_tokens
    speculation = engine.core.scheduler.speculation
    assert speculation is not None
    choose = speculation.choose_draft_lengths

    def chosen(running: Iterable[Request], num_prompt_tokens: int, num_beginning: int) -> None:
        choose(running := list(running), num_prompt_tokens, num_beginning)
        if speculation.stats.num_steps > len(FIRST_STEPS):
            lengths.append({request.draft_length for request in running if request.num_output_tokens})

    speculation.choose_draft_lengths = chosen  # type: ignore[method-assign]
    for turn in range(8):
        requests = [make_request(f"{turn}-{i}", [20 + i, 2], max_tokens=60 + turn + i) for i in range(num_requests)]
        engine.run(*requests)
    differ = any(len(each) > 1 for each in lengths)
    shorter = any(0 < length < K for each in lengths for length in each)
    expected = {(0.0, 4): (True, True), (0.1, 4): (False, False), (0.1, 1): (False, True)}
    assert (differ, shorter) == expected[cost, num_requests]


def test_rows_that_differ_anyway_draft_no_more_than_their_answers_have_use_for() -> None:
    engine, lengths = engine_with(0.1), list[tuple[int, int]]()
    speculation = engine.core.scheduler.speculation
    assert speculation is not None
    choose = speculation.choose_draft_lengths
    speculation.choose = lambda rows, position, num_other: [K - i for i in range(len(rows))]  # type: ignore[method-assign]

    def chosen(running: Iterable[Request], num_prompt_tokens: int, num_beginning: int) -> None:
        choose(running := list(running), num_prompt_tokens, num_beginning)
        if len(decoding := [request for request in running if request.num_output_tokens]) > 1:
            lengths.extend((request.draft_length, request.max_useful_drafts) for request in decoding)

    speculation.choose_draft_lengths = chosen  # type: ignore[method-assign]
    engine.run(*(make_request(f"r{i}", [20 + i, 2], max_tokens=60) for i in range(2)))
    assert any(useful < K for _, useful in lengths)
    assert all(length <= useful for length, useful in lengths)

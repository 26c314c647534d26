"""Which drafts are verified: what the drafter's confidence is worth, the budget, and what the engine does with it."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from dflash_backend.core.plan import DraftBudget, ScheduledRequest
from dflash_backend.core.speculation import policy as policies
from dflash_backend.core.speculation.acceptance import AcceptanceEstimator, RequestEffect, VerifiedBlock
from dflash_backend.core.speculation.budget import (
    COST_OF_ONE,
    MOST_BETWEEN_LOOKS,
    STEPS_BETWEEN_LOOKS,
    UnevenDrafts,
    optimal_budget,
)
from dflash_backend.core.speculation.costs import CostTable, Floats, StepShape
from dflash_backend.core.speculation.policy import (
    FIRST_STEPS,
    PROBE_DRAFTS,
    VERIFY_SHARE,
    AdaptiveSpeculation,
    SpeculatingRow,
)
from tests.core.toy_engine import Engine, make_config, make_request
from tests.core.toy_model import ALL_ACCEPTED, NONE_ACCEPTED

K = 6
# Of the drafts that are made up here: the logit of a chance is this times the confidence, and a constant of the place.
WEIGHT, CONSTANTS = 0.8, [-1.0, -1.2, -1.4, -1.6, -1.8, -2.0]


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def block(rng: random.Random, weight: float = WEIGHT) -> tuple[list[float], int]:
    """Confidences of a block's drafts, and how many of the drafts are accepted when all are verified."""
    confidences = [rng.gauss(4.0, 2.5) for _ in range(K)]
    chances = [sigmoid(c + weight * x) for c, x in zip(CONSTANTS, confidences, strict=True)]
    return confidences, next((i for i, chance in enumerate(chances) if rng.random() >= chance), K)


def verified_of(confidences: list[float], least: float) -> int:
    """The drafts that are verified: as long as all up to there are accepted with a chance of `least`."""
    survival = itertools.accumulate(
        (sigmoid(c + WEIGHT * x) for c, x in zip(CONSTANTS, confidences, strict=True)), lambda a, b: a * b
    )
    return sum(chance >= least for chance in survival)


def taught(least: float = 0.0, weight: float = WEIGHT, seed: int = 0, num_blocks: int = 4000) -> AcceptanceEstimator:
    """An estimator that saw blocks of which only the likelier drafts were verified; a copy, since it learns on."""
    return copy.deepcopy(taught_once(least, weight, seed, num_blocks))


@cache
def taught_once(least: float, weight: float, seed: int, num_blocks: int) -> AcceptanceEstimator:
    estimator, rng = AcceptanceEstimator(K), random.Random(seed)
    for number in range(num_blocks):
        if number % 20 == 0:
            effect = RequestEffect()
        confidences, accepted = block(rng, weight)
        num_verified = verified_of(confidences, least)
        estimator.observe(VerifiedBlock(effect, num_verified, min(accepted, num_verified), confidences))
        if number % 8 == 0:
            estimator.update()
    return estimator


def test_drafts_without_confidences_are_as_likely_as_they_were_accepted() -> None:
    """Where budgets do not pay, one step in eight has confidences: the others' drafts have usual ones in the mean."""
    estimator, rng = AcceptanceEstimator(K), random.Random(4)
    accepted_at, estimates = [0] * K, []
    num_blocks, early = 12_000, 4000
    for number in range(num_blocks):
        if number % 20 == 0:
            effect = RequestEffect()
        confidences, accepted = block(rng, WEIGHT)
        known = confidences if number // 8 % STEPS_BETWEEN_LOOKS == 0 else []
        estimator.observe(VerifiedBlock(effect, K, accepted, known))
        if number % 8 == 7:
            estimator.update()
        if number >= early:
            accepted_at = [count + (position < accepted) for position, count in enumerate(accepted_at)]
            estimates.append(estimator.survival(0))
    assert estimator.weight > 0.5 * WEIGHT
    rates = [count / len(estimates) for count in accepted_at]
    assert np.mean(estimates, axis=0).tolist() == pytest.approx(rates, abs=0.02)


def block_survival(
    estimator: AcceptanceEstimator,
    offsets: Floats,
    effect: RequestEffect,
    num_draft: int,
    confidences: Sequence[float],
) -> list[float]:
    """That of a single block."""
    (survival,) = estimator.block_survival(offsets, [effect], [num_draft], [confidences])
    return survival.tolist()


# The estimate


@pytest.mark.parametrize("least", [0.0, 0.3, 0.6])
def test_what_a_confidence_is_worth_is_learned_whichever_drafts_are_verified(least: float) -> None:
    estimator = taught(least)
    assert estimator.weight == pytest.approx(WEIGHT, abs=0.15)
    usual = estimator.offsets() - estimator.level
    assert usual[:4] == pytest.approx(CONSTANTS[:4], abs=0.4)
    sure, unsure = (
        block_survival(estimator, usual, RequestEffect(0.0, 0.0), 3, [confidence] * 3) for confidence in (5.0, 2.0)
    )
    assert sure[0] == pytest.approx(sigmoid(CONSTANTS[0] + 5 * WEIGHT), abs=0.05)
    assert unsure[0] == pytest.approx(sigmoid(CONSTANTS[0] + 2 * WEIGHT), abs=0.1)
    assert sure[2] > 2 * unsure[2]


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_a_block_is_as_likely_as_ever_when_only_its_likely_drafts_are_verified(least: float) -> None:
    # Without confidences a draft that was verified would stand for those that were not.
    rng = random.Random(5)
    lengths = [block(rng)[1] for _ in range(20000)]
    true = [sum(length > i for length in lengths) / len(lengths) for i in range(3)]
    assert taught(least).survival(0)[:3] == pytest.approx(true, abs=0.08)


def test_a_confidence_that_tells_nothing_counts_little() -> None:
    assert taught(weight=0.0).weight < 0.1
    assert taught(weight=0.0).spread < 0.25
    assert taught().spread > 1.0


def test_without_confidences_the_weight_stays_zero_and_blocks_are_what_their_group_is() -> None:
    estimator, rng = AcceptanceEstimator(K), random.Random(1)
    for _ in range(500):
        estimator.observe(VerifiedBlock(RequestEffect(), K, block(rng)[1]))
        estimator.update()
    assert estimator.weight == 0.0
    same = block_survival(estimator, estimator.offsets(), RequestEffect(0.0, 0.0), K, ())
    assert same == pytest.approx(estimator.survival(0))


def test_what_is_not_known_of_a_draft_is_taken_as_usual() -> None:
    estimator = taught()
    offsets, effect = estimator.offsets(), RequestEffect(0.0, 0.0)
    whole = block_survival(estimator, offsets, effect, K, [7.0, 1.0])
    assert [*whole[:2], *[0.0] * (K - 2)] == block_survival(estimator, offsets, effect, 2, [7.0, 1.0, 9.0])
    means = estimator._moments.mean.tolist()
    assert whole == pytest.approx(block_survival(estimator, offsets, effect, K, [7.0, 1.0, *means[2:]]))


def test_blocks_of_a_step_are_taken_in_together_as_well_as_one_by_one() -> None:
    whole, steps, rng = AcceptanceEstimator(K), AcceptanceEstimator(K), random.Random(2)
    for _ in range(300):
        blocks = [block(rng) for _ in range(4)]
        for confidences, accepted in blocks:
            whole.observe(VerifiedBlock(RequestEffect(), K, accepted, confidences))
            steps.observe(VerifiedBlock(RequestEffect(), K, accepted, confidences))
            steps.update()
        whole.update()
    assert whole.weight == pytest.approx(steps.weight, abs=0.1)
    assert whole.offsets()[:3] == pytest.approx(steps.offsets()[:3], abs=0.4)


# The budget


@pytest.mark.parametrize("seed", range(20))
def test_the_optimal_budget_makes_the_most_tokens_a_second(seed: int) -> None:
    rng = random.Random(seed)
    chances = [rng.random() for _ in range(9)]
    first, each = rng.uniform(0.5, 2.0), rng.uniform(0.01, 0.5)
    num_drafts, gain = optimal_budget(3, np.array(chances), lambda count: first + each * count)
    best = max(
        (3 + sum(some)) / (first + each * size)
        for size in range(len(chances) + 1)
        for some in itertools.combinations(chances, size)
    )
    assert gain == pytest.approx(best / ((3 + sum(chances)) / (first + each * 9)))
    alone = optimal_budget(3, np.array(chances), lambda count: first + each * count, [num_drafts])
    assert alone.num_drafts == num_drafts
    assert optimal_budget(3, np.array(chances), lambda count: 1.0 + 100.0 * count)[0] == 0


def policy_with(estimator: AcceptanceEstimator, seconds_per_token: float) -> AdaptiveSpeculation:
    table = CostTable([1, 1000], [1.0, 1.0 + 999 * seconds_per_token])
    policy = AdaptiveSpeculation(K, table=table)
    policy.acceptance = estimator
    policy.stats.num_steps = len(FIRST_STEPS) + 1
    policy.costs.observe(StepShape(1, 1, 100, 100), 1.0, 0.0)
    policy._lengths = {0: K}
    return policy


def decode_rows(num_draft: int, num_rows: int, num_next: int = 0) -> list[ScheduledRequest]:
    return [ScheduledRequest(str(i), 100, 1, num_draft, True, num_next, []) for i in range(num_rows)]


def budget_of(policy: AdaptiveSpeculation, blocks: list[list[float]], num_draft: int = K) -> DraftBudget | None:
    rows = [SpeculatingRow(K, RequestEffect(0.0, 0.0), confidences) for confidences in blocks]
    return policy.choose_budget(decode_rows(num_draft, len(rows)), rows)


def test_sure_drafts_are_verified_and_others_not() -> None:
    policy = policy_with(taught(), 0.08)
    sure, unsure = [[8.0] * K] * 8, [[0.0] * K] * 8
    assert budget_of(policy, sure) is None, "all of them"
    few = budget_of(policy, unsure)
    assert few is not None
    assert few.num_drafts <= K
    some = budget_of(policy, sure[:4] + unsure[:4])
    assert some is not None
    assert 4 * (K - 1) <= some.num_drafts <= 4 * (K + 1)
    assert policy.stats.num_budgeted_steps == 2


def test_the_plan_says_what_the_estimate_is_made_of() -> None:
    policy = policy_with(taught(), 0.2)
    row = SpeculatingRow(K, RequestEffect(1.5, 0.0), [3.0] * K)
    budget = policy.choose_budget(decode_rows(K, 1), [row])
    assert budget is not None
    assert budget.effects == [1.5]
    chances = (sigmoid(offset + 1.5 + budget.weight * 3.0) for offset in budget.offsets)
    survival = block_survival(policy.acceptance, np.array(budget.offsets), row.effect, K, row.confidences)
    assert survival == pytest.approx(list(itertools.accumulate(chances, lambda a, b: a * b)), abs=0.01)


def test_a_little_is_verified_whatever_it_costs() -> None:
    budget = budget_of(policy_with(taught(), 1000.0), [[0.0] * K] * 20)
    assert budget is not None
    assert budget.num_drafts == -(-20 // VERIFY_SHARE)


def test_the_first_steps_and_probes_verify_all() -> None:
    policy = policy_with(taught(), 1000.0)
    policy._lengths = {0: 0}
    assert budget_of(policy, [[0.0] * K], PROBE_DRAFTS) is None
    policy._lengths = {0: K}
    policy.stats.num_steps = len(FIRST_STEPS)
    assert budget_of(policy, [[0.0] * K]) is None
    assert policy_with(taught(), 1000.0).choose_budget(decode_rows(0, 2), [SpeculatingRow(K)] * 2) is None


def test_blocks_that_were_drafted_when_it_still_paid_are_not_verified_in_full() -> None:
    policy = policy_with(taught(), 1000.0)
    policy._lengths = {0: 0}
    budget = budget_of(policy, [[0.0] * K] * 3)
    assert budget is not None
    assert budget.num_drafts == 1


def test_blocks_are_longer_where_the_confidence_tells_drafts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def length() -> int:
        policy = policy_with(taught(), 0.05)
        return policy.choose([SpeculatingRow(K, RequestEffect(0.0, 0.0))] * 8, 100.0, 0)[0]

    longer = length()
    monkeypatch.setattr(policies, "MAX_EXTRA", 0.0)
    assert longer > length() > 0


# Where rows with different numbers of drafts cost more


def test_a_budget_that_gains_less_than_it_costs_is_not_taken() -> None:
    some = [[8.0] * K] * 4 + [[0.0] * K] * 4
    budget = budget_of(policy_with(taught(), 0.08), some)
    assert budget is not None
    for cost, taken in ((0.01, True), (5.0, False)):
        policy = policy_with(taught(), 0.08)
        policy.uneven.cost = cost
        assert budget_of(policy, some) == (budget if taken else None)
        assert policy.stats.num_budgeted_steps == taken


def test_drafts_have_confidences_while_budgets_pay_and_now_and_then_where_they_do_not() -> None:
    uneven = UnevenDrafts(0.1)
    assert all(uneven.advance(2) and uneven.takes(0.11, 2) for _ in range(50))
    looks = []
    for step in range(1000):
        if uneven.advance(2):
            assert not uneven.takes(0.0, 2)
            looks.append(step)
    late = [step for step in looks if step > 500]
    assert set(np.diff(late)) == {MOST_BETWEEN_LOOKS}
    gaps = np.diff(looks).tolist()
    assert gaps[gaps.index(STEPS_BETWEEN_LOOKS) :][:3] == [
        STEPS_BETWEEN_LOOKS,
        2 * STEPS_BETWEEN_LOOKS,
        MOST_BETWEEN_LOOKS,
    ]
    for _ in range(10 * MOST_BETWEEN_LOOKS):
        if uneven.advance(2):
            uneven.takes(0.5, 2)
    assert uneven.budgets_pay(2)
    assert uneven.advance(2), "it was seen that they pay again"


def test_one_row_pays_for_the_choice_alone_and_nothing_costs_nothing() -> None:
    assert UnevenDrafts(0.1).pays(0.1 * COST_OF_ONE, 1)
    assert not UnevenDrafts(0.1).pays(0.1 * COST_OF_ONE, 2)
    uneven = UnevenDrafts()
    assert all(uneven.advance(8) and uneven.takes(0.0, 8) for _ in range(50))


def test_a_budget_is_only_chosen_for_drafts_with_confidences() -> None:
    policy = policy_with(taught(), 0.08)
    policy.uneven = UnevenDrafts(0.0, wants_confidence=False)
    unsure = [[0.0] * K] * 8
    assert budget_of(policy, unsure) is None
    assert budget_of(policy, unsure) is not None, "the next drafts had them"


# In the engine


def test_the_engine_verifies_what_pays_and_counts_it() -> None:
    config = make_config(
        adaptive_speculation=True, max_model_len=600, drafter_max_len=600, num_blocks=600, num_speculative_tokens=K
    )
    engine = Engine(config)
    engine.worker.target_s = lambda plan: 0.004 + 0.0005 * plan.num_tokens
    # Of half of the requests nothing is accepted, of the others all.
    seeds = [ALL_ACCEPTED, NONE_ACCEPTED, 1, 2]
    engine.run(*(make_request(f"r{i}", [20 + i, 2], max_tokens=300, seed=seed) for i, seed in enumerate(seeds)))
    stats = engine.core.stats()
    proposed = sum(row.num_draft for plan in engine.worker.plans for row in plan.rows)
    verified = proposed - engine.worker.num_left_out
    assert stats.speculation.num_budgeted_steps > 20
    assert stats.speculation.confidence_weight > 0.2
    assert stats.speculation.num_proposed_tokens == proposed
    assert (
        stats.spec_decoding.num_draft_tokens == sum(stats.speculation.num_draft_tokens_per_pos) == verified < proposed
    )
    of_requests = [output.stats.spec_decoding.num_draft_tokens for output in engine.outputs.values() if output.stats]
    assert sum(of_requests) == engine.core._spec_counts.delivered.num_draft_tokens == verified
    # What is left out is left out for a reason.
    accepted = stats.spec_decoding.num_accepted_tokens
    assert accepted / verified > 1.1 * accepted / proposed


def test_a_plan_counts_the_drafts_of_its_budget() -> None:
    config = make_config(
        adaptive_speculation=True, max_model_len=600, drafter_max_len=600, num_blocks=600, num_speculative_tokens=K
    )
    engine = Engine(config)
    engine.worker.target_s = lambda plan: 0.004 + 0.0005 * plan.num_tokens
    engine.run(*(make_request(f"r{i}", [20 + i, 2], max_tokens=200, seed=i) for i in range(4)))
    budgeted = [plan for plan in engine.worker.plans if plan.budget is not None]
    assert budgeted
    for plan in budgeted:
        assert plan.budget is not None
        assert plan.num_drafts == plan.budget.num_drafts < sum(row.num_draft for row in plan.rows)
        assert plan.num_tokens == plan.num_drafts + sum(row.num_new for row in plan.rows)


def test_usual_confidences_are_those_of_all_drafts_that_were_proposed() -> None:
    estimator = AcceptanceEstimator(3)
    for _ in range(8):
        estimator.observe(VerifiedBlock(RequestEffect(), 1, 1, [2.0, 1.5, -0.5]))
        estimator.update()
    assert estimator._moments.mean == pytest.approx([2.0, 1.5, -0.5])

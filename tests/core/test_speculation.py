"""How many drafts each row gets: the two estimates and the decision."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dflash_backend.core.plan import MeasuredStep, SchedulerOutput
from dflash_backend.core.speculation.acceptance import AcceptanceEstimator, RequestEffect, VerifiedBlock
from dflash_backend.core.speculation.costs import CostTable, StepLine
from dflash_backend.core.speculation.policy import (
    TIE,
    AdaptiveSpeculation,
    SpeculatingRow,
)
from tests.core.policies import K, accepted_of, policy_with, step_s
from tests.core.step_shapes import BLOCKS, PASSES, decode_shape
from tests.core.toy_engine import Engine, make_config, make_request

# Acceptance


def taught(rates: list[float], length: int, num_blocks: int = 3000, seed: int = 0) -> AcceptanceEstimator:
    """An estimator that saw blocks of `length` drafts, by many requests, accepted at these rates."""
    estimator, rng = AcceptanceEstimator(len(rates)), random.Random(seed)
    for number in range(num_blocks):
        if number % 20 == 0:
            effect = RequestEffect()
        estimator.observe(VerifiedBlock(effect, length, accepted_of(rng, rates[:length])))
        if number % 8 == 0:
            estimator.update()
    return estimator


def chances(estimator: AcceptanceEstimator) -> list[float]:
    """Of each draft of a usual request to be accepted when those before it are."""
    survival = estimator.survival(0).tolist()
    return [now / before for before, now in itertools.pairwise([1.0, *survival])]


def test_chances_come_to_the_rates_by_position() -> None:
    rates = [0.95, 0.9, 0.8, 0.6, 0.5, 0.5, 0.4]
    assert chances(taught(rates, K))[:4] == pytest.approx(rates[:4], abs=0.08)


def test_drafts_that_were_not_verified_say_nothing() -> None:
    # Blocks are cut to 3 drafts: those 3 are known as well as if all 7 had been verified.
    rates = [0.9] * K
    assert chances(taught(rates, 3))[:3] == pytest.approx(rates[:3], abs=0.05)
    assert taught(rates, 3).trials[3:].tolist() == [0.0] * 4


def test_the_level_follows_a_change_of_traffic_within_a_few_steps() -> None:
    estimator = taught([0.9] * K, K)
    for _ in range(16):
        estimator.observe(VerifiedBlock(RequestEffect(), K, 0))
        estimator.update()
    assert estimator.survival(0)[0] < 0.6
    for _ in range(10):
        estimator.observe(VerifiedBlock(RequestEffect(), K, K))
        estimator.update()
    assert estimator.survival(0)[0] > 0.85


def test_a_request_is_told_from_the_others() -> None:
    estimator = taught([0.7] * K, K)
    good, bad = RequestEffect(), RequestEffect()
    for _ in range(20):
        estimator.observe(VerifiedBlock(good, K, K))
        estimator.observe(VerifiedBlock(bad, K, 0))
        estimator.update()
    assert estimator.survival(good.group)[2] > 2 * estimator.survival(bad.group)[2]
    assert chances(estimator)[0] == pytest.approx(0.7, abs=0.15), "and the others stay where they were"


def test_requests_that_draft_more_do_not_stand_for_all() -> None:
    # The later positions are only reached by requests whose drafts are good.
    estimator, rng = AcceptanceEstimator(K), random.Random(3)
    for _ in range(60):
        good, bad = RequestEffect(), RequestEffect()
        for _ in range(120):
            estimator.observe(VerifiedBlock(good, K, accepted_of(rng, [0.97] * K)))
            estimator.observe(VerifiedBlock(bad, 2, accepted_of(rng, [0.5] * 2)))
            estimator.update()
    assert chances(estimator)[5] < 0.92


def test_little_knowledge_makes_hopeful() -> None:
    new, known = RequestEffect(), RequestEffect(variance=0.0)
    assert new.hopeful_group >= known.hopeful_group == new.group
    estimator = AcceptanceEstimator(K)
    assert estimator.survival(0, hopeful=True)[0] > estimator.survival(0)[0]


# The decision


@pytest.mark.parametrize("seed", range(30))
def test_the_budget_is_the_best_of_all_budgets_and_goes_to_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    k = 4
    chances = sorted((rng.uniform(0.2, 0.97) for _ in range(k)), reverse=True)
    table = CostTable([1, 16], [1.0, rng.uniform(1.0, 6.0)])
    draft_s = rng.choice([0.0, 0.1, 0.5])
    policy = policy_with(chances, table, draft_s)
    rows = [SpeculatingRow(k, RequestEffect(value, 0.0)) for value in (-1.0, 0.0, 2.0)]
    lengths = policy.choose(rows, 100.0, 0)
    survival = [policy.acceptance.survival(row.effect.group, hopeful=True) for row in rows]
    line = policy.costs.line(3, 100.0, 0)

    def rate(lengths: tuple[int, ...]) -> float:
        num_drafting = sum(length > 0 for length in lengths)
        tokens = 3 + sum(sum(chances[:length]) for chances, length in zip(survival, lengths, strict=True))
        return tokens / step_s(line, sum(lengths), num_drafting, sum(lengths) + num_drafting)

    best = max(map(rate, itertools.product(range(k + 1), repeat=3)))
    # The first draft of a row costs a query more, which the order by likelihood does not see.
    assert rate(tuple(lengths)) >= (0.97 if draft_s else 1 - 1e-6) * best
    assert lengths == sorted(lengths), "a likelier row never gets fewer"


@pytest.mark.parametrize("seed", range(30))
def test_rows_draft_alike_unless_different_numbers_gain_what_they_cost(seed: int) -> None:
    rng = random.Random(seed)
    k = 4
    chances = sorted((rng.uniform(0.2, 0.97) for _ in range(k)), reverse=True)
    table = CostTable([1, 16], [1.0, rng.uniform(1.0, 6.0)])
    policy = policy_with(chances, table)
    rows = [SpeculatingRow(k, RequestEffect(value, 0.0)) for value in (-1.0, -1.0, -1.0, 0.0, 2.0)]
    survival = [policy.acceptance.survival(row.effect.group, hopeful=True) for row in rows]
    n = len(rows)
    line = policy.costs.line(n, 100.0, 0)

    def rate(lengths: list[int]) -> float:
        tokens = n + sum(sum(chances[:length]) for chances, length in zip(survival, lengths, strict=True))
        return tokens / step_s(line, sum(lengths), sum(map(bool, lengths)), sum(lengths) + n)

    uneven = policy.choose(rows, 100.0, 0)
    highest = max(rate([length] * n) for length in range(k + 1))
    longest = max(length for length in range(k + 1) if rate([length] * n) >= (1 - TIE) * highest)
    alike = [longest if highest > rate([0] * n) else 0] * n
    gain = rate(uneven) / highest - 1
    for cost, expected in ((gain * 0.9 + 1e-9, uneven), (gain * 1.1 + 1e-6, alike)):
        again = policy_with(chances, table)
        again.uneven.cost = cost
        again.uneven._gain = 0.0
        assert again.choose(rows, 100.0, 0) == (expected if gain > 1e-6 else alike)


@pytest.mark.parametrize("seed", range(30))
def test_passes_are_paid_for_by_the_row_that_drafts_the_most(seed: int) -> None:
    rng = random.Random(seed)
    k = 4
    chances = sorted((rng.uniform(0.2, 0.97) for _ in range(k)), reverse=True)
    table = CostTable([1, 16], [1.0, rng.uniform(1.0, 3.0)])
    policy = policy_with(chances, table, rng.choice([0.05, 0.2, 0.5]), PASSES)
    rows = [SpeculatingRow(k, RequestEffect(value, 0.0)) for value in (-1.0, 0.0, 2.0)]
    lengths = policy.choose(rows, 100.0, 0)
    survival = [policy.acceptance.survival(row.effect.group, hopeful=True) for row in rows]
    line = policy.costs.line(3, 100.0, 0)

    def rate(lengths: tuple[int, ...]) -> float:
        total = sum(lengths)
        tokens = 3 + sum(sum(chances[:length]) for chances, length in zip(survival, lengths, strict=True))
        return tokens / step_s(line, total, total, total, max(lengths))

    best = max(map(rate, itertools.product(range(k + 1), repeat=3)))
    assert rate(tuple(lengths)) >= (1 - 1e-6) * best


def test_dear_passes_leave_drafts_out_that_one_pass_would_make() -> None:
    table = CostTable([1, 1000], [1.0, 1.1])
    lengths = {}
    for work in (BLOCKS, PASSES):
        policy = policy_with([0.7] * K, table, 0.3, work)
        for num_rows, num_drafts in [(1, 1), (8, K), (8, 1), (1, K)] * 20:
            shape = decode_shape(num_rows, num_drafts, work=work)
            policy.costs.observe(shape, table.at(shape.num_tokens), 0.3 * shape.num_passes)
        rows = [SpeculatingRow(K, RequestEffect(0.0, 0.0)) for _ in range(8)]
        (lengths[work],) = set(policy.choose(rows, 100.0, 0))
    assert lengths == {BLOCKS: K, PASSES: 2}


def test_free_drafts_are_all_taken_and_dear_ones_not_at_all() -> None:
    free, dear = CostTable([1, 1000], [1.0, 1.0]), CostTable([1, 1000], [1.0, 1000.0])
    rows = [SpeculatingRow(K, RequestEffect(0.0, 0.0)) for _ in range(8)]
    assert policy_with([0.8] * K, free).choose(rows, 100.0, 0) == [K] * 8
    assert policy_with([0.5] * K, dear, draft_s=1.0).choose(rows, 100.0, 0) == [0] * 8


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.97])
def test_of_given_choices_all_rows_get_the_best(chance: float) -> None:
    policy = policy_with([chance] * K, CostTable([1, 64], [1.0, 8.0]), draft_s=0.1)
    policy._shapes = ((1, 1), (3, 3), (7, 7))
    rows = [SpeculatingRow(K, RequestEffect(value, 0.0)) for value in (-1.0, 0.0, 2.0)]
    lengths = policy.choose(rows, 100.0, 0)
    line = policy.costs.line(3, 100.0, 0)
    survival = [policy.acceptance.survival(row.effect.group, hopeful=True) for row in rows]

    def rate(length: int) -> float:
        tokens = 3 + sum(sum(chances[:length]) for chances in survival)
        return tokens / step_s(line, 3 * length, 3 if length else 0, 3 * (length + 1) if length else 0)

    assert lengths == [max((0, 1, 3, 7), key=rate)] * 3


def test_a_row_of_a_group_that_was_not_there_gets_what_the_nearest_gets() -> None:
    policy = policy_with([0.5] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=1.0)
    assert policy.decided_length(SpeculatingRow(K)) == K, "nothing was decided yet"
    policy.choose([SpeculatingRow(K, RequestEffect(-3.0, 0.0))], 100.0, 0)
    assert policy.decided_length(SpeculatingRow(K)) == 0
    policy._lengths = {-6: 0, 2: 3, 8: 7}
    assert [policy.decided_length(SpeculatingRow(K, RequestEffect(value, 0.0))) for value in (-2.5, 0.5, 3.5)] == [
        0,
        3,
        7,
    ]


def test_a_row_gets_no_more_than_its_own_k() -> None:
    policy = policy_with([0.9] * K, CostTable([1, 1000], [1.0, 1.0]))
    assert policy.choose([SpeculatingRow(2), SpeculatingRow(K)], 100.0, 0) == [2, K]


def test_prompt_tokens_of_the_step_count_in_its_cost() -> None:
    # A step that takes long anyway has room for drafts.
    policy = policy_with([0.5] * K, CostTable([1, 32, 2000], [1.0, 8.0, 100.0]), draft_s=2.0)
    rows = [SpeculatingRow(K, RequestEffect(0.0, 0.0))]
    assert policy.choose(rows, 100.0, 0) == [0]
    policy._num_rows = 0
    assert policy.choose(rows, 100.0, 1000)[0] > 0


@pytest.mark.parametrize(("num_rows", "drafting"), [(1, 1), (4, 4), (8, 4), (32, 5), (64, 10)])
def test_of_many_rows_some_draft_before_the_first_decision(num_rows: int, drafting: int) -> None:
    """A step whose rows all draft k may take as long as k + 1 steps, where nothing was measured."""
    policy = AdaptiveSpeculation(K, BLOCKS)
    assert policy.choose([SpeculatingRow(K) for _ in range(num_rows)], 100.0, 0).count(K) == drafting


def test_of_many_prompts_some_draft_a_first_block_before_the_first_decision() -> None:
    policy = AdaptiveSpeculation(K, BLOCKS)
    rows = [SpeculatingRow(K) for _ in range(4 * K)]
    first = [policy.choose_first_block(row) for row in rows]
    assert first[:4] == [K] * 4
    assert first[4:].count(K) == 4, "of more one in k"
    assert [policy.choose_first_block(row) for row in rows] == first, "asked again, while its prompt goes on"
    assert policy.choose_first_block(SpeculatingRow(0)) == 0


def measured_policy(token_s: float) -> AdaptiveSpeculation:
    """One that knows what steps cost: a millisecond, and this much for each token."""
    policy = AdaptiveSpeculation(K, BLOCKS)
    sizes = [(rows, drafts) for rows in (1, 4, 16) for drafts in (0, 2, K)]
    policy.begin_measured(
        [
            MeasuredStep(rows, rows * (1 + drafts), drafts, 1e-3 + token_s * rows * (1 + drafts), 1e-4 * (drafts > 0))
            for rows, drafts in sizes
        ]
    )
    return policy


@pytest.mark.parametrize(("token_s", "num_rows", "length"), [(1e-6, 16, K), (1e-3, 16, 0), (1e-4, 1, K)])
def test_the_first_decision_of_a_policy_that_knows_the_costs_needs_no_steps(
    token_s: float, num_rows: int, length: int
) -> None:
    """And so do the first blocks of requests that come together."""
    policy = measured_policy(token_s)
    policy.choose_draft_lengths([], 100, num_rows)
    assert {policy.choose_first_block(SpeculatingRow(K)) for _ in range(num_rows)} == {length}
    lengths = policy.choose([SpeculatingRow(K) for _ in range(num_rows)], 100.0, 0)
    assert lengths.count(length) >= num_rows - 2, "but for those that probe"


def test_a_decision_for_one_row_is_not_that_of_many_that_come_after_it() -> None:
    policy = measured_policy(1e-4)
    row = SpeculatingRow(K)
    assert policy.choose([row], 100.0, 0) == [K]
    running = [Decoding(row)]
    policy.choose_draft_lengths(running, 50, 1)
    assert policy.choose_first_block(SpeculatingRow(K)) == K, "one more"
    policy.choose_draft_lengths(running, 1000, 15)
    assert policy.choose_first_block(SpeculatingRow(K)) < K
    assert policy.choose_first_block(SpeculatingRow(0)) == 0
    policy.choose_draft_lengths(running, 0, 0)
    assert policy.choose_first_block(SpeculatingRow(K)) == K
    unknown = AdaptiveSpeculation(K, BLOCKS)
    unknown.choose_draft_lengths([], 1000, 16)
    assert unknown.choose_first_block(SpeculatingRow(K)) == K, "the costs are not known"


def test_first_blocks_of_requests_that_wait_are_decided_once_until_the_next_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, calls = measured_policy(1e-4), [0]
    optimal = policy._optimal_lengths

    def counted(groups: Counter[int], line: StepLine) -> dict[int, int]:
        calls[0] += groups.total() == 16
        return optimal(groups, line)

    monkeypatch.setattr(policy, "_optimal_lengths", counted)
    policy.choose([row := SpeculatingRow(K)], 100.0, 0)
    for _ in range(5):
        policy._choose_first_length(16, 1000)
    assert calls[0] == 1
    policy._decide([row], 100.0, 0)
    policy._choose_first_length(16, 1000)
    assert calls[0] == 2


def test_a_first_block_while_drafting_rests_is_followed_by_a_decision() -> None:
    policy = measured_policy(1e-4)
    policy.rests, policy._lengths, policy._num_running = True, {0: 0}, 8
    policy._first_length = 2
    assert policy.choose_first_block(SpeculatingRow(K)) == 2
    assert not policy.skip_decision(8)


def test_requests_that_wait_for_blocks_do_not_count_as_beginning() -> None:
    """Prompts of 12 tokens, of which each takes 4 blocks with its first drafts: 12 blocks are for three of them."""
    engine = Engine(make_config(num_blocks=12, max_num_seqs=16, adaptive_speculation=True))
    speculation = engine.core.scheduler.speculation
    assert speculation is not None
    choose, beginning = speculation.choose_draft_lengths, list[int]()

    def chosen(running: Collection[Any], num_prompt_tokens: int, num_beginning: int) -> None:
        beginning.append(num_beginning)
        choose(running, num_prompt_tokens, num_beginning)

    speculation.choose_draft_lengths = chosen  # type: ignore[method-assign]
    engine.run(*(make_request(str(i), [20 + i] * 12, max_tokens=4) for i in range(10)))
    assert beginning[0] == 3
    assert max(beginning) <= 3
    assert 1 in beginning, "the last ones"


@dataclass
class Decoding:
    """A request that decodes."""

    speculation: SpeculatingRow
    num_speculative_tokens: int = K
    num_computed: int = 100
    draft_length: int = 0
    in_prefill: bool = False
    max_useful_drafts: int = K


@pytest.mark.parametrize(("num_left", "expected"), [(300, 18), (282, 0), (400, 118), (5000, 282), (0, 0)])
def test_prompts_that_end_in_the_step_that_is_planned_take_no_time_of_the_one_that_verifies(
    num_left: int, expected: int
) -> None:
    """Drafts beside a long prompt cost little, so many would be drafted for a step that has none."""
    policy = policy_with([0.5] * K, CostTable([1, 512], [1.0, 2.0]))
    policy.planned(SchedulerOutput(1, [], num_prefill_tokens=282))
    noted: list[int] = []

    def choose(rows: Sequence[SpeculatingRow], mean_position: float, num_other_tokens: int) -> list[int]:
        noted.append(num_other_tokens)
        return [0] * len(rows)

    policy.choose = choose  # type: ignore[method-assign]
    policy.choose_draft_lengths([Decoding(SpeculatingRow(K))], num_left)
    assert noted == [expected]


def test_a_decision_does_not_outlast_the_prompts_that_it_was_made_beside() -> None:
    policy = policy_with([0.2] * K, CostTable([1, 8, 512], [1.0, 8.0, 8.01]))
    rows = [SpeculatingRow(K) for _ in range(4)]
    assert all(policy.choose(rows, 100.0, 400)), "drafts beside prompts are almost free"
    assert not any(policy.choose(rows, 100.0, 0)), "and cost as much as a row without them"

"""How many drafts each row gets: the two estimates and the decision."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from dflash_backend.core.acceptance import AcceptanceEstimator, RequestEffect, VerifiedBlock
from dflash_backend.core.linear_fit import LinearFit
from dflash_backend.core.plan import MeasuredStep, ScheduledRequest
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.speculation import FIRST_STEPS, MAX_STEPS_BETWEEN_PROBES, AdaptiveSpeculation, SpeculatingRow
from dflash_backend.core.step_costs import CostTable, StepCosts, StepShape
from dflash_backend.core.step_history import StepHistory

K = 7


def row_of(num_draft: int, num_next: int, num_new: int = 1, num_computed: int = 100) -> ScheduledRequest:
    return ScheduledRequest("r", num_computed, num_new, num_draft, True, num_next, [])


def decode_shape(num_rows: int, num_drafts: int, position: int = 100) -> StepShape:
    """That of rows of so many drafts each, which draft as many again."""
    rows = [row_of(num_drafts, num_drafts, num_computed=position)] * num_rows
    return StepShape.of(rows, lambda k: k + 1)


# The linear model


def test_a_fit_finds_the_coefficients_behind_noisy_times() -> None:
    rng, fit = random.Random(1), LinearFit([5.0, 5.0, 0.0], [5.0, 5.0, 5.0])
    for _ in range(200):
        features = [1.0, rng.uniform(1, 200), rng.uniform(0, 50)]
        fit.observe(features, (3.0 + 0.2 * features[1] + 0.1 * features[2]) * rng.gauss(1, 0.05))
    for features in ([1.0, 1.0, 0.0], [1.0, 200.0, 0.0], [1.0, 10.0, 50.0]):
        true = 3.0 + 0.2 * features[1] + 0.1 * features[2]
        assert fit.at(features) == pytest.approx(true, rel=0.1)
        assert fit.uncertainty(features) < 0.2


def test_no_coefficient_falls_below_zero_and_a_spike_moves_little() -> None:
    fit = LinearFit([1.0, 1.0], [1.0, 1.0])
    for x in (1, 50, 1, 50, 25, 10) * 10:
        fit.observe([1.0, x], 10.0 - 0.1 * x)
    assert min(fit.coefficients) >= 0.0
    before = fit.at([1.0, 25.0])
    fit.observe([1.0, 25.0], 100 * before)
    assert fit.at([1.0, 25.0]) < 1.1 * before


def test_what_was_never_seen_stays_uncertain() -> None:
    fit = LinearFit([8.0, 0.5], [8.0, 0.5])
    for _ in range(100):
        fit.observe([1.0, 16.0], 16.0)
    assert fit.at([1.0, 16.0]) == pytest.approx(16.0, rel=0.01)
    assert fit.uncertainty([1.0, 16.0]) < 0.05 < 0.15 < fit.uncertainty([1.0, 1.0])


# Times of steps


def test_a_steps_shape_counts_tokens_positions_and_queries_of_its_rows() -> None:
    rows = [row_of(7, 3), row_of(0, 0, num_new=50, num_computed=0), row_of(2, 0)]
    shape = StepShape.of(rows, lambda k: k + 1)
    assert shape == StepShape(8 + 50 + 3, 108 + 50 + 103, 8 * 108 + 50 * 50 + 3 * 103, 4, 108)


@pytest.mark.parametrize("table", [None, CostTable([1, 8, 64, 512], [1.0, 1.0, 1.2, 6.0])])
def test_the_line_of_a_decision_is_the_estimate_itself(table: CostTable | None) -> None:
    costs, rng = StepCosts(table), random.Random(2)
    for _ in range(60):
        shape = decode_shape(rng.choice([1, 8, 64]), rng.randrange(8), rng.randrange(50, 1000))
        costs.observe(shape, 1 + 0.1 * shape.num_tokens, 0.2 + 0.01 * shape.num_queries if shape.num_queries else 0.0)
    line = costs.line(num_rows=8, position=100.0, num_other=20)
    for num_drafts in (0, 3, 7):
        total = 8 * num_drafts
        shape = StepShape(
            28 + total, 800, (28 + total) * 100, 8 * (num_drafts + 1) if num_drafts else 0, 800 if num_drafts else 0
        )
        seconds = line.seconds(total, 8 if num_drafts else 0, shape.num_queries)
        draft = costs._draft
        assert draft is not None
        drafting_s = draft.at(shape.draft) if num_drafts else 0.0
        assert seconds == pytest.approx(costs.target_s(shape) + drafting_s)


def test_a_table_is_read_between_its_points_and_beyond_them() -> None:
    table = CostTable([2, 4, 8], [1.0, 1.0, 3.0])
    assert [table.at(n) for n in (1, 2, 3, 6, 8, 16)] == [1.0, 1.0, 1.0, 2.0, 3.0, 6.0]


def test_steps_that_run_correct_the_entries_beside_their_size_and_no_others() -> None:
    table = CostTable([1, 10, 20, 100], [1.0, 1.0, 2.0, 10.0])
    for _ in range(400):
        table.correct(18, 1.5 * 1.8 / table.at(18))
    assert table.at(18) == pytest.approx(1.5 * 1.8, rel=0.01)
    assert (table.at(1), table.at(100)) == (1.0, 10.0)
    assert table.at(20) / 2.0 > table.at(10) / 1.0 > 1.0, "the nearer entry moves more"


def test_a_table_that_is_off_at_one_size_becomes_right_there() -> None:
    def real_s(num_tokens: int) -> float:
        return 1.0 + 0.01 * num_tokens

    sizes = [1, 32, 64, 128, 256]
    costs, rng = StepCosts(CostTable(sizes, [real_s(n) * (1.3 if n == 64 else 1.0) for n in sizes])), random.Random(3)
    for _ in range(1500):
        shape = decode_shape(rng.choice([8, 16, 32]), rng.randrange(8), 100)
        costs.observe(shape, real_s(shape.num_tokens) * rng.gauss(1, 0.03), 0.1)
    assert costs.target_s(decode_shape(32, 1, 100)) == pytest.approx(real_s(64), rel=0.04)
    assert costs.target_s(decode_shape(32, 0, 100)) == pytest.approx(real_s(32), rel=0.04)


def test_a_table_of_measured_steps_has_the_shortest_time_of_each_size_and_never_decreases() -> None:
    steps = [MeasuredStep(1, 1, 0, 1.0, 0.0), MeasuredStep(1, 4, 3, 0.9, 0.5), MeasuredStep(4, 8, 1, 3.0, 0.5)]
    table = CostTable.of([*steps, MeasuredStep(2, 8, 3, 2.0, 0.5)])
    assert table is not None
    assert [table.at(n) for n in (1, 4, 8)] == [1.0, 1.0, 2.0]
    assert CostTable.of(steps[:1]) is None
    assert CostTable.of([MeasuredStep(1, n, 0, 0.0, 0.0) for n in (1, 2)]) is None


def test_the_first_decision_knows_the_steps_that_were_measured() -> None:
    sizes = [(rows, rows * (1 + drafts), drafts) for rows in (1, 8, 64) for drafts in (0, 3, 7)]
    measured = [
        MeasuredStep(rows, tokens, drafts, 1e-3 + 1e-5 * tokens, 5e-4 + 1e-6 * rows * (drafts + 1) if drafts else 0.0)
        for rows, tokens, drafts in sizes
    ]
    config = SchedulerConfig(
        num_blocks=10,
        block_size=4,
        max_model_len=64,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_queue_size=8,
        enable_prefix_caching=True,
        num_speculative_tokens=7,
        adaptive_speculation=True,
        measured_steps=tuple(measured),
    )
    speculation = StepHistory(config).speculation
    assert speculation is not None
    line = speculation.costs.line(num_rows=8, position=0.0, num_other=0)
    assert line.seconds(0, 0, 0) == pytest.approx(1.08e-3, rel=0.03)
    assert line.seconds(24, 8, 32) == pytest.approx(1.32e-3 + 5.32e-4, rel=0.05)
    assert line.seconds(56, 8, 64) == pytest.approx(1.64e-3 + 5.64e-4, rel=0.05)


# Acceptance


def accepted_of(rng: random.Random, rates: list[float]) -> int:
    return next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))


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


def test_chances_come_to_the_rates_by_position() -> None:
    rates = [0.95, 0.9, 0.8, 0.6, 0.5, 0.5, 0.4]
    chances = taught(rates, K).chances(0)
    assert chances[:4] == pytest.approx(rates[:4], abs=0.08)


def test_drafts_that_were_not_verified_say_nothing() -> None:
    # Blocks are cut to 3 drafts: those 3 are known as well as if all 7 had been verified.
    rates = [0.9] * K
    assert taught(rates, 3).chances(0)[:3] == pytest.approx(rates[:3], abs=0.05)
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
    assert estimator.chances(0)[0] == pytest.approx(0.7, abs=0.15), "and the others stay where they were"


def test_requests_that_draft_more_do_not_stand_for_all() -> None:
    # The later positions are only reached by requests whose drafts are good.
    estimator, rng = AcceptanceEstimator(K), random.Random(3)
    for _ in range(60):
        good, bad = RequestEffect(), RequestEffect()
        for _ in range(120):
            estimator.observe(VerifiedBlock(good, K, accepted_of(rng, [0.97] * K)))
            estimator.observe(VerifiedBlock(bad, 2, accepted_of(rng, [0.5] * 2)))
            estimator.update()
    assert estimator.chances(0)[5] < 0.92


def test_little_knowledge_makes_hopeful() -> None:
    new, known = RequestEffect(), RequestEffect(variance=0.0)
    assert new.hopeful_group >= known.hopeful_group == new.group
    estimator = AcceptanceEstimator(K)
    assert estimator.survival(0, hopeful=True)[0] > estimator.survival(0)[0]


# The decision


def policy_with(chances: list[float], table: CostTable, draft_s: float = 0.0) -> AdaptiveSpeculation:
    policy = AdaptiveSpeculation(len(chances), table=table)
    policy.acceptance.trials = np.full(len(chances), 1e6)
    policy.acceptance.accepted = 1e6 * np.array(chances)
    policy.acceptance.variance = 0.0
    policy.acceptance._update_rates()
    policy.stats.num_steps = len(FIRST_STEPS)
    policy.costs.observe(decode_shape(1, 1), table.at(2), draft_s or 1e-9)
    return policy


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
        return tokens / line.seconds(sum(lengths), num_drafting, sum(lengths) + num_drafting)

    best = max(map(rate, itertools.product(range(k + 1), repeat=3)))
    # The first draft of a row costs a query more, which the order by likelihood does not see.
    assert rate(tuple(lengths)) >= (0.97 if draft_s else 1 - 1e-6) * best
    assert lengths == sorted(lengths), "a likelier row never gets fewer"


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
        return tokens / line.seconds(3 * length, 3 if length else 0, 3 * (length + 1) if length else 0)

    assert lengths == [max((0, 1, 3, 7), key=rate)] * 3


def test_a_row_of_a_group_that_was_not_there_gets_what_the_nearest_gets() -> None:
    policy = policy_with([0.5] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=1.0)
    assert policy.first_length(SpeculatingRow(K)) == K, "nothing was decided yet"
    policy.choose([SpeculatingRow(K, RequestEffect(-3.0, 0.0))], 100.0, 0)
    assert policy.first_length(SpeculatingRow(K)) == 0
    policy._lengths = {-6: 0, 2: 3, 8: 7}
    assert [policy.first_length(SpeculatingRow(K, RequestEffect(value, 0.0))) for value in (-2.5, 0.5, 3.5)] == [
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


def simulate(policy: AdaptiveSpeculation, accepts: list[bool], num_rows: int = 4, seed: int = 0) -> list[int]:
    """Steps in each of which all drafts are accepted with a chance of 0.95 or 0.05; the drafts of each step."""
    rng, rows, pending, drafts = (
        random.Random(seed),
        [SpeculatingRow(policy.k) for _ in range(num_rows)],
        [0] * num_rows,
        [],
    )
    for good in accepts:
        lengths = policy.choose(rows, 100.0, 0)
        for row, length in zip(rows, pending, strict=True):
            if length:
                policy.observe_draft(row, length, accepted_of(rng, [0.95 if good else 0.05] * length))
        plan = [row_of(before, after) for before, after in zip(pending, lengths, strict=True)]
        shape = StepShape.of(plan, lambda k: k + 1)
        draft_s = 1e-3 * (1 + 0.02 * shape.num_queries) if any(lengths) else 0.0
        policy.observe_step(shape, 1e-3 * (4 + 0.2 * shape.num_tokens) * rng.gauss(1, 0.05) + draft_s, draft_s)
        pending = lengths
        drafts.append(sum(lengths))
    return drafts


def test_drafting_ends_where_it_does_not_pay_and_comes_back_when_it_does() -> None:
    drafts = simulate(AdaptiveSpeculation(K), [True] * 100 + [False] * 300 + [True] * 100)
    assert sum(drafts[20:100]) > 0.8 * 80 * 4 * K
    assert sum(drafts[120:400]) < 0.1 * 280 * 4 * K
    assert sum(drafts[450:500]) > 0.8 * 50 * 4 * K


@pytest.mark.parametrize("seed", range(5))
def test_one_stream_drafts_again_soon_after_a_probe_was_accepted(seed: int) -> None:
    drafts = simulate(AdaptiveSpeculation(K), [False] * 300 + [True] * 150, num_rows=1, seed=seed)
    assert sum(drafts[60:300]) < 0.05 * 240 * K
    first = next(step for step in range(300, 450) if drafts[step])
    assert sum(drafts[first + 25 :]) > 0.8 * (450 - first - 25) * K


def test_it_is_tried_now_and_then_for_ever() -> None:
    drafts = simulate(AdaptiveSpeculation(K), [False] * 1500)
    tried = [step for step, count in enumerate(drafts) if count and step > 100]
    gaps = [after - before for before, after in itertools.pairwise([100, *tried, 1500])]
    assert max(gaps) <= MAX_STEPS_BETWEEN_PROBES + 8
    assert len(tried) < 0.1 * 1400


def test_steps_without_drafts_are_run_until_their_time_is_known() -> None:
    policy = AdaptiveSpeculation(K)
    drafts = simulate(policy, [True] * 400, num_rows=1)
    assert 0 < drafts.count(0) < 30
    assert policy.stats.num_steps_without_drafts == drafts.count(0)


def test_steps_without_drafts_are_run_more_seldom_each_time_while_drafts_pay() -> None:
    policy = policy_with([0.95] * K, CostTable([1, 1000], [1.0, 1.0]))
    policy.costs.uncertainty = lambda shape: 1.0  # type: ignore[method-assign]
    lengths = [policy.choose([SpeculatingRow(K)], 100.0, 0)[0] for _ in range(700)]
    without = [step for step, length in enumerate(lengths) if length == 0]
    waits = [later - earlier for earlier, later in itertools.pairwise(without)]
    assert waits == [48, 96, 192, 192]


def test_what_is_expected_is_what_comes_of_it() -> None:
    policy, num_accepted = AdaptiveSpeculation(K), Counter[int]()
    observe = policy.observe_draft

    def count(row: SpeculatingRow, num_draft: int, accepted: int) -> None:
        num_accepted.update(range(accepted))
        observe(row, num_draft, accepted)

    policy.observe_draft = count  # type: ignore[method-assign]
    simulate(policy, [True] * 600)
    stats = policy.stats
    for position in range(3):
        expected = stats.num_expected_tokens_per_pos[position]
        assert expected == pytest.approx(num_accepted[position], rel=0.06)
        assert stats.num_draft_tokens_per_pos[position] > num_accepted[position]


def test_all_rows_take_their_turn_to_probe() -> None:
    policy = policy_with([0.02] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=1.0)
    rows = [SpeculatingRow(K) for _ in range(16)]
    probed = {i for _ in range(2000) for i, length in enumerate(policy.choose(rows, 100.0, 0)) if length}
    assert probed == set(range(16))

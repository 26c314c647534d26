"""What steps cost: the linear model, the table of measured steps, and the time of drafting."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from dflash_backend.core.linear_fit import LinearFit
from dflash_backend.core.plan import MeasuredStep
from dflash_backend.core.scheduler_config import DrafterWork, SchedulerConfig
from dflash_backend.core.speculation import AdaptiveSpeculation
from dflash_backend.core.speculation.costs import EVERY, FEW, CostTable, StepCosts, StepShape
from tests.core.policies import step_s
from tests.core.step_shapes import BLOCKS, PASSES, decode_shape, row_of

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
    of_target = 3, 8 + 50 + 3, 108 + 50 + 103, 8 * 108 + 50 * 50 + 3 * 103
    assert StepShape.of(rows, BLOCKS) == StepShape(*of_target, 4, 108, 1)
    assert StepShape.of(rows, PASSES) == StepShape(*of_target, 3, 3 * 108, 3)
    assert StepShape.of(rows, DrafterWork(None)) == StepShape(*of_target, 0, 108, 1)


@pytest.mark.parametrize("table", [None, CostTable([1, 8, 64, 512], [1.0, 1.0, 1.2, 6.0])])
def test_the_line_of_a_decision_is_the_estimate_itself(table: CostTable | None) -> None:
    costs, rng = StepCosts(table), random.Random(2)
    for _ in range(60):
        shape = decode_shape(rng.choice([1, 8, 64]), rng.randrange(8), rng.randrange(50, 1000))
        costs.observe(shape, 1 + 0.1 * shape.num_tokens, 0.2 + 0.01 * shape.num_queries if shape.num_queries else 0.0)
    costs._plain.clear()
    line = costs.line(num_rows=8, position=100.0, num_other=20)
    for num_drafts in (0, 3, 7):
        total = 8 * num_drafts
        shape = StepShape(
            8, 28 + total, 800, (28 + total) * 100, 8 * (num_drafts + 1) if num_drafts else 0, 800 if num_drafts else 0,
            1 if num_drafts else 0,
        )  # fmt: skip
        seconds = step_s(line, total, 8 if num_drafts else 0, shape.num_queries)
        drafting_s = costs._drafts[2].at(shape.draft) if num_drafts else 0.0
        assert seconds == pytest.approx(costs.target_s(shape) + drafting_s)


def test_a_step_without_drafts_takes_what_such_steps_took_though_a_line_says_more() -> None:
    """Each token of a step takes less time the more there are."""
    lines = {}
    for num_rows in (4, 32):
        costs = StepCosts()
        for number in range(400):
            num_tokens = num_rows * (1 + [0, 1, 2, 15, 15, 1, 2, 15, 15][number % 9])
            shape = StepShape(num_rows, num_tokens, 100 * num_rows, 100 * num_tokens)
            costs.observe(shape, math.sqrt(num_tokens / num_rows), 0.0)
        lines[num_rows] = costs.line(num_rows, 100.0, 0)
    assert lines[4].plain == 1.0, "of few rows nothing was gained"
    line, alone = lines[32], replace(lines[32], plain=1.0)
    assert line.plain_s < 1.05
    assert alone.plain_s > 1.1
    # The correction ends where a step is twice as large, and never makes a larger step the shorter one.
    drafts = np.arange(15 * 32)
    assert np.array_equal(line.verify_s(drafts)[32:], alone.verify_s(drafts)[32:])
    assert (np.diff(line.verify_s(drafts)) > 0).all()


def test_the_time_of_drafting_pass_by_pass_follows_the_longest_row() -> None:
    costs, rng = StepCosts(), random.Random(4)

    def real_s(shape: StepShape) -> float:
        return 0.1 * shape.num_passes + 0.002 * shape.num_queries + 1e-6 * shape.num_draft_positions

    for _ in range(300):
        num_rows = rng.choice([5, 8, 16])
        longest = rng.choice([0, 6, 6, 6])  # one step in four drafts nothing
        rows = [row_of(2, rng.randrange(longest + 1), num_computed=rng.randrange(50, 2000)) for _ in range(num_rows)]
        shape = StepShape.of(rows, PASSES)
        costs.observe(shape, 1.0, real_s(shape) * rng.gauss(1, 0.03) if shape.num_passes else 0.0)
    line = costs.line(num_rows=8, position=500.0, num_other=0)
    for lengths in ([5] * 8, [1] * 8, [5] + [1] * 7, [3]):
        rows = [row_of(0, length, num_computed=499) for length in lengths]
        drafts = sum(lengths)
        found = line.draft_s(drafts, drafts, max(lengths))
        assert found == pytest.approx(real_s(StepShape.of(rows, PASSES)), rel=0.08)


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
        draft_shapes=((3, 3), (7, 7)),
        measured_steps=tuple(measured),
    )
    speculation = AdaptiveSpeculation.of(config)
    assert speculation is not None
    line = speculation.costs.line(num_rows=8, position=0.0, num_other=0)
    assert step_s(line, 0, 0, 0) == pytest.approx(1.08e-3, rel=0.03)
    assert step_s(line, 24, 8, 32) == pytest.approx(1.32e-3 + 5.32e-4, rel=0.05)
    assert step_s(line, 56, 8, 64) == pytest.approx(1.64e-3 + 5.64e-4, rel=0.05)


def test_of_short_steps_that_are_alike_few_are_taken_in() -> None:
    costs, taken = StepCosts(), []
    for number in range(200):
        before = list(costs._targets[0].coefficients) if costs._targets else []
        costs.observe(StepShape(1, 4 + number % 13, 100, 400, 5, 100, 1), 1.0 + 0.01 * (number % 7), 0.1)
        taken.append(before != costs._targets[0].coefficients)
    assert all(taken[:FEW])
    assert sum(taken[FEW + 1 :]) <= (200 - FEW) // EVERY + 1
    fit = costs._targets[0]
    before = list(fit.coefficients)
    costs.observe(StepShape(1, 400, 100, 40_000, 5, 100, 1), 9.0, 0.1)
    assert fit.coefficients != before, "another kind of step"


def test_steps_of_another_kind_between_them_change_nothing_in_how_many_are_taken_in() -> None:
    """As with one stream of short answers, where each few steps have a prompt."""
    costs, num_taken = StepCosts(), 0
    for number in range(401):
        if number % 5 == 0:
            costs.observe(StepShape(1, 60, 60, 3600, 5, 60, 1), 3.0, 0.1)
        before = list(costs._targets[0].coefficients)
        costs.observe(StepShape(1, 8, 100, 800, 5, 100, 1), 1.0 + 0.01 * (number % 7), 0.1)
        num_taken += before != costs._targets[0].coefficients
    assert num_taken <= FEW + 1 + 401 // EVERY
    costs.pass_step()
    for is_taken in (True, False):
        before = list(costs._targets[0].coefficients)
        costs.observe(StepShape(1, 8, 100, 800, 5, 100, 1), 1.7, 0.1)
        assert (before != costs._targets[0].coefficients) == is_taken, "the first after one that was passed over"


def test_what_many_rows_cost_is_told_apart_from_what_one_costs() -> None:
    """As on a CPU, where a token of one row takes several times as long as one of 64."""
    costs, rng = StepCosts(), random.Random(6)

    def run(num_rows: int, fixed_s: float, token_s: float, num_steps: int) -> None:
        for _ in range(num_steps):
            shape = decode_shape(num_rows, rng.randrange(16), 100)
            draft_s = fixed_s / 4 + token_s * shape.num_queries if shape.num_queries else 0.0
            costs.observe(shape, (fixed_s + token_s * shape.num_tokens) * rng.gauss(1, 0.03), draft_s)

    run(1, 1.0, 0.1, 400)
    of_one = costs.line(1, 100.0, 0)
    assert costs.line(64, 100.0, 0) != of_one, "of the rows that are nearest, until there are such"
    run(64, 28.0, 0.03, 40)
    assert costs.line(1, 100.0, 0) == of_one, "as it was"
    line = costs.line(64, 100.0, 0)
    assert line.per_draft == pytest.approx(0.03, rel=0.25)
    assert step_s(line, 0, 0, 0) == pytest.approx(28 + 0.03 * 64, rel=0.1)
    assert step_s(line, 64 * 15, 64, 64 * 16) == pytest.approx(28 * 1.25 + 0.03 * 64 * 32, rel=0.1)


@pytest.mark.parametrize(("num_rows", "like"), [(2, 4), (5, 16), (17, 64), (65, 256)])
def test_rows_whose_numbers_are_alike_share_what_they_cost(num_rows: int, like: int) -> None:
    costs = StepCosts()
    for size in (num_rows - 1, num_rows, like + 1):
        for num_drafts in (1, 3, 7) * 20:
            shape = decode_shape(size, num_drafts, 100)
            costs.observe(shape, size + 0.1 * shape.num_tokens, 0.1)
    lines = [costs.line(each, 0.0, 0) for each in (num_rows - 1, num_rows, like, like + 1)]
    assert lines[1].per_draft == lines[2].per_draft
    assert len({line.per_draft for line in lines}) == 3


def test_a_step_that_was_measured_has_the_rows_that_it_had() -> None:
    assert StepShape.of_measured(MeasuredStep(8, 32, 3, 1.0, 0.5), BLOCKS) == StepShape(8, 32, 8, 32, 32, 8, 1)


def test_how_certain_a_time_is_follows_from_steps_of_as_many_rows() -> None:
    costs = StepCosts()
    costs.observe(decode_shape(1, 15), 1.0, 0.1)
    for number in range(100):
        costs.observe(decode_shape(64, number % 2), 2.0 + number % 2, 0.1)
    assert costs.uncertainty(64, 100.0, 0) < 0.1 < costs.uncertainty(1, 100.0, 0)


def test_how_certain_a_time_is_beside_prompts_follows_from_the_rows_and_not_from_the_tokens() -> None:
    costs = StepCosts()
    costs.observe(decode_shape(256, 0), 9.0, 0.0)
    for number in range(100):
        num_tokens = 1 + 255 * (number % 2)
        costs.observe(StepShape(1, num_tokens, 100, 100 * num_tokens), 1.0 + number % 2, 0.0)
    assert costs.uncertainty(1, 100.0, 255) < 0.1 < costs.uncertainty(256, 100.0, 0)


@pytest.mark.parametrize(
    ("known", "num_rows", "like"), [((1, 64), 2, 1), ((1, 64), 16, 64), ((1, 64), 256, 64), ((1, 16), 4, 1)]
)
@pytest.mark.parametrize("late", [False, True])
def test_what_is_not_known_of_some_rows_is_taken_from_the_nearest_number(
    known: tuple[int, int], num_rows: int, like: int, late: bool
) -> None:
    """Whichever was seen first; of two as near the fewer."""
    costs = StepCosts()
    for size in known[::-1] if late else known:
        for num_drafts in (1, 3, 7) * 20:
            shape = decode_shape(size, num_drafts)
            costs.observe(shape, size + 0.01 * size * shape.num_tokens, 0.01 * size * shape.num_queries)
    found, expected = costs.line(num_rows, 0.0, 0), costs.line(like, 0.0, 0)
    assert (found.per_draft, found.per_query) == (expected.per_draft, expected.per_query)


def test_what_drafting_takes_the_host_is_no_part_of_a_step_without_drafts() -> None:
    """On a CPU it may be as long as the target's pass, and a step without drafts would be thought twice as long."""
    costs = StepCosts()

    def observe(num_drafts: int) -> None:
        shape = decode_shape(1, num_drafts)
        costs.observe(shape, 1.0 + 0.02 * shape.num_tokens + 0.8 * (num_drafts > 0), 0.5 * (num_drafts > 0))
        costs.pass_step()

    for number in range(200):
        observe(0 if number % 50 == 4 else number % 15 + 1)
    line = costs.line(1, 100.0, 0)
    assert step_s(line, 0, 0, 0) == pytest.approx(1.02, rel=0.1)
    assert step_s(line, 15, 1, 16) == pytest.approx(1.0 + 0.02 * 16 + 0.8 + 0.5, rel=0.1)


def test_steps_of_other_numbers_of_rows_begin_with_what_steps_consist_of() -> None:
    costs = StepCosts()
    for number in range(200):
        shape = decode_shape(1, number % 16)
        costs.observe(shape, 1.0 + 0.002 * shape.num_tokens, 0.0)
        costs.pass_step()
    shape = decode_shape(8, 15)
    costs.observe(shape, 1.0 + 0.002 * shape.num_tokens, 0.0)
    assert step_s(costs.line(8, 100.0, 0), 0, 0, 0) == pytest.approx(1.016, rel=0.2)

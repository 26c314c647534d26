"""From step to step: when numbers of drafts are decided anew, when drafting rests, and when it is tried again."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from dflash_backend.core.speculation.acceptance import EFFECT_DRIFT, RequestEffect
from dflash_backend.core.speculation.costs import CostTable, StepShape
from dflash_backend.core.speculation.policy import (
    FAILED_FIRST_BLOCKS,
    FEW_ROWS,
    MAX_PROBES_IN_A_ROW,
    MAX_STEPS_BETWEEN_PROBES,
    MIN_STEPS_BETWEEN_PROBES,
    MOST_REQUESTS_BETWEEN,
    MOST_STEPS_OF_FEW,
    PROBE_DRAFTS,
    RESUMED_DRAFTS,
    SECONDS_BETWEEN_DECISIONS,
    STEPS_BETWEEN_DECISIONS,
    AdaptiveSpeculation,
    SpeculatingRow,
)
from tests.core.policies import K, accepted_of, policy_with
from tests.core.step_shapes import BLOCKS, decode_shape, row_of


def simulate(
    policy: AdaptiveSpeculation, accepts: list[bool], num_rows: int = 4, seed: int = 0, rests: bool = False
) -> list[int]:
    """Steps in each of which all drafts are accepted with a chance of 0.95 or 0.05; the drafts of each step."""
    rng, rows, pending, drafts = (
        random.Random(seed),
        [SpeculatingRow(policy.k) for _ in range(num_rows)],
        [0] * num_rows,
        [],
    )
    for good in accepts:
        goes_on = rests and policy.skip_decision(num_rows)
        lengths = [0] * num_rows if goes_on else policy.choose(rows, 100.0, 0)
        for row, length in zip(rows, pending, strict=True):
            if length:
                policy.observe_draft(row, length, accepted_of(rng, [0.95 if good else 0.05] * length))
        plan = [row_of(before, after) for before, after in zip(pending, lengths, strict=True)]
        shape = StepShape.of(plan, BLOCKS)
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
    assert max(gaps) <= MAX_STEPS_BETWEEN_PROBES
    assert len(tried) < 0.1 * 1400


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_steps_that_rest_are_what_would_have_been_chosen(seed: int, num_rows: int) -> None:
    accepts = [True] * 60 + [False] * 500 + [True] * 100
    chosen, rested = (AdaptiveSpeculation(K) for _ in range(2))
    assert simulate(chosen, accepts, num_rows, seed) == simulate(rested, accepts, num_rows, seed, rests=True)
    assert rested.stats == chosen.stats


def test_what_runs_is_looked_at_again_when_it_changes() -> None:
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=1.0)
    rows = [SpeculatingRow(K) for _ in range(8)]
    while policy.skip_decision(8) or any(policy.choose(rows, 100.0, 0)):
        pass
    assert policy.skip_decision(8)
    assert policy.skip_decision(9)
    assert not policy.skip_decision(11)


@pytest.mark.parametrize("cost", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_while_drafting_rests_decisions_come_with_the_probes(
    num_rows: int, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=cost)
    decided, tried, decide = [], [], policy._decide
    monkeypatch.setattr(policy, "_decide", lambda *args: (decided.append(step), decide(*args))[1])
    rows = [SpeculatingRow(K) for _ in range(num_rows)]
    for _ in range(20):
        policy.costs.observe(decode_shape(num_rows, 0, 100), float(num_rows), 0.0)
    for step in range(400):
        if not policy.skip_decision(num_rows) and any(policy.choose(rows, 100.0, 0)):
            tried.append(step)
    assert len(tried) > 2
    assert [step for step in decided if step > tried[1]] == tried[2:], "one for each probe"


@pytest.mark.parametrize("is_known", [False, True])
def test_while_the_time_of_steps_without_drafts_is_not_known_decisions_come_soon(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong belief of it must not last until the next probe, of which only what is accepted tells anything."""
    policy, rows = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=40.0), [SpeculatingRow(K)]
    monkeypatch.setattr(policy.costs, "uncertainty", lambda *shape: 0.01 if is_known else 0.5)
    rested = []
    for _ in range(2):
        policy.choose(rows, 100.0, 0)
        rested.append(sum(1 for _ in iter(lambda: policy.skip_decision(1), False)))
    assert (rested[1] >= STEPS_BETWEEN_DECISIONS) == is_known


def test_a_probe_of_which_a_draft_is_accepted_is_followed_by_a_decision_at_once() -> None:
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=1.0)
    rows = [SpeculatingRow(K) for _ in range(8)]
    while policy.skip_decision(8) or any(policy.choose(rows, 100.0, 0)):
        pass
    policy.observe_draft(rows[0], 2, 0)
    assert policy.skip_decision(8)
    policy.observe_draft(rows[0], 2, 1)
    assert not policy.skip_decision(8)


@pytest.mark.parametrize("draft_s", [0.0, 100.0])
def test_a_request_that_rests_becomes_less_certain_with_the_steps_that_pass(draft_s: float) -> None:
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=draft_s)
    rows = [SpeculatingRow(K, RequestEffect(variance=0.0)) for _ in range(8)]
    for _ in range(MAX_STEPS_BETWEEN_PROBES + 64):
        if not policy.skip_decision(8):
            policy.choose(rows, 100.0, 0)
    # However often it was decided meanwhile.
    assert 32 <= rows[-1].effect.variance / EFFECT_DRIFT <= 48


def test_steps_without_drafts_are_run_until_their_time_is_known() -> None:
    policy = AdaptiveSpeculation(K)
    drafts = simulate(policy, [True] * 400, num_rows=1)
    assert 0 < drafts.count(0) < 30
    assert policy.stats.num_steps_without_drafts == drafts.count(0)


def test_steps_without_drafts_are_run_more_seldom_each_time_while_drafts_pay() -> None:
    policy = policy_with([0.95] * K, CostTable([1, 1000], [1.0, 1.0]))
    policy.costs.uncertainty = lambda num_rows, position, num_other: 1.0  # type: ignore[method-assign]
    lengths = [policy.choose([SpeculatingRow(K)], 100.0, 0)[0] for _ in range(700)]
    without = [step for step, length in enumerate(lengths) if length == 0]
    waits = [later - earlier for earlier, later in itertools.pairwise(without)]
    assert waits == [64, 96, 192, 192], "with the decisions, 32 steps apart"


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


@pytest.mark.parametrize(
    ("chance", "num_rows", "steps"), [(0.95, 1, MOST_STEPS_OF_FEW), (0.95, 8, STEPS_BETWEEN_DECISIONS)]
)
def test_a_decision_holds_longer_where_few_rows_go_on_as_they_were(
    monkeypatch: pytest.MonkeyPatch, chance: float, num_rows: int, steps: int
) -> None:
    policy = policy_with([chance] * K, CostTable([1, 1000], [1.0, 100.0]))
    decisions, decide, step = [], policy._decide, 0
    monkeypatch.setattr(policy, "_decide", lambda *given: (decisions.append(step), decide(*given))[1])
    rows = [SpeculatingRow(K) for _ in range(num_rows)]
    for step in range(120):  # noqa: B007 - the decisions read it
        policy.choose(rows, 100.0, 0)
    assert {after - before for before, after in itertools.pairwise(decisions[3:])} == {steps}


@pytest.mark.parametrize(
    ("num_rows", "share", "steps"), [(8, 0.1, 4), (8, 0.6, 2), (8, 2.0, 1), (1, 0.29, 11), (1, 1.6, 2), (1, 3.0, 1)]
)
def test_a_decision_of_rows_that_draft_holds_for_no_more_time_than_deciding_is_worth(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, share: float, steps: int
) -> None:
    seconds = share * SECONDS_BETWEEN_DECISIONS
    policy = policy_with([0.95] * K, CostTable([1, 1000], [seconds, 1.01 * seconds]))
    decisions, decide, step = [], policy._decide, 0
    monkeypatch.setattr(policy, "_decide", lambda *given: (decisions.append(step), decide(*given))[1])
    rows = [SpeculatingRow(K) for _ in range(num_rows)]
    for step in range(120):  # noqa: B007 - the decisions read it
        policy.choose(rows, 100.0, 0)
        policy.observe_step(StepShape(num_rows, num_rows * (K + 1), 800, 800 * (K + 1)), seconds, 0.0)
    assert {after - before for before, after in itertools.pairwise(decisions[4:])} == {steps}


def test_drafts_that_are_accepted_and_do_not_pay_are_tried_seldom() -> None:
    """Each probe succeeds, and drafting takes as long as forty steps."""
    policy = policy_with([0.9] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=40.0)
    rows, before, probes = [SpeculatingRow(K) for _ in range(32)], [0] * 32, list[int]()
    for step in range(1500):
        lengths = policy.choose(rows, 100.0, 0)
        probes += [step] * any(lengths)
        for row, length in zip(rows, before, strict=True):
            if length:
                policy.observe_draft(row, length, length)
        policy.observe_step(StepShape(32, 32 + sum(before), 3200, 3200), 0.002, 0.0)
        before = lengths
    gaps = [after - first for first, after in itertools.pairwise(probes)]
    assert {gap for gap in gaps if gap > 2} == {MAX_PROBES_IN_A_ROW * MAX_STEPS_BETWEEN_PROBES}
    assert len(probes) == 3 * MAX_PROBES_IN_A_ROW


def test_a_rest_lasts_as_many_steps_however_long_they_are() -> None:
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=40.0)
    rows = [SpeculatingRow(K) for _ in range(8)]
    while any(policy.choose(rows, 100.0, 0)):
        pass
    num_resting = 0
    while not any(policy.choose(rows, 100.0, 0)):
        policy.observe_step(StepShape(8, 8, 800, 800), 8.0, 0.0)
        num_resting += 1
    assert num_resting > MIN_STEPS_BETWEEN_PROBES


@pytest.mark.parametrize(("num_rows", "expected"), [(1, PROBE_DRAFTS), (FEW_ROWS, PROBE_DRAFTS), (FEW_ROWS + 1, 0)])
def test_a_request_that_begins_while_drafting_rests_is_tried_where_few_run(num_rows: int, expected: int) -> None:
    """Its answer may be over before the next probe."""
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=40.0)
    rows = [SpeculatingRow(K) for _ in range(num_rows)]
    while policy.skip_decision(num_rows) or any(policy.choose(rows, 100.0, 0)):
        pass
    assert policy.skip_decision(num_rows)
    rows[-1] = new = SpeculatingRow(K)
    assert policy.choose_first_block(new) == expected
    assert policy.choose_first_block(SpeculatingRow(1)) == min(expected, 1)
    assert policy.skip_decision(num_rows) == (expected == 0), "the block is not followed by another one"
    if expected:
        assert not any(policy.choose(rows, 100.0, 0))
        assert policy.skip_decision(num_rows)


def test_after_first_blocks_of_which_nothing_is_accepted_fewer_requests_are_tried() -> None:
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1000.0]), draft_s=40.0)
    row = SpeculatingRow(K)
    while any(policy.choose([row], 100.0, 0)):
        pass

    def tried(num_requests: int) -> list[bool]:
        rows = [SpeculatingRow(K) for _ in range(num_requests)]
        # A prompt of several steps asks in each.
        return [[policy.choose_first_block(row) > 0 for _ in range(3)][2] for row in rows]

    for wait in range(1, MOST_REQUESTS_BETWEEN):
        assert tried(FAILED_FIRST_BLOCKS * wait) == ([False] * (wait - 1) + [True]) * FAILED_FIRST_BLOCKS
    assert sum(tried(400)) == 400 // MOST_REQUESTS_BETWEEN
    policy.observe_draft(row, 2, 0)
    assert sum(tried(8)) == 8 // MOST_REQUESTS_BETWEEN
    policy.observe_draft(row, 2, 1)
    assert all(tried(FAILED_FIRST_BLOCKS)), "one was accepted"
    policy.observe_draft(row, 2, 1)
    assert not any(policy.choose_first_block(SpeculatingRow(0)) for _ in range(50))
    assert all(tried(FAILED_FIRST_BLOCKS)), "requests that ask for no drafts do not count"


@pytest.mark.parametrize(("num_rows", "expected"), [(FEW_ROWS, K), (FEW_ROWS + 1, RESUMED_DRAFTS)])
def test_after_a_rest_many_rows_begin_with_few_drafts(num_rows: int, expected: int) -> None:
    """What a probe has told may be of one request, and a step whose rows all draft many is long."""
    policy = policy_with([0.001] * K, CostTable([1, 1000], [1.0, 1.001]), draft_s=1e-6)
    rows = [SpeculatingRow(K, RequestEffect(variance=0.0)) for _ in range(num_rows)]
    policy._lengths = {0: 0}  # it rests
    policy.acceptance = taught = policy_with([0.95] * K, CostTable([1, 1000], [1.0, 1.001])).acceptance
    assert taught.survival(0)[-1] > 0.6
    policy._age = policy._interval
    assert policy.choose(rows, 100.0, 0) == [expected] * num_rows
    policy._age = policy._interval
    assert policy.choose(rows, 100.0, 0) == [K] * num_rows, "and goes on with what pays"

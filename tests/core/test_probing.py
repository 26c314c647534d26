"""When a few rows draft again, while drafting rests."""

from __future__ import annotations

import pytest

from dflash_backend.core.speculation.policy import (
    MAX_PROBES_IN_A_ROW,
    MAX_STEPS_BETWEEN_PROBES,
    MIN_STEPS_BETWEEN_PROBES,
    PROBE_COST,
    Probes,
)


def gaps_between(probes: Probes, cost: float, num_probes: int) -> list[int]:
    """Steps between probes of one row."""
    gaps: list[int] = []
    for _ in range(num_probes):
        steps = 0
        while probes.due_in(cost):
            before = probes.due_in(cost)
            probes.pass_steps(1)
            assert probes.due_in(cost) == before - 1
            steps += 1
        probes.rows(1)
        gaps.append(steps)
    return gaps


def test_probes_that_fail_become_rarer_and_drafting_begins_anew() -> None:
    probes = Probes()
    assert gaps_between(probes, 20 * PROBE_COST, 7) == [20, 25, 30, 35, 40, 40, 40]
    probes.note_drafting()
    assert gaps_between(probes, 20 * PROBE_COST, 2) == [20, 25]
    probes.note_success()
    assert gaps_between(probes, 20 * PROBE_COST, 3) == [0, 40, 25], "after two together the wait is for both"


def test_probes_that_succeed_follow_at_once_until_it_is_known_that_they_do_not_pay() -> None:
    probes, gaps = Probes(), list[int]()
    for _ in range(3 * MAX_PROBES_IN_A_ROW):
        gaps += gaps_between(probes, 20 * PROBE_COST, 1)
        probes.note_success()
    burst = [0] * (MAX_PROBES_IN_A_ROW - 1)
    assert gaps == [20, *burst, 20 * MAX_PROBES_IN_A_ROW, *burst, 20 * MAX_PROBES_IN_A_ROW, *burst]


@pytest.mark.parametrize(("cost", "steps"), [(0.0, MIN_STEPS_BETWEEN_PROBES), (100.0, MAX_STEPS_BETWEEN_PROBES)])
def test_probes_come_neither_too_often_nor_too_seldom(cost: float, steps: int) -> None:
    assert set(gaps_between(Probes(), cost, 5)) == {steps}

"""How many drafts a step verifies where each has a chance of its own: as many as make the most tokens a second; and
where that is worth choosing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_backend.core.speculation.costs import Counts, Floats

# Of `UnevenDrafts.cost`, what a budget and the drafter's confidences cost where there is one row.
COST_OF_ONE = 0.4
# Weight of a budget's gain in their average.
GAIN_WEIGHT = 0.25
# Weight of a step in the average of how much longer those with a budget take, the part of it that each step without one
# takes off, so that budgets are tried again, and the most that a step counts for.
EXCESS_WEIGHT, EXCESS_LOSS, MAX_EXCESS = 0.2, 0.004, 1.0
# While budgets do not pay, drafts have confidences in one step of this many, which tells when that changes, and of
# twice as many after each that found none that pays, to the second number: a look takes time. While they do pay, the
# third number of steps in a row have one, and then one has none, whose time tells what steps without them take.
STEPS_BETWEEN_LOOKS, MOST_BETWEEN_LOOKS, MOST_IN_A_ROW = 8, 32, 12


@dataclass(slots=True)
class UnevenDrafts:
    """Whether rows get different numbers of drafts: where that gains more than it costs.

    cost: this part longer, at least, is a step whose rows have different numbers of drafts than one with as many drafts
    in rows alike. wants_confidence: whether the drafter reports confidences for the drafts of the step that is
    planned.
    """

    cost: float = 0.0
    wants_confidence: bool = True
    _gain: float = 1.0  # of the last budgets, also of those that were not taken
    _excess: float = 0.0  # this part longer steps with a budget took than others of as many tokens
    _since_look: int = 0  # steps since drafts had confidences
    _wait: int = STEPS_BETWEEN_LOOKS  # of them until the next look
    _num_in_a_row: int = 0  # the last steps, which had a budget

    def pays(self, gain: float, num_rows: int) -> bool:
        """Whether this part more tokens a second is worth it."""
        return gain >= (max(self.cost, self._excess) if num_rows > 1 else COST_OF_ONE * self.cost)

    def observe(self, seconds: float, expected_s: float) -> None:
        """Take in the time of a step with a budget, and what one whose rows are alike would take."""
        excess = min(max(seconds / expected_s - 1, 0.0), MAX_EXCESS)
        self._excess += EXCESS_WEIGHT * (excess - self._excess)
        self._num_in_a_row += 1

    def pass_step(self) -> None:
        """Go on from a step without a budget."""
        self._excess -= EXCESS_LOSS * self._excess
        self._num_in_a_row = 0

    def budgets_pay(self, num_rows: int) -> bool:
        """Whether the last budgets were worth it."""
        return self.pays(self._gain, num_rows)

    def takes(self, gain: float, num_rows: int) -> bool:
        """Take in what a budget gains, and say whether it is worth it."""
        self._gain += GAIN_WEIGHT * (gain - self._gain)
        return self.pays(gain, num_rows) and self._num_in_a_row < MOST_IN_A_ROW

    def advance(self, num_rows: int) -> bool:
        """Go on to the step that is planned now, and say whether its drafts have confidences. Its own next drafts get
        them while budgets pay, and now and then."""
        has_confidence = self.wants_confidence
        self._since_look += 1
        pays = self.budgets_pay(num_rows)
        self.wants_confidence = pays or self._since_look >= self._wait
        if self.wants_confidence:
            self._since_look = 0
            self._wait = STEPS_BETWEEN_LOOKS if pays else min(2 * self._wait, MOST_BETWEEN_LOOKS)
        return has_confidence


class OptimalBudget(NamedTuple):
    """The number of drafts to verify, and how many times as many tokens per second it makes as all drafts verified."""

    num_drafts: int
    gain: float


def optimal_budget(
    num_rows: int,
    chances: Floats,
    seconds: Callable[[Counts], Floats],
    choices: Sequence[int] | None = None,
) -> OptimalBudget:
    """The best budget, where the likeliest drafts are verified.

    num_rows: tokens that come without drafts. chances: `[n]`, of each draft that it and all before it in its row are
    accepted. seconds: of steps that verify some number of drafts, `[m]` -> `[m]`. choices: those that there are beside
    0, in ascending order; None: any.
    """
    tokens = np.full(len(chances) + 1, float(num_rows))
    tokens[1:] += np.sort(chances)[::-1].cumsum()
    num_drafts = np.arange(len(tokens)) if choices is None else np.array([0, *choices])
    rates = tokens[np.minimum(num_drafts, len(chances))] / seconds(num_drafts)
    optimal = int(rates.argmax())
    return OptimalBudget(int(num_drafts[optimal]), float(rates[optimal] / rates[-1]))

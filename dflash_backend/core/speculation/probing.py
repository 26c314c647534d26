"""While drafting rests, when a few rows draft a little, so that it is noticed when drafting pays again, and which ones;
and while rows draft, when a step runs without drafts, so that its time is known.

A probe costs time for nothing while the traffic stays as it is. So they come the more seldom the more a probe costs,
and the more of them have failed one after the other.
"""

from __future__ import annotations

import math

# Drafts of a row that probes, and how many of the rows do at a time.
PROBE_DRAFTS = 2
PROBE_SHARE = 8
# Probes cost this part of the time at most, where they do not come more seldom anyway.
PROBE_COST = 0.0125
MIN_STEPS_BETWEEN_PROBES, MAX_STEPS_BETWEEN_PROBES = 8, 128
# Each probe that failed makes the next ones rarer by this part of what they were at first, up to a factor.
LATER_BY, LATEST = 0.25, 2.0
# A step without drafts is run when its time is less certain than this, while rows draft: first after this many steps,
# then after twice as many each time, since one costs about half of what a step yields.
MAX_UNCERTAINTY = 0.15
MIN_STEPS_BETWEEN_TRIALS, MAX_STEPS_BETWEEN_TRIALS = 24, 192


class Probes:
    """Counts the steps between probes."""

    def __init__(self) -> None:
        self._since = 0  # steps since the last one
        self._num_failed = 0  # since one was accepted to its end, or rows drafted
        self._succeeded = False
        self._next = 0  # turns among the rows

    def pass_steps(self, num_steps: int) -> None:
        """Go on by some steps."""
        self._since += num_steps

    def note_drafting(self) -> None:
        """Rows draft without a probe."""
        self._since = self._num_failed = 0

    def note_success(self) -> None:
        """A probe was accepted to its end: the next decision that nothing is drafted makes another one at once."""
        self._succeeded = True
        self._num_failed = 0

    @staticmethod
    def size(num_rows: int) -> tuple[int, int]:
        """Rows that probe of `num_rows`, and their drafts."""
        num_probing = -(-num_rows // PROBE_SHARE)
        return num_probing, num_probing * PROBE_DRAFTS

    def due_in(self, cost: float) -> int:
        """Steps until the next one, 0 where it is due in the step that is planned now. cost: what a probe takes, in
        steps without drafts."""
        if self._succeeded:
            return 0
        wait = cost / PROBE_COST * min(1 + LATER_BY * self._num_failed, LATEST)
        wait = min(max(wait, MIN_STEPS_BETWEEN_PROBES), MAX_STEPS_BETWEEN_PROBES)
        return max(math.ceil(wait) - self._since, 0)

    def rows(self, num_rows: int) -> list[int]:
        """Begin a probe: which of `num_rows` rows take part. They take turns."""
        self._since = 0
        self._num_failed += not self._succeeded
        self._succeeded = False
        num_probing, _ = self.size(num_rows)
        chosen = [(self._next + turn) % num_rows for turn in range(num_probing)]
        self._next = (self._next + num_probing) % num_rows
        return chosen


class Trials:
    """Counts the steps between those without drafts while rows draft."""

    def __init__(self) -> None:
        self._since = 0  # steps since the last one
        self._wait = MIN_STEPS_BETWEEN_TRIALS

    def pass_steps(self, num_steps: int) -> None:
        """Go on by some steps."""
        self._since += num_steps

    @property
    def may_begin(self) -> bool:
        """Whether the last one was long enough ago."""
        return self._since >= self._wait

    def begin(self) -> None:
        """Run one in the step that is planned now."""
        self._since = 0
        self._wait = min(2 * self._wait, MAX_STEPS_BETWEEN_TRIALS)

"""What a step costs: seconds of the target's pass and of drafting, estimated from the steps that ran.

The target's pass is linear in its tokens, in the positions that its rows attend to, and in their product; where a
device was measured at start, in the time that was measured for that number of tokens instead, which is corrected by
steps that run. Drafting is linear in the drafter's passes, in its queries and in the positions that the passes read
(`DrafterWork`). The host's time counts with the target's, but for what a step that drafts takes more of it.

No line holds from one row to hundreds: a product over few tokens takes longer for each. So steps of about as many rows
have coefficients of their own, which stay as they were while the load is another one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_backend.core.linear_fit import LinearFit
from dflash_backend.core.plan import MeasuredStep, ScheduledRequest
from dflash_backend.core.scheduler_config import DrafterWork

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Before a step has shown it: this part of a step's time does not depend on its tokens.
FIXED_SHARE = 0.5
# What drafting is taken to cost before it was seen: this part of the target's pass over one token.
DRAFT_SHARE = 0.3
# What a step that drafts may take the host more than another, before both were seen: this part of a step's time, where
# the target's pass was not measured at start (on a CPU, whose host is the processor), and where it was.
HOST_SHARE, HOST_SHARE_BESIDE_TABLE = 0.3, 0.05
# How many steps an entry of a table that was measured at start counts as, and how many at most with those that ran.
FIRST_WEIGHT, LAST_WEIGHT = 8.0, 64.0
# After a few steps of a kind, one in four is observed: observing takes time and adds little.
FEW, EVERY = 16, 4
# Of steps with more rows than these: the weight of the latest one without drafts in how far such steps are from the
# line through all, and the most that one counts: another program had the processor.
LEAST_PLAIN, PLAIN_WEIGHT, MAX_PLAIN = 4, 0.1, 1.5
# Steps of 1 row, of up to 4, 16, 64, ... have coefficients of their own: a power of two to this one.
LOG2_ROWS_STEP = 2
# Steps of no more tokens than this are of a kind, however short they are.
FEW_TOKENS = 16
_KILO = 1e-3


@dataclass(slots=True)
class StepShape:
    """What a step's time depends on: rows, target tokens, the positions that rows and tokens attend to; queries and
    passes of the drafter, and the positions that its passes read."""

    num_rows: int = 0
    num_tokens: int = 0
    num_positions: int = 0
    num_token_positions: int = 0
    num_queries: int = 0
    num_draft_positions: int = 0
    num_passes: int = 0

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Steps of one have about as many rows and tokens, and draft, or do not."""
        return _size(self.num_rows), max(self.num_tokens, FEW_TOKENS).bit_length(), self.num_queries > 0

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest], work: DrafterWork, num_drafts: int | None = None) -> StepShape:
        """That of a step with these rows. work: what the drafter runs. num_drafts: drafts that are verified; None: all.
        Which ones is not known here, so those left out count as usual ones."""
        shape, num_there, longest = cls(len(rows)), 0, 0
        for row in rows:
            num_there += row.num_draft
            num_tokens = row.num_new + row.num_draft
            end = row.num_computed + num_tokens
            shape.num_tokens += num_tokens
            shape.num_positions += end
            shape.num_token_positions += num_tokens * end
            if row.num_next_draft:
                longest = max(longest, row.num_next_draft)
                shape.num_queries += work.num_queries(row.num_next_draft, 1)
                shape.num_draft_positions += work.num_row_passes(row.num_next_draft, 1) * end
        shape.num_passes = work.num_passes(longest) if longest else 0
        if num_drafts is not None and num_drafts < num_there:
            left_out = num_there - num_drafts
            shape.num_token_positions -= left_out * shape.num_positions // len(rows)
            shape.num_positions -= left_out
            shape.num_tokens -= left_out
        return shape

    @classmethod
    def of_measured(cls, step: MeasuredStep, work: DrafterWork) -> StepShape:
        """That of a step that was measured at start. work: what the drafter runs."""
        rows, width = step.num_rows, step.draft_width
        shape = cls(rows, step.num_tokens, rows, step.num_tokens)
        if width:
            shape.num_queries = work.num_queries(rows * width, rows)
            shape.num_draft_positions = work.num_row_passes(rows * width, rows)
            shape.num_passes = work.num_passes(width)
        return shape

    @property
    def target(self) -> list[float]:
        """Features of the target's pass and of the host's part."""
        return [
            1.0, self.num_tokens, _KILO * self.num_positions, _KILO * self.num_token_positions,
            float(self.num_queries > 0),
        ]  # fmt: skip

    @property
    def draft(self) -> list[float]:
        """Features of drafting."""
        return [self.num_passes, self.num_queries, _KILO * self.num_draft_positions]


class CostTable:
    """Seconds of a target pass by its tokens, in ascending order, measured over short contexts. Between two of them the
    time is interpolated, and beyond the last it grows with the tokens. Steps that ran correct it."""

    def __init__(self, num_tokens: Sequence[int], seconds: Sequence[float]) -> None:
        """At least two entries."""
        self._num_tokens, self._seconds = list(num_tokens), list(seconds)
        self._weights = [FIRST_WEIGHT] * len(self._seconds)

    @classmethod
    def of(cls, measured: Iterable[MeasuredStep]) -> CostTable | None:
        """That of steps that were measured; None when they are too few. More tokens never take less time."""
        shortest: dict[int, float] = {}
        for step in measured:
            if step.target_s > 0:
                shortest[step.num_tokens] = min(step.target_s, shortest.get(step.num_tokens, math.inf))
        if len(shortest) < 2:
            return None
        sizes = sorted(shortest)
        return cls(sizes, list(itertools.accumulate((shortest[size] for size in sizes), max)))

    def at(self, num_tokens: int) -> float:
        """Seconds of a pass over that many tokens."""
        return float(self.each_at(np.asarray(num_tokens)))

    def each_at(self, num_tokens: Counts) -> Floats:
        """Seconds of some passes, by their tokens."""
        beyond = np.maximum(num_tokens / self._num_tokens[-1], 1.0)
        return np.asarray(beyond * np.interp(num_tokens, self._num_tokens, self._seconds))

    def correct(self, num_tokens: int, factor: float) -> None:
        """A pass over that many tokens took `factor` times what was expected: move the entries beside it, the nearer
        one more, and each the less the more often it was moved."""
        tokens = self._num_tokens
        # The entry before, and how far towards the next one it is, 0 to 1.
        i = min(max(bisect.bisect_right(tokens, num_tokens) - 1, 0), len(tokens) - 2)
        part = min(max((num_tokens - tokens[i]) / (tokens[i + 1] - tokens[i]), 0.0), 1.0)
        for entry, share in ((i, 1.0 - part), (i + 1, part)):
            if share > 0:
                self._weights[entry] = min(self._weights[entry] + share, LAST_WEIGHT)
                self._seconds[entry] *= factor ** (share / self._weights[entry])


@dataclass(frozen=True, slots=True)
class StepLine:
    """The time of steps that differ in their drafts alone. The target's pass takes `table_share` of the table's time
    for its tokens, `fixed` and `per_draft` seconds, and `plain` times that where it verifies none; drafting takes the
    host `host` seconds, and `per_pass`, `per_query` and, for each row of a pass, `per_drafting_row` seconds.
    num_tokens: without drafts."""

    table: CostTable | None
    table_share: float
    fixed: float
    per_draft: float
    host: float
    per_pass: float
    per_query: float
    per_drafting_row: float
    num_tokens: int
    plain: float = 1.0

    @property
    def plain_s(self) -> float:
        """Of a step that neither verifies nor drafts."""
        return float(self.verify_s(0))

    def verify_s(self, num_drafts: Any) -> Any:
        """Of the target's pass that verifies as many drafts; of some passes where this is an array."""
        seconds = self.fixed + self.per_draft * num_drafts
        if self.table is not None:
            seconds = seconds + self.table_share * self.table.each_at(self.num_tokens + num_drafts)
        # What a line misses of the smallest steps it misses less of larger ones, and nothing of those twice as large.
        share = np.maximum(1 - num_drafts / max(self.num_tokens, 1), 0.0)
        return seconds * (1 + (self.plain - 1) * share)

    def draft_s(self, num_drafting: Any, num_queries: Any, num_passes: Any) -> Any:
        """Of drafting for at least one row, by passes with as many queries, and rows of all passes; of several steps
        where these are arrays."""
        of_drafter = self.per_pass * num_passes + self.per_query * num_queries + self.per_drafting_row * num_drafting
        return self.host + of_drafter


@dataclass
class StepCosts:
    """The estimate. table: None where nothing was measured at start."""

    table: CostTable | None = None
    _num_seen: dict[tuple[int, int, bool], int] = field(default_factory=dict, init=False)  # steps of each kind
    _takes_next: bool = field(default=False, init=False)  # whatever its kind
    # By the size of the steps, as `_size` has it.
    _targets: dict[int, LinearFit] = field(default_factory=dict, init=False)
    _drafts: dict[int, LinearFit] = field(default_factory=dict, init=False)
    _plain: dict[int, float] = field(default_factory=dict, init=False)
    """How many times as long as `_targets` say the latest steps took that verified nothing, of more than a few rows.
    On a CPU a step with many drafts takes less for each token, and a line through both is above the smaller one."""

    def target_s(self, shape: StepShape) -> float:
        """Seconds of the target's pass and the host's share."""
        fit = _nearest(self._targets, shape.num_rows)
        if fit is None:
            return 0.0 if self.table is None else self.table.at(shape.num_tokens)
        return fit.at(self._target_features(shape))

    def line(self, num_rows: int, position: float, num_other: int) -> StepLine:
        """The time of steps with these rows and tokens of prompts, for any number of drafts."""
        per_kilo = _KILO * position
        draft = (DRAFT_SHARE * self.target_s(StepShape(num_rows, 1)), 0.0, 0.0)
        if (fit := _nearest(self._drafts, num_rows)) is not None:
            fixed, query, kilo = fit.coefficients
            draft = fixed, query, kilo * per_kilo
        if (fit := _nearest(self._targets, num_rows)) is None:
            return StepLine(self.table, float(self.table is not None), 0.0, 0.0, 0.0, *draft, num_rows + num_other)
        first, token, per_row_position, per_token_position, host = fit.coefficients
        each, plain = token + per_token_position * per_kilo, self._plain.get(_size(num_rows), 1.0)
        fixed = per_row_position * per_kilo * num_rows + each * (num_rows + num_other)
        if self.table is None:
            return StepLine(None, 0.0, first + fixed, each, host, *draft, num_rows + num_other, plain)
        return StepLine(self.table, first, fixed, each, host, *draft, num_rows + num_other, plain)

    def uncertainty(self, num_rows: int, position: float, num_other: int) -> float:
        """How far off the time of a step without drafts may be, relative to it (a standard deviation)."""
        num_tokens = num_rows + num_other
        shape = StepShape(num_rows, num_tokens, int(num_rows * position), int(num_tokens * position))
        fit = _nearest(self._targets, num_rows)
        return 0.0 if fit is None else fit.uncertainty(self._target_features(shape))

    def observe(self, shape: StepShape, target_s: float, draft_s: float) -> None:
        """Take in a step that ran."""
        if target_s <= 0 or shape.num_tokens == 0:
            return
        kind = shape.kind
        number = self._num_seen[kind] = self._num_seen.get(kind, -1) + 1
        if number > FEW and number % EVERY and not self._takes_next:
            return
        self._takes_next = False
        size = _size(shape.num_rows)
        if (target := self._targets.get(size)) is None:
            target = self._targets[size] = self._first_target(shape, target_s)
        elif self.table is not None:
            self.table.correct(shape.num_tokens, target_s / target.at(self._target_features(shape)))
        features = self._target_features(shape)
        target.observe(features, target_s)
        if LEAST_PLAIN < shape.num_tokens == shape.num_rows and (expected := target.at(features)) > 0:
            before = self._plain.get(size, 1.0)
            self._plain[size] = before + PLAIN_WEIGHT * (min(target_s / expected, MAX_PLAIN) - before)
        if shape.num_draft_positions == 0 or draft_s <= 0:
            return
        if (draft := self._drafts.get(size)) is None:
            each = (1 - FIXED_SHARE) * draft_s / max(shape.num_queries, 1)
            first = FIXED_SHARE * draft_s / max(shape.num_passes, 1)
            draft = self._drafts[size] = LinearFit([first, each, 0.0], [first / FIXED_SHARE, each, draft_s])
        draft.observe(shape.draft, draft_s)

    def pass_step(self) -> None:
        """Go on from a step that is not taken in: the next one is, though many of its kind were."""
        self._takes_next = True

    def _target_features(self, shape: StepShape) -> list[float]:
        features = shape.target
        if self.table is not None:
            features[0] = self.table.at(shape.num_tokens)
        return features

    def _first_target(self, shape: StepShape, seconds: float) -> LinearFit:
        if self.table is not None:
            scale = seconds / self.table.at(shape.num_tokens)
            small, host = 0.1 * seconds, HOST_SHARE_BESIDE_TABLE * seconds
            return LinearFit([scale, 0.0, 0.0, 0.0, 0.0], [0.5 * scale, small / shape.num_tokens, small, small, host])
        each = (1 - FIXED_SHARE) * seconds / shape.num_tokens
        deviations = [
            FIXED_SHARE * seconds, each, 0.2 * seconds, 0.2 * seconds / shape.num_tokens, HOST_SHARE * seconds,
        ]  # fmt: skip
        like, coefficients = _nearest(self._targets, shape.num_rows), [FIXED_SHARE * seconds, each, 0.0, 0.0, 0.0]
        if like is not None and (expected := like.at(shape.target)) > 0:
            # What a step consists of is known of other numbers of rows.
            coefficients = [each * seconds / expected for each in like.coefficients]
        return LinearFit(coefficients, deviations)


def _size(num_rows: int) -> int:
    """0 for 1 row, 1 for up to 4, 2 for up to 16, and so on."""
    return -(-(num_rows - 1).bit_length() // LOG2_ROWS_STEP)


def _nearest(fits: dict[int, LinearFit], num_rows: int) -> LinearFit | None:
    """That of steps with the most similar number of rows, of two as similar the fewer; None where there is none."""
    if not fits:
        return None
    size = _size(num_rows)
    return fits[min(fits, key=lambda each: (abs(each - size), each))]

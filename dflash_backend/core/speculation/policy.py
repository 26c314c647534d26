"""How many drafts each row gets: as many as make the most tokens a second.

A step takes longer for each draft that it verifies, and yields more tokens. With the chance of each draft to be
accepted together with all before it (`AcceptanceEstimator`) and the time of a step of any size (`StepCosts`), the best
number of drafts of all rows together follows: it maximises

    (rows + sum of the chances of the drafts) / (seconds of the step that verifies them and of drafting them)

over all numbers of drafts, the likeliest first. Since a draft is never likelier than the one before it, those are
the first ones of each row.

This is decided twice. Before a block is drafted nothing is known of it but its row, and its length is chosen. Once it
is drafted the drafter's confidence tells likely drafts from others, and the step that verifies gets a budget: a number
of drafts for all rows, the likeliest first. Where the confidence tells much, blocks are longer than they would be
without it, since the budget leaves out what is not likely.

Both estimates need variety. Where drafting does not pay it is tried now and then (`Probes`), and while the time of
a step without drafts is not known, one is run. Both take at most a small part of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, Protocol

import numpy as np

from dflash_backend.core.plan import (
    DraftBudget,
    MeasuredStep,
    ModelRunnerOutput,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
)
from dflash_backend.core.scheduler_config import ONE_PASS, DrafterWork, SchedulerConfig
from dflash_backend.core.speculation.acceptance import AcceptanceEstimator, RequestEffect, VerifiedBlock
from dflash_backend.core.speculation.budget import UnevenDrafts, optimal_budget
from dflash_backend.core.speculation.costs import CostTable, Floats, StepCosts, StepLine, StepShape
from dflash_backend.messages import AdaptiveSpeculationStats

# Drafts of a row that probes, and how many of the rows do at a time.
PROBE_DRAFTS = 2
PROBE_SHARE = 8
# Probes cost this part of the time at most, where they do not come more seldom anyway.
PROBE_COST = 0.0125
MIN_STEPS_BETWEEN_PROBES, MAX_STEPS_BETWEEN_PROBES = 8, 128
# One that is accepted to its end has another follow at once, up to that number; then the wait is theirs together.
MAX_PROBES_IN_A_ROW = 4
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
        self._num_in_a_row = 0  # the last ones, each at once after the one before
        self._next = 0  # turns among the rows

    def pass_steps(self, num_steps: int) -> None:
        """Go on by some steps."""
        self._since += num_steps

    def note_drafting(self) -> None:
        """Rows draft without a probe."""
        self._since = self._num_failed = 0

    def note_success(self) -> None:
        """A probe was accepted to its end: the next decision that nothing is drafted makes another one at once, unless
        several came like that: then drafts are known to be accepted, and do not pay."""
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
        if self._is_early:
            return 0
        wait = cost / PROBE_COST * min(1 + LATER_BY * self._num_failed, LATEST)
        wait = min(max(wait, MIN_STEPS_BETWEEN_PROBES), MAX_STEPS_BETWEEN_PROBES)
        return max(math.ceil(wait * max(self._num_in_a_row, 1)) - self._since, 0)

    @property
    def _is_early(self) -> bool:
        """Whether the next one follows at once."""
        return self._succeeded and self._num_in_a_row < MAX_PROBES_IN_A_ROW

    def rows(self, num_rows: int) -> list[int]:
        """Begin a probe: which of `num_rows` rows take part. They take turns."""
        self._num_in_a_row = self._num_in_a_row + 1 if self._is_early else 1
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


Candidate = tuple[float, int, int]
"""A draft of the rows of a group: its chance, minus its place in the block, the group."""

# A decision holds for this many steps, unless more than this part of the rows, or of a step's tokens, come or go:
# deciding takes time. It holds for twice as many each time with few rows, where a step is short; and while drafting
# rests until the next probe, which ends it at once if it is accepted. While rows draft it holds no longer than this
# many seconds, and with few rows that went on as they were no longer than the second number: many rows may change all
# at once, and deciding takes half a millisecond.
STEPS_BETWEEN_DECISIONS, MOST_STEPS_OF_FEW = 4, 32
SECONDS_BETWEEN_DECISIONS, SECONDS_OF_FEW = 0.02, 0.06
FEW_ROWS = 2
MAX_CHANGE = 0.25
# With few rows the first block of a request is tried while drafting rests; after this many of them in a row of which
# nothing was accepted only that of every second, after twice as many of every third, and so on.
FAILED_FIRST_BLOCKS, MOST_REQUESTS_BETWEEN = 8, 4
# What became of drafts is taken in step by step at first, when each step changes what is known of them, and then when
# a decision is made: that costs less time.
STEPS_TAKEN_IN_ONE_BY_ONE = 64
# No draft is worth anything that is accepted more seldom.
MIN_CHANCE = 1e-3
# Shares of k that the first steps draft, so that their times tell what drafts cost, to verify and to propose: the last
# but one only verifies, and the last does neither.
FIRST_STEPS = (1.0, 0.25, 1.0, 0.0, 0.0)
# Rows that draft before the first decision where no step was measured at start; of more one in k does. With many rows a
# step whose rows all draft k may take as long as k + 1 steps.
FIRST_ROWS = 4
# Drafts that a block has beyond those that would pay without confidences: this share for each unit of the logit by
# which confidences tell chances apart, and this share at most.
EXTRA_PER_SPREAD, MAX_EXTRA = 0.15, 0.3
# Of lengths whose tokens a second differ by no more than this part, the longest is taken: fewer steps leave more of the
# processor to what sends the tokens.
TIE = 0.03
# Rows that a decision looks at, since it takes time: beyond that every second or third of them.
MAX_ROWS_LOOKED_AT = 64
# Drafts of a row at most, with more than a few rows, when drafting begins again after a rest: a step whose rows all
# draft many takes as long as several without, and what the probes have told may be of one request.
RESUMED_DRAFTS = 4
# One row in this many verifies a draft whatever the budget would be, so that estimates stay fresh.
VERIFY_SHARE = 8
# A step with a budget that takes less than this part of what is expected says that too much is expected.
FASTER = 0.9
# While drafting rests, one step in `OBSERVED_EVERY` is observed, and after `AT_FIRST` of them one in `LATER_EVERY`:
# observing takes time and adds little.
OBSERVED_EVERY, AT_FIRST, LATER_EVERY = 4, 64, 16


@dataclass(slots=True)
class SpeculatingRow:
    """What is known of a request that may draft: its k, how its drafts fare, the drafter's confidences in the drafts of
    its latest block (empty where there are none), how many it drafts by the last decision (None before one), and
    whether its first block is tried though drafting rests (None where that was not asked)."""

    k: int
    effect: RequestEffect = field(default_factory=RequestEffect)
    confidences: Sequence[float] = ()
    length: int | None = None
    is_tried: bool | None = None


class DraftingRequest(Protocol):
    """What the policy knows of a request, and what it sets: `draft_length`, the tokens that its next row drafts."""

    speculation: SpeculatingRow
    num_speculative_tokens: int
    num_computed: int
    draft_length: int

    @property
    def in_prefill(self) -> bool: ...
    @property
    def max_useful_drafts(self) -> int: ...


class AdaptiveSpeculation:
    """Decides in each step how many tokens each row drafts, and learns from what became of them."""

    def __init__(
        self,
        k: int,
        work: DrafterWork = ONE_PASS,
        shapes: Sequence[tuple[int, int]] = (),
        table: CostTable | None = None,
        uneven_cost: float = 0.0,
    ) -> None:
        """k: the most drafts of a row. work: what the drafter runs for a number of drafts. shapes: the numbers of
        verified and of proposed drafts for each row that there are beside none, the same for all rows of a step; by
        default every row proposes a number of its own, and any number is verified. uneven_cost: this part longer, at
        least, is a step whose rows have different numbers of drafts than one with as many drafts in rows alike."""
        self.k = k
        self.acceptance = AcceptanceEstimator(k)
        self.costs = StepCosts(table)
        self.stats = AdaptiveSpeculationStats.zeros(k)
        """The counts of all steps so far; those of expected tokens as of the last decision."""
        self._num_pending_steps = 0  # whose drafts were not taken in
        self._shapes = shapes
        self._work = work
        self._lengths: dict[int, int] = {}  # drafts of a row by its group
        self._num_rows = 0  # at the last decision
        self._num_tokens = 0  # of those rows without drafts and of prompts, then
        self.rests = False
        """Whether no row was to draft by the last choice."""
        self._num_running = 0  # requests then
        self._has_first_block = False  # a request that drafts one while drafting rests
        self._num_failed_first = 0  # of those in a row that nothing was accepted of
        self._num_untried = 0  # requests since the last one
        self._num_first = 0  # requests that came before the first decision
        self._first_length: int | None = None  # drafts of a first block; None: those of the last decision
        self._num_first_rows = 0  # for as many rows it was chosen; 0: a decision was made since
        self._is_measured = table is not None  # what steps cost, before the first request
        self._age, self._age_s = 0, 0.0  # steps since then, and seconds of those that were observed
        self._interval = STEPS_BETWEEN_DECISIONS
        self._is_due = False  # a decision, before the interval is over
        self._probes = Probes()
        self._trials = Trials()
        self.uneven = UnevenDrafts(uneven_cost)
        self._num_prefill_tokens = 0  # of the last plan
        # Of the planned steps that were not observed yet, those without drafts while drafting rests.
        self._resting_steps: set[int] = set()
        self._num_plain = 0  # such steps since drafting paid

    @classmethod
    def of(cls, config: SchedulerConfig) -> AdaptiveSpeculation | None:
        """The policy that the config asks for; None: each row drafts as many tokens as its request asks for."""
        k, work = config.num_speculative_tokens, config.drafter_work
        if not config.adaptive_speculation or k == 0:
            return None
        # A table says what a pass takes whatever its rows are: right for padded ones, which have their numbers of rows.
        table = CostTable.of(config.measured_steps) if config.draft_shapes else None
        policy = cls(k, work, config.draft_shapes, table, config.uneven_cost)
        policy.begin_measured(config.measured_steps)
        return policy

    def begin_measured(self, steps: Sequence[MeasuredStep]) -> None:
        """Take in the times of steps that were measured before the first request: where there are some, no step is run
        to learn what drafts cost."""
        for step in steps:
            self.costs.observe(StepShape.of_measured(step, self._work), step.target_s, step.draft_s)
        self._is_measured |= len(steps) > 0

    def begin_drafter(self) -> None:
        """Another drafter drafts from now on: what is known of the acceptance of the one before does not count."""
        self._update_acceptance()
        self.acceptance = AcceptanceEstimator(self.k)
        self._lengths.clear()
        self.rests = False
        self._age = self._interval = STEPS_BETWEEN_DECISIONS
        self._probes, self._trials = Probes(), Trials()
        self._num_failed_first = 0

    def decided_length(self, row: SpeculatingRow) -> int:
        """Drafts of a row by the last decision, also of one that was not there yet."""
        if not self._lengths:
            return row.k
        nearest = min(self._lengths, key=lambda group: abs(group - row.effect.hopeful_group))
        return min(row.k, self._lengths[nearest])

    def choose_first_block(self, row: SpeculatingRow) -> int:
        """Drafts of the first block of a request whose prompt is computed. While drafting rests with few rows they are
        those of a probe: the next request may fare better, and its answer may be over before a probe comes."""
        is_undecided = not self._lengths and not self._is_measured
        if self._first_length is not None:
            length = min(row.k, self._first_length)
            self._has_first_block |= length > 0
            return length
        length = self.decided_length(row)
        if not row.k or not (is_undecided or (length == 0 and self._num_rows <= FEW_ROWS)):
            return length
        if row.is_tried is None:
            row.is_tried = self._take_undecided_trial() if is_undecided else self._take_resting_trial()
        if is_undecided:
            return length if row.is_tried else 0
        self._has_first_block |= row.is_tried
        return min(row.k, PROBE_DRAFTS) if row.is_tried else 0

    def _choose_first_length(self, num_rows: int, num_prompt_tokens: int) -> None:
        """Say how many tokens the first blocks of requests that begin now draft. The last decision does where it was
        made for about as many rows, else nothing is known yet of the new ones but what steps cost.

        num_rows: with those that may begin in this step. num_prompt_tokens: as of `choose_draft_lengths`."""
        is_decided = bool(self._lengths) and num_rows <= (1 + MAX_CHANGE) * max(self._num_rows, FEW_ROWS)
        if not num_prompt_tokens or is_decided or not (self._lengths or self._is_measured):
            self._first_length = None
            return
        if self._first_length is not None and num_rows == self._num_first_rows:
            return  # requests wait for blocks
        self._num_first_rows = num_rows
        line, fresh = self.costs.line(num_rows, num_prompt_tokens / num_rows, 0), SpeculatingRow(self.k)
        if self._shapes:
            self._first_length = self._optimal_shape([fresh] * num_rows, line)
        else:
            group = fresh.effect.hopeful_group
            self._first_length = self._optimal_lengths(Counter({group: num_rows}), line)[group]

    def _take_undecided_trial(self) -> bool:
        """Count a request that comes before the first decision, and say whether its first block is drafted."""
        self._num_first += 1
        return self._num_first <= FIRST_ROWS or self._num_first % self.k == 0

    def _take_resting_trial(self) -> bool:
        """Count a request that comes while drafting rests, and say whether its first block is tried."""
        self._num_untried += 1
        wait = min(1 + self._num_failed_first // FAILED_FIRST_BLOCKS, MOST_REQUESTS_BETWEEN)
        if self._num_untried < wait:
            return False
        self._num_untried = 0
        self._num_failed_first += 1
        return True

    @property
    def pays(self) -> bool:
        """Whether drafting pays, by the last decision, or before the first one."""
        return not self._lengths or any(self._lengths.values())

    def skip_decision(self, num_running: int) -> bool:
        """True if the step that is planned drafts nothing, like the one before, and needs no decision. Then it is
        counted here, and `choose` is not called for it. num_running: requests that run."""
        changed = abs(num_running - self._num_running) > MAX_CHANGE * self._num_running
        is_due = self._is_due or self._has_first_block or self._age + 1 >= self._interval
        if changed or is_due or not self.rests:
            self._num_running, self._has_first_block = num_running, False
            return False
        self._age += 1
        self.stats.num_steps += 1
        self.stats.num_steps_without_drafts += 1
        return True

    def choose_draft_lengths(
        self, running: Collection[DraftingRequest], num_prompt_tokens: int, num_beginning: int = 0
    ) -> None:
        """Say how many tokens each running request that decodes may draft in the step that is planned.

        num_prompt_tokens: those left of the prompts of running and of waiting requests. num_beginning: waiting requests
        that there are rows for."""
        self._choose_first_length(len(running) + num_beginning, num_prompt_tokens)
        if self.skip_decision(len(running)):
            return  # none of them drafts, by the last decision, and each has been told so
        for request in running:
            if request.in_prefill:
                request.draft_length = self.choose_first_block(request.speculation)
        decoding = [request for request in running if not request.in_prefill]
        drafting = [request for request in decoding if request.num_speculative_tokens]
        if not drafting:
            return
        position = sum(request.num_computed for request in drafting) / len(drafting)
        # This step takes about as many as the last one, and the next one, which verifies, as many of those then left.
        of_prompts = min(self._num_prefill_tokens, max(0, num_prompt_tokens - self._num_prefill_tokens))
        num_other = len(decoding) - len(drafting) + of_prompts
        lengths = self.choose([request.speculation for request in drafting], position, num_other)
        # Drafts that an answer near its end has no use for take less time than a row that differs from all others.
        alike = self.uneven.cost > 0 and len(lengths) > 1 and len(set(lengths)) == 1
        for request, length in zip(drafting, lengths, strict=True):
            request.draft_length = length if alike else min(length, request.max_useful_drafts)

    def choose(self, rows: Sequence[SpeculatingRow], mean_position: float, num_other_tokens: int) -> list[int]:
        """The number of drafts for each row, in the step that is planned now; the next one verifies them.

        mean_position: of the rows' last tokens. num_other_tokens: of the next step, those of prompts.
        """
        if not rows:
            return []
        self.stats.num_steps += 1
        self._age += 1
        changed = abs(len(rows) - self._num_rows) > MAX_CHANGE * self._num_rows
        num_tokens = len(rows) + num_other_tokens
        changed |= abs(num_tokens - self._num_tokens) > MAX_CHANGE * self._num_tokens
        if self.stats.num_steps <= len(FIRST_STEPS) and not self._is_measured:
            share = FIRST_STEPS[self.stats.num_steps - 1]
            every = min(max(1, len(rows) // FIRST_ROWS), self.k)
            lengths = [0 if index % every else round(row.k * share) for index, row in enumerate(rows)]
        elif changed or self._is_due or self._age >= self._interval or self._is_old:
            lengths = self._decide(rows, mean_position, num_other_tokens)
        else:
            lengths = [self.decided_length(row) if row.length is None else row.length for row in rows]
        self.stats.num_steps_without_drafts += not any(lengths)
        self.rests = not self.pays and not any(lengths)
        return lengths

    @property
    def _is_old(self) -> bool:
        """Whether a decision that rows draft has held for long enough."""
        most = SECONDS_OF_FEW if self._interval == MOST_STEPS_OF_FEW else SECONDS_BETWEEN_DECISIONS
        return self._age_s >= most and not self.rests

    def _decide(self, rows: Sequence[SpeculatingRow], mean_position: float, num_other_tokens: int) -> list[int]:
        line = self.costs.line(len(rows), mean_position, num_other_tokens)
        if line.plain_s <= 0:
            return [row.k for row in rows]  # no step has been timed
        num_passed, self._age, self._age_s, self._is_due = self._age, 0, 0.0, False
        self._num_first_rows = 0
        self._probes.pass_steps(num_passed)
        self._trials.pass_steps(num_passed)
        self._update_acceptance()
        groups = [row.effect.hopeful_group for row in rows]
        rested = not self.pays
        self._num_rows, self._num_tokens = len(rows), len(rows) + num_other_tokens
        if self._shapes:
            self._lengths = dict.fromkeys(groups, self._optimal_shape(rows, line))
        else:
            self._lengths = self._optimal_lengths(Counter(groups), line)
            if rested and len(rows) > FEW_ROWS:
                self._lengths = {group: min(length, RESUMED_DRAFTS) for group, length in self._lengths.items()}
        lengths = [min(row.k, self._lengths[group]) for row, group in zip(rows, groups, strict=True)]
        for row, length in zip(rows, lengths, strict=True):
            row.length = length
        if any(lengths):
            most = MOST_STEPS_OF_FEW if len(rows) <= FEW_ROWS else STEPS_BETWEEN_DECISIONS
            self._interval = STEPS_BETWEEN_DECISIONS if rested else min(2 * self._interval, most)
            self._probes.note_drafting()
            if self._wants_trial(len(rows), mean_position, num_other_tokens):
                self._trials.begin()
                lengths = [0] * len(rows)
        else:
            # Until then nothing is learned that could change it, but from what of a probe is accepted, and from how
            # long steps without drafts take where that was not known.
            wait = self._probe(rows, lengths, line)
            is_known = self.costs.uncertainty(len(rows), mean_position, num_other_tokens) <= MAX_UNCERTAINTY
            self._interval = max(wait, STEPS_BETWEEN_DECISIONS) if is_known else STEPS_BETWEEN_DECISIONS
        for row, length in zip(rows, lengths, strict=True):
            if not length:
                row.effect.drift(num_passed / STEPS_BETWEEN_DECISIONS)
        return lengths

    def choose_budget(
        self, rows: Sequence[ScheduledRequest], speculating: Sequence[SpeculatingRow]
    ) -> DraftBudget | None:
        """Which of the drafts of a step's rows are verified. None: all of them, as in the first steps, in probes, and
        where a budget gains too little.

        To be called once for each step, which it counts. `uneven.wants_confidence` then says whether the drafter
        reports confidences for the drafts that the step proposes. speculating: of each row; empty where no row has
        drafts.
        """
        if not self.uneven.advance(len(rows)) or not speculating:
            return None
        drafting = [(row, known) for row, known in zip(rows, speculating, strict=True) if row.num_draft]
        if not drafting or self.stats.num_steps <= len(FIRST_STEPS):
            return None
        if not self.pays and max(row.num_draft for row, _ in drafting) <= PROBE_DRAFTS:
            return None
        shape = StepShape.of(rows, self._work)
        total = sum(row.num_draft for row, _ in drafting)
        line = self.costs.line(len(rows), shape.num_positions / len(rows), shape.num_tokens - len(rows) - total)
        if line.plain_s <= 0:
            return None
        next_drafts = [row.num_next_draft for row in rows if row.num_next_draft]
        draft_s = self._draft_s(line, sum(next_drafts), len(next_drafts), max(next_drafts)) if next_drafts else 0.0
        num_yielding = sum(row.sample for row in rows)
        offsets = self.acceptance.offsets(hopeful=True)
        chances = self._block_survival(offsets, [known for _, known in drafting], [r.num_draft for r, _ in drafting])
        choices = [min(len(rows) * verified, total) for verified, _ in self._shapes] if self._shapes else None
        optimal = optimal_budget(num_yielding, chances.ravel(), lambda counts: line.verify_s(counts) + draft_s, choices)
        num_drafts = max(optimal.num_drafts, -(-len(drafting) // VERIFY_SHARE))
        if not self.uneven.takes(optimal.gain - 1, len(rows)) or num_drafts >= total:
            return None
        self.stats.num_budgeted_steps += 1
        effects = [known.effect.value for known in speculating]
        return DraftBudget(num_drafts, self.acceptance.weight, offsets.tolist(), effects)

    def planned(self, plan: SchedulerOutput) -> None:
        """Take in a step that was planned."""
        self._num_prefill_tokens = plan.num_prefill_tokens
        if self.rests and not any(row.num_draft or row.num_next_draft for row in plan.rows):
            self._resting_steps.add(plan.step_id)

    def remove_planned(self) -> None:
        """Drop all steps that were planned and not observed: they did not run."""
        self._resting_steps.clear()

    def observe_row(self, known: SpeculatingRow, row: ScheduledRequest, result: RequestResult) -> None:
        """Take in what became of a row's drafts. The drafter's confidences in the next ones come later."""
        if row.num_draft:
            self.observe_draft(known, result.num_verified, result.num_accepted, row.num_draft)
        if row.num_next_draft:
            known.confidences = ()

    def observe_draft(self, row: SpeculatingRow, num_draft: int, num_accepted: int, num_proposed: int = 0) -> None:
        """Note a row's `num_draft` verified drafts, of `num_proposed` or, by default, of as many."""
        if num_accepted and not self.pays:
            # Of a probe. Look again at once, and if all of it was accepted, try again in any case.
            self._is_due = True
            self._num_failed_first = 0
            if num_accepted == num_draft:
                self._probes.note_success()
        counts = self.stats.num_draft_tokens_per_pos
        for position in range(num_draft):
            counts[position] += 1
        num_proposed = num_proposed or num_draft
        confidences = row.confidences[:num_proposed] if len(row.confidences) >= num_proposed else ()
        self.acceptance.observe(VerifiedBlock(row.effect, num_draft, num_accepted, confidences))
        self.stats.num_proposed_tokens += num_proposed

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float, draft_s: float) -> None:
        """Take in a step that was planned and has run: its time, and how much of that was drafting."""
        is_plain = plan.step_id in self._resting_steps
        self._resting_steps.discard(plan.step_id)
        if self.pays:
            self._num_plain = 0
        elif is_plain:
            self._num_plain += 1
        if is_plain and (self._num_plain - 1) % (OBSERVED_EVERY if self._num_plain <= AT_FIRST else LATER_EVERY):
            self.pass_step()
        else:
            shape = StepShape.of(plan.rows, self._work, sum(row.num_verified for row in result.rows))
            budgeted = plan.budget is not None and len(plan.rows) > 1
            self.observe_step(shape, seconds, draft_s, budgeted)

    def observe_step(self, shape: StepShape, seconds: float, draft_s: float, budgeted: bool = False) -> None:
        """Take in a step: what became of its drafts, what it consisted of, its time, and how much of that was drafting.
        budgeted: it had several rows, and a budget for them."""
        self._num_pending_steps += 1
        self._age_s += seconds
        if self.stats.num_steps <= STEPS_TAKEN_IN_ONE_BY_ONE:
            self._update_acceptance()
        target_s = seconds - draft_s
        # Rows that differ take no less time than others: where they do, it is the estimate that is wrong.
        if budgeted and self.uneven.cost and 0 < (expected_s := self.costs.target_s(shape)) * FASTER <= target_s:
            self.uneven.observe(target_s, expected_s)
            self.costs.pass_step()
        else:
            self.uneven.pass_step()
            self.costs.observe(shape, target_s, draft_s)

    def pass_step(self) -> None:
        """Go on from a step without drafts whose time is not looked at."""
        self._num_pending_steps += 1

    def _update_acceptance(self) -> None:
        """Take in what became of the drafts since the last time."""
        if not self._num_pending_steps:
            return
        expected = self.acceptance.update(self._num_pending_steps)
        self._num_pending_steps = 0
        stats = self.stats
        stats.num_expected_tokens_per_pos = list(map(add, stats.num_expected_tokens_per_pos, expected.tolist()))
        stats.confidence_weight = self.acceptance.weight

    def _block_survival(self, offsets: Floats, rows: Sequence[SpeculatingRow], num_draft: Sequence[int]) -> Floats:
        """For the first drafts of each row's latest block the chance that they are accepted, `[n, k]`."""
        effects, confidences = (row.effect for row in rows), (row.confidences for row in rows)
        return self.acceptance.block_survival(offsets, effects, num_draft, confidences)

    def _optimal_shape(self, rows: Sequence[SpeculatingRow], line: StepLine) -> int:
        """How many drafts all rows propose, of the shapes that there are: as if the next blocks were as likely to be
        accepted as the latest ones."""
        num_rows, offsets = len(rows), self.acceptance.offsets(hopeful=True)
        some = rows[:: -(-num_rows // MAX_ROWS_LOOKED_AT)]
        chances = self._block_survival(offsets, some, [row.k for row in some])
        share = len(some) / num_rows
        optimal, highest = 0, num_rows / line.plain_s
        for verified, proposed in self._shapes:
            num_drafts = num_rows * verified
            seconds = line.verify_s(num_drafts) + self._draft_s(line, num_rows * proposed, num_rows, proposed)
            likeliest = np.sort(chances[:, :proposed], axis=None)[::-1][: len(some) * verified]
            rate = (num_rows + float(likeliest.sum()) / share) / seconds
            if rate > highest:
                optimal, highest = proposed, rate
        return optimal

    def _optimal_lengths(self, groups: Counter[int], line: StepLine) -> dict[int, int]:
        """The optimal number of drafts for the rows of each group."""
        candidates = [
            (chance, -i, group)
            for group in groups
            for i, chance in enumerate(self.acceptance.survival(group, hopeful=True).tolist())
            if chance >= MIN_CHANCE
        ]
        candidates.sort(reverse=True)
        if not self._work.autoregressive:
            taken, rate = self._likeliest(candidates, groups, line, self.k)
            budgets_pay = self.uneven.budgets_pay(groups.total())
            longer = 1 + (min(EXTRA_PER_SPREAD * self.acceptance.spread, MAX_EXTRA) if budgets_pay else 0.0)
            if self.uneven.cost:
                alike, rate_alike = self._optimal_length(groups, line)
                if not self.uneven.pays(rate / rate_alike - 1, groups.total()):
                    return dict.fromkeys(groups, min(self.k, math.ceil(longer * alike - 0.5)))
        else:
            # A pass costs the same for one row as for many, nearly, so no row's drafts are looked at by themselves. And
            # what a budget would leave out had better not be drafted.
            by_passes = [
                self._likeliest([each for each in candidates if each[1] > -most], groups, line, most)
                for most in range(1, self.k + 1)
            ]
            taken, longer = max(by_passes, key=lambda each: each[1])[0], 1.0
        lengths = Counter(group for _, _, group in taken)
        return {group: min(self.k, math.ceil(longer * lengths[group] - 0.5)) for group in groups}

    def _optimal_length(self, groups: Counter[int], line: StepLine) -> tuple[int, float]:
        """The optimal number of drafts for all rows alike, and how many tokens a second it makes."""
        num_rows = groups.total()
        tokens = np.full(self.k + 1, float(num_rows))
        for group, count in groups.items():
            tokens[1:] += count * self.acceptance.survival(group, hopeful=True).cumsum()
        num_drafts = num_rows * np.arange(1, self.k + 1)
        num_drafting = np.full(self.k, num_rows)
        draft_s = self._draft_s(line, num_drafts, num_drafting, self.k)
        rates = [num_rows / line.plain_s, *(tokens[1:] / (line.verify_s(num_drafts) + draft_s)).tolist()]
        optimal, highest = rates.index(max(rates)), max(rates)
        if optimal:
            optimal = max(length for length, rate in enumerate(rates) if rate >= (1 - TIE) * highest)
        return optimal, highest

    def _likeliest(
        self, candidates: list[Candidate], groups: Counter[int], line: StepLine, longest: int
    ) -> tuple[list[Candidate], float]:
        """As many of the candidates, the first ones, as make the most tokens a second, and how many these are. They are
        in descending order of their chances; no row drafts more than `longest`."""
        # Of a step that takes this one and all before it.
        sizes = np.array([groups[group] for _, _, group in candidates], dtype=np.int64)
        num_drafts = sizes.cumsum()
        num_drafting = (sizes * np.array([i == 0 for _, i, _ in candidates], dtype=np.int64)).cumsum()
        tokens = groups.total() + (sizes * np.array([chance for chance, _, _ in candidates])).cumsum()
        draft_s = self._draft_s(line, num_drafts, num_drafting, longest)
        rates = [groups.total() / line.plain_s, *(tokens / (line.verify_s(num_drafts) + draft_s)).tolist()]
        num_taken = rates.index(max(rates))
        return candidates[:num_taken], rates[num_taken]

    def _draft_s(self, line: StepLine, num_drafts: Any, num_drafting: Any, longest: int) -> Any:
        """Seconds of drafting that many tokens in as many rows, at least one, of which none drafts more than `longest`;
        of several steps where these are arrays."""
        work = self._work
        num_queries = work.num_queries(num_drafts, num_drafting)
        row_passes = work.num_row_passes(num_drafts, num_drafting)
        return line.draft_s(row_passes, num_queries, work.num_passes(longest))

    def _probe(self, rows: Sequence[SpeculatingRow], lengths: list[int], line: StepLine) -> int:
        """Let some rows draft a little when it is time for it. Returns the steps until the next time."""
        num_probing, num_drafts = self._probes.size(len(rows))
        without = line.plain_s
        cost = (line.verify_s(num_drafts) + self._draft_s(line, num_drafts, num_probing, PROBE_DRAFTS)) / without - 1
        if not self._probes.due_in(cost):
            for index in self._probes.rows(len(rows)):
                lengths[index] = min(rows[index].k, PROBE_DRAFTS)
        return self._probes.due_in(cost)

    def _wants_trial(self, num_rows: int, position: float, num_other: int) -> bool:
        """Whether to run a step without drafts, since too little is known of its time."""
        return self._trials.may_begin and self.costs.uncertainty(num_rows, position, num_other) > MAX_UNCERTAINTY

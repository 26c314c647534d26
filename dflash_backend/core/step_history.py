"""What the steps that ran tell about the next one: how many prompt tokens it may have, and how many tokens to draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dflash_backend.core.plan import DraftBudget, RequestResult, ScheduledRequest, StepPlan, StepResult
from dflash_backend.core.plan_builder import PlanBuilder
from dflash_backend.core.request import Request
from dflash_backend.core.rows import prefills_next
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.speculation import AdaptiveSpeculation, CostTable, StepShape
from dflash_backend.core.step_time import StepTime
from dflash_backend.core.tenants import FairQueue

# Steps stay as short as several tenants need them for this long after there were several: people and agents, who ask
# again soon, shall not meet a long step each time.
SEVERAL_TENANTS_S = 5.0
# While drafting rests, one step without drafts of this many is taken in, and after a while one of more: it takes time,
# and tells little.
OBSERVED_EVERY, AT_FIRST, LATER_EVERY = 4, 64, 16


class StepHistory:
    """The estimates from past steps. speculation: None without `adaptive_speculation`, or without a drafter."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._step_time = StepTime(config.max_step_s)
        k = config.num_speculative_tokens
        self.speculation: AdaptiveSpeculation | None = None
        if config.adaptive_speculation and k > 0:
            table = CostTable.of(config.measured_steps)
            self.speculation = AdaptiveSpeculation(
                k, config.drafter_work, config.draft_shapes, table, config.uneven_cost
            )
            for step in config.measured_steps:
                self.speculation.costs.observe(
                    StepShape.of_measured(step, config.drafter_work), step.target_s, step.draft_s
                )
        # Of the planned steps that were not observed yet: prompt and decode tokens, and whether they are without drafts
        # while drafting rests.
        self._num_tokens: dict[int, tuple[int, int, bool]] = {}
        self._num_plain = 0  # such steps since drafting paid
        self._num_prefill_tokens = 0  # of the last plan
        self._several_until = 0.0  # until when the tenants count as several
        self._num_left = 0  # tenants that had left at the last plan
        self._left_until = 0.0  # until when one that left counts as one of whose requests none waits

    def bound_prefill(self, builder: PlanBuilder, queue: FairQueue, in_prefill: Sequence[Request], now: float) -> None:
        """Bound the prompt tokens of the step that is planned by its time, and say what its decode rows take.
        in_prefill: the running requests that do not decode."""
        if len(queue.tenants) > 1:
            self._several_until = now + SEVERAL_TENANTS_S
        if queue.num_left != self._num_left:
            self._num_left, self._left_until = queue.num_left, now + SEVERAL_TENANTS_S
        num_prompting, least_waiting = None, 0
        if now < self._several_until:
            num_prompting = queue.num_prompting(in_prefill)
            least_waiting = queue.least_waiting if now >= self._left_until else 0
        builder.max_prefill_tokens = self._step_time.max_prefill_tokens(
            builder.num_decode_tokens, num_prompting, least_waiting, builder.num_positions
        )
        builder.num_tokens_like_decoding = self._step_time.as_long_as_decoding(
            builder.num_decode_tokens, builder.num_positions
        )

    def choose_draft_lengths(self, running: Iterable[Request], num_waiting: int) -> None:
        """Say how many tokens each running request that decodes may draft in the step that is planned."""
        if self.speculation is None:
            return
        running = list(running)
        if self.speculation.goes_on_resting(len(running)):
            return  # none of them drafts, by the last decision, and each has been told so
        decoding = [request for request in running if not prefills_next(request)]
        drafting = [request for request in decoding if request.num_speculative_tokens]
        if not drafting:
            return
        position = sum(request.num_computed for request in drafting) / len(drafting)
        has_prompts = len(decoding) < len(running) or num_waiting > 0
        num_other = len(decoding) - len(drafting) + (self._num_prefill_tokens if has_prompts else 0)
        lengths = self.speculation.choose([request.speculation for request in drafting], position, num_other)
        # Drafts that an answer near its end has no use for take less time than a row that differs from all others.
        alike = self._config.uneven_cost > 0 and len(lengths) > 1 and len(set(lengths)) == 1
        for request, length in zip(drafting, lengths, strict=True):
            request.draft_length = length if alike else min(length, request.max_useful_drafts)
        for request in running:
            if prefills_next(request):
                self.choose_first_draft_length(request)

    def choose_first_draft_length(self, request: Request) -> None:
        """Say how many tokens a request may draft that begins to run."""
        if self.speculation is not None:
            request.draft_length = self.speculation.first_length(request.speculation)

    def choose_budget(self, rows: Sequence[ScheduledRequest], running: Mapping[str, Request]) -> DraftBudget | None:
        """Which drafts of the rows of the step that is planned are verified; None: all."""
        if self.speculation is None:
            return None
        if not any(row.num_draft for row in rows):
            self.speculation.uneven.next_step(len(rows))
            return None
        speculating = [running[row.request_id].speculation for row in rows]
        return self.speculation.choose_budget(rows, speculating)

    @property
    def wants_confidence(self) -> bool:
        """Whether the drafter is to say how sure it is of the drafts of the step that is planned."""
        return self.speculation is not None and self.speculation.uneven.wants_confidence

    def planned(self, plan: StepPlan, num_prefill_tokens: int) -> None:
        """Take in a step that was planned."""
        self._num_prefill_tokens = num_prefill_tokens
        num_tokens = plan.num_tokens
        is_plain = (
            self.speculation is not None
            and self.speculation.rests
            and not any(row.num_draft or row.num_next_draft for row in plan.rows)
        )
        self._num_tokens[plan.step_id] = num_prefill_tokens, num_tokens - num_prefill_tokens, is_plain

    def observe_drafts(self, request: Request, row: ScheduledRequest, result: RequestResult) -> None:
        """Take in what became of a row's drafts, and how confident the drafter is in those that it proposes now."""
        if self.speculation is None:
            return
        if row.num_draft:
            self.speculation.observe_draft(request.speculation, result.num_verified, result.num_accepted, row.num_draft)
        if row.num_next_draft:
            request.speculation.confidences = result.confidences

    def observe(self, plan: StepPlan, result: StepResult, seconds: float, draft_s: float) -> None:
        """Take in how long a step has run, and how much of that was drafting."""
        num_prefill, num_decode, is_plain = self._num_tokens.pop(plan.step_id)
        self._step_time.observe(num_prefill, num_decode, seconds, sum(row.num_computed for row in plan.rows))
        if self.speculation is None:
            return
        if self.speculation.pays:
            self._num_plain = 0
        elif is_plain:
            self._num_plain += 1
        if is_plain and (self._num_plain - 1) % (OBSERVED_EVERY if self._num_plain <= AT_FIRST else LATER_EVERY):
            self.speculation.pass_step()
        else:
            shape = StepShape.of(plan.rows, self._config.drafter_work, sum(row.num_verified for row in result.rows))
            budgeted = plan.budget is not None and len(plan.rows) > 1
            self.speculation.observe_step(shape, seconds, draft_s, budgeted)

    def discard(self, step_id: int) -> None:
        """Drop a step that did not run."""
        self._num_tokens.pop(step_id, None)

    def clear(self) -> None:
        """Drop all steps that were planned and not observed."""
        self._num_tokens.clear()

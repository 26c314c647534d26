"""Which requests run in the next step, and with how many tokens. Called by `EngineCore`, once before each step.

Continuous batching with chunked prefill, first come first served (`docs/scheduling.md`). Both queues are in order of
arrival, and everybody who runs arrived before everybody who waits:

- running: decode rows, and at most one request that is still in prefill. A prefill that takes several steps leaves up
  to half of what a step has for prompts to those behind it whose prefills that finishes, so that a prompt that is
  short, or in the cache for the most part, does not wait for all of a long one. Nobody else is admitted behind it;
- waiting: new requests at the end, preempted ones back at the head.

Whoever runs has a row in every step: no more requests are admitted than can decode in one step together. A request in
prefill thus finds at least the tokens that it will decode with.

When blocks run out the running request that arrived last is preempted: its blocks are freed and it computes them anew
later (for the most part from the prefix cache). The oldest request is never preempted and admission has checked that
the pool can hold it alone, so it always finishes, and in turn everybody does.

While a step is in flight the next one is planned on upper bounds (`docs/gpu.md`): a request whose row depends on what
is in flight sits the step out, and nobody is preempted. When blocks run out then, the plan ends there, and the step
after it is planned when nothing is in flight.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from dflash_backend.core.kv_manager import KVManager
from dflash_backend.core.plan import EngineLimits, NewRequest, ScheduledRow, StepPlan
from dflash_backend.core.request import Request
from dflash_backend.core.row_shape import (
    RowShape,
    decode_tokens,
    peak_positions,
    prefills_next,
    shape_decode,
    shape_decode_ahead,
    shape_prefill,
)

# While a long prefill runs, so many requests at the head of the queue are looked up in the cache to see whether they
# are short.
MAX_SHORT_PREFILLS = 8
# So many steps run without a new admission after one did not fit the device's memory, unless a request ends before.
STEPS_TO_RECOVER = 16


@dataclass(slots=True)
class _PlanBuilder:
    """A plan in the making: its rows, and how many tokens there are by kind: those of prompts so far, and of all decode
    rows, also of those that sit the step out, since they wait for it.

    `num_decoding` requests decode, `num_queued` wait or are in prefill. `closed` says that nobody may be admitted
    behind the rows.
    """

    limits: EngineLimits
    rows: list[ScheduledRow] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decoding: int = 0
    num_queued: int = 0
    closed: bool = False

    @property
    def prefill_room(self) -> int:
        """Prompt tokens that the step can take yet.

        A step takes as long as its tokens need, so beside decode rows a long prompt gets a share that keeps the pace of
        the running streams; with nobody to keep waiting it gets the whole step. Where more wait for their first token
        than for their next one, the share grows by as much.
        """
        limits = self.limits
        room = limits.max_num_batched_tokens - self.num_decode_tokens - self.num_prefill_tokens
        if self.num_decode_tokens == 0:
            return room
        share = limits.max_prefill_tokens_per_step
        if share is None:
            most = max(self.num_decode_tokens // 2, self.num_decode_tokens * self.num_queued // self.num_decoding)
            share = max(limits.min_prefill_tokens_per_step, most)
        return min(room, share - self.num_prefill_tokens)

    def add(self, request: Request, shape: RowShape, new_block_ids: list[int]) -> None:
        self.rows.append(
            ScheduledRow(
                request.request_id,
                shape.num_computed,
                shape.num_new,
                shape.num_draft,
                shape.sample,
                shape.num_next_draft,
                new_block_ids,
                shape.num_uncertain,
            )
        )
        if not shape.decodes:
            self.num_prefill_tokens += shape.num_new


class Scheduler:
    """The waiting and the running requests, by id and in order of arrival, and the blocks that they hold."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.kv = KVManager(limits)
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        # Requests that the worker still holds and shall forget at the start of the next step.
        self._forgotten: list[str] = []
        # Tokens of a step in which all running requests decode with all of their drafts.
        self._num_running_tokens = 0
        self._step_id = 0
        # Whether the last plan ended where blocks ran out, because a step was in flight.
        self._lacks_blocks = False
        # The first step that may admit somebody again after one did not fit the device's memory.
        self._admits_from = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_prompt_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request that has passed admission."""
        self.waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Take out a request that finished or was aborted, and free its blocks."""
        if self.running.pop(request.request_id, None) is not None:
            self._leave(request)
            self._admits_from = 0
        else:
            del self.waiting[request.request_id]

    def plan(self, now: float, in_flight: bool = False) -> StepPlan | None:
        """The next step. `now` is the clock in seconds; `in_flight` says that one step's result has not been applied.

        None when no request is left, or when what is in flight must be applied before anything can be planned.
        """
        if (not self.running and not self.waiting) or (in_flight and self._lacks_blocks):
            return None
        builder = _PlanBuilder(self._limits)
        self._lacks_blocks = not self._schedule_running(builder, in_flight)
        if not (builder.closed or self._lacks_blocks):
            self._admit(builder, now)
        if not builder.rows:
            if in_flight:
                return None
            raise RuntimeError(
                f"the scheduler found nothing to run for {len(self.running)} running and {len(self.waiting)} waiting "
                f"requests with {self.kv.pool.num_free} free KV blocks; this is a defect of the scheduler"
            )
        self._step_id += 1
        forgotten, self._forgotten = self._forgotten, []
        writable = None
        if self._limits.kv_write_guard:
            writable = {row.request_id: self.kv.writable_blocks(self.running[row.request_id]) for row in builder.rows}
        return StepPlan(self._step_id, builder.rows, builder.new, forgotten, writable)

    def shrink(self, plan: StepPlan) -> None:
        """Let the next step be smaller than `plan`, which did not fit the device's memory: preempt whom it admitted, so
        that all is as it was before, or else the request that arrived last. One stays. Nothing may be in flight.

        They would be admitted again at once, to run out of memory again, so admission waits: for the end of a request,
        or for `STEPS_TO_RECOVER` steps.
        """
        for _ in range(min(max(1, len(plan.new)), len(self.running) - 1)):
            self._preempt_latest()
        self._admits_from = plan.step_id + 1 + STEPS_TO_RECOVER

    def take_all(self) -> list[Request]:
        """Take every request out, in order of arrival, and free all blocks: the worker has lost what it held of them.
        Nothing may be in flight. A request goes on where it was when it is added again."""
        while self.running:
            self._preempt_latest()
        taken = list(self.waiting.values())
        self.waiting.clear()
        self._forgotten.clear()
        self._admits_from = 0
        self._lacks_blocks = False
        return taken

    def _schedule_running(self, builder: _PlanBuilder, in_flight: bool) -> bool:
        """Give every running request its row, oldest first, preempting from the other end where blocks run out.

        Returns False when they ran out and nobody could be preempted because a step is in flight.
        """
        running = list(self.running.values())
        decoding = [tokens for tokens in map(decode_tokens, running) if tokens]
        builder.num_decode_tokens, builder.num_decoding = sum(decoding), len(decoding)
        builder.num_queued = len(running) + len(self.waiting) - len(decoding)
        for request in running:
            if request.request_id not in self.running:
                break  # preempted for an older one in this loop, and so are all that arrived after it
            shape = self._shape(request, builder)
            if shape is None:
                # What a prefill that sits a step out leaves of it is not for those behind.
                builder.closed = builder.closed or prefills_next(request)
                continue
            new_block_ids = self.kv.reserve(request, shape.num_positions)
            if new_block_ids is None:
                if in_flight:
                    return False
                new_block_ids = self._preempt_for(request, shape.num_positions)
                if new_block_ids is None:
                    break
            builder.add(request, shape, new_block_ids)
        return True

    def _shape(self, request: Request, builder: _PlanBuilder) -> RowShape | None:
        """A running request's next row; None when it sits this step out."""
        row = request.row_in_flight
        if row is None:
            if len(request.token_ids) - request.num_computed == 1:
                return shape_decode(request, self._limits)
            return self._shape_chunk(request, request.num_computed, builder)
        if request.needs_own_output:
            return None
        if prefills_next(request):
            return self._shape_chunk(request, request.num_computed + row.num_new, builder)
        return shape_decode_ahead(request, row, self._limits)

    def _shape_chunk(self, request: Request, start: int, builder: _PlanBuilder) -> RowShape:
        """The next chunk of a prefill that runs already: what the step has for prompts, and where the prefill takes
        several steps anyway, without the part of those behind it."""
        room = builder.prefill_room
        if request.prefill_end - start > room:
            room -= self._short_prefills(room // 2)
        return shape_prefill(request, start, self._limits, room)

    def _short_prefills(self, room: int) -> int:
        """Tokens of the prefills at the head of the queue that `room` tokens finish together. Those that lack blocks
        are counted all the same; their part of the step is then nobody's."""
        num_tokens = 0
        free_rows = self._limits.max_num_seqs - len(self.running)
        for request in islice(self.waiting.values(), min(free_rows, MAX_SHORT_PREFILLS)):
            remaining = request.prefill_end - len(self.kv.find_hit(request)) * self._limits.block_size
            if num_tokens + remaining > room:
                break
            num_tokens += remaining
        return num_tokens

    def _preempt_for(self, request: Request, num_positions: int) -> list[int] | None:
        """Blocks for a running request from those who arrived last, or None when it had to be preempted itself.

        Whoever is preempted for it arrived later, so has no row in this plan yet.
        """
        while True:
            if len(self.running) == 1:
                raise RuntimeError(
                    f"request '{request.request_id}' runs alone and {self.kv.pool.num_blocks} KV blocks do not cover "
                    f"its {num_positions} positions; admission should have refused it"
                )
            if self._preempt_latest() is request:
                return None
            if (new_block_ids := self.kv.reserve(request, num_positions)) is not None:
                return new_block_ids

    def _preempt_latest(self) -> Request:
        """Put the running request that arrived last back to the head of the queue."""
        _, request = self.running.popitem()
        self._leave(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        return request

    def _leave(self, request: Request) -> None:
        """Give up all that a request held while it ran."""
        self.kv.release(request)
        self._forgotten.append(request.request_id)
        self._num_running_tokens -= request.max_decode_tokens

    def _admit(self, builder: _PlanBuilder, now: float) -> None:
        """Start waiting requests, the head first, while there are rows, tokens and blocks for it.

        Only the first chunk's blocks are taken, but those of the whole prefill and of the decode row after it must be
        free. With less, the request would be preempted before it yields anything; so would one that was preempted a
        moment ago, over and over.
        """
        limits = self._limits
        if self._step_id + 1 < self._admits_from:
            return
        while self.waiting and len(self.running) < limits.max_num_seqs and builder.prefill_room > 0:
            request = next(iter(self.waiting.values()))
            if self._num_running_tokens + request.max_decode_tokens > limits.max_num_batched_tokens:
                return
            hit = self.kv.find_hit(request)
            whole = shape_prefill(request, 0, limits, budget=sys.maxsize)
            until_decode = whole.num_positions + 1 + whole.num_next_draft
            if not self.kv.fits(min(until_decode, peak_positions(request, limits)), hit):
                return
            self.kv.start(request, hit)
            shape = shape_prefill(request, request.num_computed, limits, builder.prefill_room)
            new_block_ids = self.kv.reserve(request, shape.num_positions)
            assert new_block_ids is not None, "the blocks of the whole prefill are free"
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            self._num_running_tokens += request.max_decode_tokens
            if request.first_scheduled_s is None:
                self._count_admission(request, now)
            builder.new.append(request.to_new_request())
            builder.add(request, shape, hit + new_block_ids)

    def _count_admission(self, request: Request, now: float) -> None:
        """Count the prompt, its lookup and its wait. Only the first time: a preempted request that finds its own blocks
        again says nothing about how alike prompts are."""
        request.first_scheduled_s = now
        request.num_cached_tokens = request.num_computed
        self.num_prompt_tokens += request.num_prompt_tokens
        if self._limits.enable_prefix_caching:
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_computed

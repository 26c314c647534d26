"""Which requests run in the next step, and with how many tokens. Called by `EngineCore`, once before each step.

Continuous batching with chunked prefill, shared between tenants (`docs/scheduling.md`). Of one tenant the requests are
served by priority and arrival, without overtaking; whose turn it is among the tenants says `FairQueue`:

- running: decode rows, and of each tenant at most one request that is still in prefill. A prefill that takes several
  steps leaves up to half of what a step has for prompts to those who wait: to other tenants, and of its own tenant to
  those behind it whose prefills that finishes;
- waiting: new requests, and preempted ones at the place they had.

Whoever runs has a row in every step, of one token at least: no more requests are admitted than can decode in one step
together. A request in prefill thus finds at least the tokens that it will decode with.

When blocks run out a request is preempted, the latest of the tenant that holds most for its weight, and so it is when a
tenant waits for rows or blocks of which another holds more: its blocks are freed and it computes them anew later (for
the most part from the prefix cache). Of the running requests the one that arrived first is never preempted and
admission has checked that the pool can hold it alone, so it always finishes, and in turn everybody does.

While a step is in flight the next one is planned on upper bounds (`docs/gpu.md`): a request whose row depends on what
is in flight sits the step out, and nobody is preempted. When somebody should be, the step after it is planned when
nothing is in flight.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from dflash_backend.core.kv_manager import KVManager
from dflash_backend.core.plan import NewRequest, ScheduledRequest, StepPlan
from dflash_backend.core.preemption import latest_of_heaviest, request_to_make_way
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
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.step_time import StepTime
from dflash_backend.core.tenants import CACHED_TOKEN_COST, FairQueue, Tenant

# So many tenants whose first request cannot start are passed over in a step.
MAX_PASSED_OVER = 8
# A tenant that runs is this part of a step's most tokens behind another before that one is preempted for it.
MIN_LAG_IN_STEPS = 1 / 8
# So many steps run without a new admission after one did not fit the device's memory, unless a request ends before.
STEPS_TO_RECOVER = 16
# Steps stay as short as several tenants need them for so long after there were several: who asks again soon, as people
# and agents do, shall not meet a long step each time.
SEVERAL_TENANTS_S = 5.0


@dataclass(slots=True)
class _PlanBuilder:
    """A plan in the making: its rows, and how many tokens there are by kind: those of prompts so far, and of all decode
    rows, also of those that sit the step out, since they wait for it.

    `num_decoding` requests decode, `num_queued` wait or are in prefill. `max_prefill_tokens` is what the step's time
    allows. `in_prefill` are the running requests in prefill, `prefills` those of them that have a row in this step, in
    the order of turns, and `chunks` its tokens. `closed` are tenants of which nobody may be
    admitted, `unfinished` those of which nobody may that would not finish its prefill in this step.
    """

    config: SchedulerConfig
    max_prefill_tokens: int | None = None
    rows: dict[str, ScheduledRequest] = field(default_factory=dict)
    new: list[NewRequest] = field(default_factory=list)
    in_prefill: list[Request] = field(default_factory=list)
    prefills: list[Request] = field(default_factory=list)
    chunks: dict[str, int] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    unfinished: set[str] = field(default_factory=set)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_admitted_tokens: int = 0
    num_decoding: int = 0
    num_queued: int = 0

    @property
    def prefill_room(self) -> int:
        """Prompt tokens that the step can take yet.

        A step takes as long as its tokens need, so beside decode rows a long prompt gets a share that keeps the pace of
        the running streams; with nobody to keep waiting it gets the whole step. Where more wait for their first token
        than for their next one, the share grows by as much, and the time of the step bounds it.
        """
        config = self.config
        room = config.max_num_batched_tokens - self.num_decode_tokens - self.num_prefill_tokens
        if self.max_prefill_tokens is not None:
            room = min(room, self.max_prefill_tokens - self.num_prefill_tokens)
        if self.num_decode_tokens == 0:
            return room
        share = config.max_prefill_tokens_per_step
        if share is None:
            most = max(self.num_decode_tokens // 2, self.num_decode_tokens * self.num_queued // self.num_decoding)
            share = max(config.min_prefill_tokens_per_step, most)
        return min(room, share - self.num_prefill_tokens)

    def add(self, request: Request, shape: RowShape, new_block_ids: list[int]) -> None:
        """Add a request's row, in place of one that it has already."""
        before = self.rows.get(request.request_id)
        self.rows[request.request_id] = ScheduledRequest(
            request.request_id,
            shape.num_computed,
            shape.num_new,
            shape.num_draft,
            shape.sample,
            shape.num_next_draft,
            new_block_ids if before is None else before.new_block_ids + new_block_ids,
            shape.num_unverified_drafts,
        )
        if not shape.decodes:
            self.num_prefill_tokens += shape.num_new - (0 if before is None else before.num_new)

    def remove(self, request: Request) -> None:
        """Take out the row of a request that was preempted, if it has one."""
        row = self.rows.pop(request.request_id, None)
        if row is not None and request.request_id in self.chunks:
            self.num_prefill_tokens -= row.num_new


class Scheduler:
    """The waiting and the running requests, by id, and the blocks that they hold."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.kv = KVManager(config)
        self.queue = FairQueue(config.tenant_weights, config.max_queue_size // 2)
        # In order of arrival when a plan begins; `_in_order` says whether that needs sorting.
        self.running: dict[str, Request] = {}
        self._in_order = True
        self._min_lag = config.max_num_batched_tokens * MIN_LAG_IN_STEPS
        self.step_time = StepTime(config.max_step_s)
        # Tokens of prompts and of decode rows of the steps that were planned and have not been observed, by step.
        self._num_tokens: dict[int, tuple[int, int]] = {}
        # Requests that the worker still holds and shall forget at the start of the next step.
        self._forgotten: list[str] = []
        # Tokens of a step in which all running requests decode with all of their drafts.
        self._num_running_tokens = 0
        self._step_id = 0
        # Whether somebody must be preempted, for which nothing may be in flight.
        self._must_settle = False
        # Until when the tenants count as several.
        self._several_until = 0.0
        # The first step that may admit somebody again after one did not fit the device's memory.
        self._admits_from = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_prompt_tokens = 0

    @property
    def waiting(self) -> dict[str, Request]:
        """The requests that wait, in no order."""
        return self.queue.waiting

    def add(self, request: Request) -> None:
        """Queue a request that has passed admission."""
        self.queue.add(request)

    def remove(self, request: Request) -> None:
        """Take out a request that finished or was aborted, and free its blocks."""
        if self.running.pop(request.request_id, None) is not None:
            self._leave(request)
            self._admits_from = 0
        else:
            self.queue.discard(request)

    def plan(self, now: float, in_flight: bool = False) -> StepPlan | None:
        """The next step. `now` is the clock in seconds; `in_flight` says that one step's result has not been applied.

        None when no request is left, or when what is in flight must be applied before anything can be planned.
        """
        if (not self.running and not self.waiting) or (in_flight and self._must_settle):
            return None
        several = self._several_tenants(now)
        wants_room, first = self._make_way(in_flight) if len(self.queue.tenants) > 1 else (False, None)
        builder = self._count_up(_PlanBuilder(self._config), several)
        has_blocks = self._schedule_running(builder, in_flight)
        if has_blocks:
            self._admit(builder, now, first)
            self._lengthen_chunks(builder)
        self._must_settle = wants_room or not has_blocks
        if not builder.rows:
            if in_flight:
                return None
            raise RuntimeError(
                f"the scheduler found nothing to run for {len(self.running)} running and {len(self.waiting)} waiting "
                f"requests with {self.kv.pool.num_free} free KV blocks; this is a defect of the scheduler"
            )
        self._charge(builder)
        self._step_id += 1
        self._num_tokens[self._step_id] = builder.num_prefill_tokens, builder.num_decode_tokens
        rows = list(builder.rows.values())
        forgotten, self._forgotten = self._forgotten, []
        writable = None
        if self._config.kv_write_guard:
            writable = {row.request_id: self.kv.writable_blocks(self.running[row.request_id]) for row in rows}
        return StepPlan(self._step_id, rows, builder.new, forgotten, writable)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take in how long a step has run, which bounds the next ones."""
        self.step_time.observe(*self._num_tokens.pop(plan.step_id), seconds)

    def shrink(self, plan: StepPlan) -> None:
        """Let the next step be smaller than `plan`, which did not fit the device's memory: preempt whom it admitted, so
        that all is as it was before, or else the latest request. The one that arrived first stays. Nothing may be in
        flight.

        They would be admitted again at once, to run out of memory again, so admission waits: for the end of a request,
        or for `STEPS_TO_RECOVER` steps.
        """
        self._num_tokens.pop(plan.step_id, None)
        admitted = [self.running[new.request_id] for new in plan.new_requests if new.request_id in self.running]
        oldest = self._oldest()
        victims = [request for request in reversed(admitted) if request is not oldest]
        if not victims and len(self.running) > 1:
            victims = [latest_of_heaviest(self.queue.running_tenants.values(), oldest)]
        for request in victims:
            self._preempt(request)
        self._admits_from = plan.step_id + 1 + STEPS_TO_RECOVER

    def take_all(self) -> list[Request]:
        """Take every request out, in order of arrival, and free all blocks: the worker has lost what it held of them.
        Nothing may be in flight. A request goes on where it was when it is added again."""
        for request in list(self.running.values()):
            self._preempt(request)
        taken = sorted(self.waiting.values(), key=lambda request: request.arrival)
        for request in taken:
            self.queue.discard(request)
        self._forgotten.clear()
        self._num_tokens.clear()
        self._admits_from = 0
        self._must_settle = False
        return taken

    def _several_tenants(self, now: float) -> bool:
        """Whether several tenants are served, now or a moment ago."""
        if len(self.queue.tenants) > 1:
            self._several_until = now + SEVERAL_TENANTS_S
        return now < self._several_until

    def _oldest(self) -> Request:
        """Of the running requests the one that arrived first, which is never preempted."""
        return min(self.running.values(), key=lambda request: request.arrival)

    def _make_way(self, in_flight: bool) -> tuple[bool, Tenant | None]:
        """Preempt for the tenant whose turn it is, when it waits for rows or blocks of which another tenant holds more.

        Returns whether somebody should be preempted and cannot be, because a step is in flight; and the tenant that way
        was made for, which is out of its turn and to be put back.
        """
        if self._step_id + 1 < self._admits_from or len(self.running) < 2:
            return False, None
        passed_over: list[Tenant] = []
        must_settle = preempted = False
        while len(passed_over) < MAX_PASSED_OVER and (tenant := self.queue.next_turn()) is not None:
            passed_over.append(tenant)
            request = self.queue.head(tenant)
            while (lacks := self._lacks(request)) is not None:
                victim = request_to_make_way(
                    tenant, lacks, self.queue.running_tenants.values(), self._oldest(), self._min_lag
                )
                must_settle = victim is not None and in_flight
                if victim is None or in_flight:
                    break
                self._preempt(victim)
                preempted = True
            # One tenant in a step. Who lacks rows alone is passed over: for another one somebody may have to go.
            if lacks is None or lacks > 0 or preempted or must_settle:
                break
        first = passed_over.pop() if preempted else None
        for tenant in passed_over:
            self.queue.put_back(tenant)
        return must_settle, first

    def _lacks(self, request: Request) -> int | None:
        """What a waiting request cannot start without: 0 for a row, else the blocks that it would hold; None when it
        lacks nothing."""
        config = self._config
        if len(self.running) >= config.max_num_seqs:
            return 0
        if self._num_running_tokens + request.max_decode_tokens > config.max_num_batched_tokens:
            return 0
        promised = sum(map(self._num_promised, self.running.values()))
        num_positions = self._positions_to_start(request)
        num_blocks = self.kv.blocks_for(num_positions)
        if num_blocks + promised <= self.kv.pool.num_free:
            return None
        return None if self.kv.fits(num_positions, self.kv.find_hit(request), promised) else num_blocks

    def _positions_to_start(self, request: Request) -> int:
        """Positions that must be free for a request to start: its whole prefill, and the decode row after it."""
        whole = shape_prefill(request, 0, self._config, budget=sys.maxsize)
        return min(whole.num_positions + 1 + whole.num_next_draft, peak_positions(request, self._config))

    def _num_promised(self, request: Request) -> int:
        """Blocks that a running request will take until it decodes."""
        return max(0, request.num_blocks_to_decode - len(request.block_ids)) if prefills_next(request) else 0

    def _count_up(self, builder: _PlanBuilder, several: bool) -> _PlanBuilder:
        """Count who decodes, who is in prefill and who waits, and what that leaves for prompts."""
        running = list(self.running.values())
        if not self._in_order:
            running.sort(key=lambda request: request.arrival)
            self.running = {request.request_id: request for request in running}
            self._in_order = True
        tokens = list(map(decode_tokens, running))
        num_in_prefill = tokens.count(0)
        builder.num_decode_tokens, builder.num_decoding = sum(tokens), len(running) - num_in_prefill
        builder.num_queued = num_in_prefill + len(self.waiting)
        if num_in_prefill:
            builder.in_prefill = [request for request, count in zip(running, tokens, strict=True) if not count]
        if len(running) + len(self.waiting) > 1:
            builder.max_prefill_tokens = self.step_time.max_prefill_tokens(builder.num_decode_tokens, several)
        return builder

    def _schedule_running(self, builder: _PlanBuilder, in_flight: bool) -> bool:
        """Give every running request its row, the one that arrived first before all, preempting where blocks run out.

        Returns False when they ran out and nobody could be preempted because a step is in flight.
        """
        if builder.in_prefill:
            self._share_out(builder)
        for request in list(self.running.values()):
            if request.request_id not in self.running:
                continue  # preempted for another one in this loop
            shape = self._shape(request, builder)
            if shape is None:
                if prefills_next(request):
                    # What a prefill that sits a step out leaves of it is not for those behind.
                    builder.closed.add(request.sampling.tenant)
                continue
            new_block_ids = self.kv.reserve(request, shape.num_positions)
            if new_block_ids is None:
                if in_flight:
                    return False
                new_block_ids = self._preempt_for(request, shape.num_positions, builder)
                if new_block_ids is None:
                    continue
            builder.add(request, shape, new_block_ids)
        return True

    def _share_out(self, builder: _PlanBuilder) -> None:
        """Say how many tokens the running requests in prefill have at least, in the order of their tenants' turns. One
        that does not finish leaves half to those after it and to those who wait; `_lengthen_chunks` gives it what they
        do not use."""
        queue = self.queue
        builder.prefills = sorted(
            (
                request
                for request in builder.in_prefill
                if request.row_in_flight is None or not request.disables_overlap
            ),
            key=lambda request: queue.tenant_of(request).turn,
        )
        room, num_after = builder.prefill_room, len(builder.prefills)
        first = queue.next_turn()
        if first is not None:
            queue.put_back(first)
        for request in builder.prefills:
            num_after -= 1
            rest = max(1, room - num_after)
            remaining = request.prefill_end - _next_start(request)
            is_first = first is None or queue.tenant_of(request).turn <= first.turn
            if remaining > rest or not is_first:
                rest = rest if first is None and num_after == 0 else rest - rest // 2
            builder.chunks[request.request_id] = chunk = min(remaining, rest)
            if chunk < remaining:
                builder.unfinished.add(request.sampling.tenant)
            room -= chunk

    def _shape(self, request: Request, builder: _PlanBuilder) -> RowShape | None:
        """A running request's next row; None when it sits this step out."""
        row = request.row_in_flight
        if row is None:
            if len(request.token_ids) - request.num_computed == 1:
                return shape_decode(request, self._config)
        elif request.disables_overlap:
            return None
        elif not prefills_next(request):
            return shape_decode_ahead(request, row, self._config)
        return shape_prefill(request, _next_start(request), self._config, builder.chunks[request.request_id])

    def _preempt_for(self, request: Request, num_positions: int, builder: _PlanBuilder) -> list[int] | None:
        """Blocks for a running request from the latest of those who hold most, or None when it had to be preempted
        itself. Who is preempted loses the row that it may have in this plan."""
        oldest = self._oldest()
        while True:
            if len(self.running) == 1:
                raise RuntimeError(
                    f"request '{request.request_id}' runs alone and {self.kv.pool.num_blocks} KV blocks do not cover "
                    f"its {num_positions} positions; admission should have refused it"
                )
            victim = latest_of_heaviest(self.queue.running_tenants.values(), oldest)
            self._preempt(victim)
            builder.remove(victim)
            if victim is request:
                return None
            if (new_block_ids := self.kv.reserve(request, num_positions)) is not None:
                return new_block_ids

    def _preempt(self, request: Request) -> None:
        """Put a running request back to where it waited."""
        del self.running[request.request_id]
        self._give_up(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        # Added before it leaves: its tenant keeps its counter.
        self.queue.add(request)
        self.queue.stop(request)

    def _leave(self, request: Request) -> None:
        """A running request has ended."""
        self._give_up(request)
        self.queue.stop(request)

    def _give_up(self, request: Request) -> None:
        """Give up all that a request held while it ran."""
        self.kv.release(request)
        self._forgotten.append(request.request_id)
        self._num_running_tokens -= request.max_decode_tokens

    def _admit(self, builder: _PlanBuilder, now: float, first: Tenant | None) -> None:
        """Start waiting requests, the head of the tenant with the lowest counter first, while there are rows, tokens
        and blocks for it. `first` goes before, since somebody was preempted for it.

        Only the first chunk's blocks are taken, but those of the whole prefill and of the decode row after it must be
        free, and those that were promised so to others do not count. With less, the request would be preempted before
        it yields anything; so would one that was preempted a moment ago, over and over. A request that lacks them holds
        back everybody.
        """
        config, queue = self._config, self.queue
        if self._step_id + 1 < self._admits_from or not self.waiting:
            return
        passed_over: list[Tenant] = []
        promised = sum(map(self._num_promised, builder.prefills))
        while (
            builder.prefill_room > 0 and len(self.running) < config.max_num_seqs and len(passed_over) < MAX_PASSED_OVER
        ):
            tenant, first = first or queue.next_turn(), None
            if tenant is None:
                break
            if tenant.name in builder.closed:
                passed_over.append(tenant)
                continue
            request = queue.head(tenant)
            hit = self.kv.find_hit(request)
            num_positions = self._positions_to_start(request)
            has_tokens = self._num_running_tokens + request.max_decode_tokens <= config.max_num_batched_tokens
            if not has_tokens or not self.kv.fits(num_positions, hit, promised):
                passed_over.append(tenant)
                break
            remaining = request.prefill_end - len(hit) * config.block_size
            if remaining > builder.prefill_room:
                if tenant.name in builder.unfinished:
                    passed_over.append(tenant)
                    continue
                builder.unfinished.add(tenant.name)
            request.num_blocks_to_decode = self.kv.blocks_for(num_positions)
            self._start(request, hit, builder, now)
            promised += request.num_blocks_to_decode - len(request.block_ids)
            queue.put_back(tenant)
        for tenant in passed_over if first is None else [*passed_over, first]:
            queue.put_back(tenant)

    def _start(self, request: Request, hit: list[int], builder: _PlanBuilder, now: float) -> None:
        """Let a waiting request run, with a first chunk in this step."""
        self.kv.start(request, hit)
        shape = shape_prefill(request, request.num_computed, self._config, builder.prefill_room)
        new_block_ids = self.kv.reserve(request, shape.num_positions)
        assert new_block_ids is not None, "the blocks of the whole prefill are free"
        self.queue.start(request)
        if self.running and next(reversed(self.running.values())).arrival > request.arrival:
            self._in_order = False
        self.running[request.request_id] = request
        self._num_running_tokens += request.max_decode_tokens
        tenant = self.queue.tenant_of(request)
        tenant.charge(shape.num_new)
        if request.first_scheduled_s is None:
            tenant.charge(CACHED_TOKEN_COST * request.num_computed)
            self._count_admission(request, now)
        builder.new.append(request.to_new_request())
        builder.add(request, shape, hit + new_block_ids)
        builder.num_admitted_tokens += shape.num_new

    def _lengthen_chunks(self, builder: _PlanBuilder) -> None:
        """Give the running requests in prefill what nobody else used of the step, as far as blocks are free."""
        for request in builder.prefills:
            row = builder.rows.get(request.request_id)
            room = builder.prefill_room
            if room <= 0:
                return
            if row is None or row.num_computed + row.num_new == request.prefill_end:
                continue
            shape = shape_prefill(request, row.num_computed, self._config, row.num_new + room)
            new_block_ids = self.kv.reserve(request, shape.num_positions)
            if new_block_ids is not None:
                builder.add(request, shape, new_block_ids)

    def _charge(self, builder: _PlanBuilder) -> None:
        """Count the step's tokens for the tenants that they are run for. Those of new requests have been."""
        queue = self.queue
        if len(queue.tenants) == 1:
            (tenant,) = queue.tenants.values()
            tenant.charge(builder.num_decode_tokens + builder.num_prefill_tokens - builder.num_admitted_tokens)
        else:
            new = {request.request_id for request in builder.new}
            for request_id, row in builder.rows.items():
                if request_id not in new:
                    queue.tenant_of(self.running[request_id]).charge(row.num_new + row.num_draft)
        queue.settle()

    def _count_admission(self, request: Request, now: float) -> None:
        """Count the prompt, its lookup and its wait. Only the first time: a preempted request that finds its own blocks
        again says nothing about how alike prompts are."""
        request.first_scheduled_s = now
        request.num_cached_tokens = request.num_computed
        self.num_prompt_tokens += request.num_prompt_tokens
        if self._config.enable_prefix_caching:
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_computed


def _next_start(request: Request) -> int:
    """Where the next chunk of a running request in prefill starts."""
    row = request.row_in_flight
    return request.num_computed + (0 if row is None else row.num_new)

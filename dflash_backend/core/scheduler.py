"""Which requests run in the next step, and with how many tokens.

Continuous batching with chunked prefill, shared between tenants (`docs/scheduling.md`). Within a tenant, requests run
by priority and arrival, without overtaking; `FairQueue` says which tenant's turn it is:

- running: decode rows, and of each tenant at most one request that is still in prefill. A prefill of several steps
  leaves half of a step's prefill budget to other tenants, and to later requests of its own tenant that the budget
  finishes;
- waiting: new requests, and preempted ones at the place they had.

A running request has a row of at least one token in every step: no more requests are admitted than can decode in one
step together. A request in prefill thus finds at least the tokens that it will decode with.

When blocks run out, the latest request of the tenant that holds most for its weight is preempted; likewise when a
tenant waits for rows or blocks of which another holds more. Its blocks are freed and it computes them again later (for
the most part from the prefix cache). The running request that arrived first is never preempted, and admission has
checked that the pool can hold it alone, so it always finishes, and in turn every request does.

While a step is in flight the next one is planned on upper bounds (`docs/gpu.md`): a request whose row depends on what
is in flight is skipped, and no request is preempted. When one should be, the step after is planned with nothing in
flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from dflash_backend.core.kv import KVManager, KVTiers, share_prefixes
from dflash_backend.core.moves import KVMover
from dflash_backend.core.plan import (
    DraftBudget,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    SharedPrefix,
)
from dflash_backend.core.request import (
    Request,
    chunk_end,
    decode_row,
    decode_row_ahead,
    next_start,
    positions_to_start,
    prefill_row,
    promised_blocks,
)
from dflash_backend.core.scheduler_config import SchedulerConfig, blocks_for
from dflash_backend.core.speculation import AdaptiveSpeculation
from dflash_backend.core.step_time import PrefillBound
from dflash_backend.core.tenants import (
    CACHED_TOKEN_COST,
    FairQueue,
    Tenant,
    latest_of_heaviest,
    request_to_make_way,
)

# Prompt tokens that a row has at least, but for the first row and for a prompt's end: fewer are hardly worth their row.
MIN_CHUNK = 16
# Requests that are in the middle of their prompts, at most, but for shorter ones.
MAX_PARTIAL_PREFILLS = 4
# A step takes at least this part of all prompt tokens that are left, where its time allows: with many prompts
# its share is larger than that of `max_prefill_tokens_per_step` (`PlanBuilder.prefill_budget`).
STEPS_OF_PROMPTS = 8
# How long a plan waits for KV from a tier when nothing runs, and all plans whose requests could run in its blocks.
LOAD_WAIT_S, MAX_LOAD_WAIT_S = 0.005, 2.0


@dataclass(slots=True)
class PlanBuilder:
    """The rows of a step so far, and its token counts.

    max_prefill_tokens: prompt tokens that the step's time allows; None: no bound.
    num_tokens_like_decoding: prompt tokens that take as long as the decode rows, by the steps so far; 0: not known.
    prefills: the running requests in prefill, in the order of their tenants' turns.
    chunks: by request id, the fewest tokens of the chunks that this step has of their prefills.
    unfinished: tenants of which nothing may be admitted that would not finish its prefill in this step.
    num_decode_tokens: of all decode rows, also of those that are skipped, since they wait for the step.
    num_prompt_tokens: to be computed, of all requests that run or wait; those that are cached count too.
    num_positions: whose KV the running requests have.
    """

    config: SchedulerConfig
    rows: dict[str, ScheduledRequest] = field(default_factory=dict)
    new_requests: list[NewRequest] = field(default_factory=list)
    max_prefill_tokens: int | None = None
    num_tokens_like_decoding: int = 0
    prefills: list[Request] = field(default_factory=list)
    chunks: dict[str, int] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    num_decode_tokens: int = 0
    num_prompt_tokens: int = 0
    num_positions: int = 0
    num_prefill_tokens: int = 0
    num_admitted_tokens: int = 0
    num_decoding: int = 0
    num_without_token: int = 0
    _num_unfinished: int = 0
    _least_remaining: int = 1 << 62

    def count(self, running: Collection[Request], queue: FairQueue) -> list[Request]:
        """Count the requests that decode and those without a first token; returns the running ones in prefill."""
        in_prefill: list[Request] = []
        for request in running:
            row, num_drafts = request.row_in_flight, request.num_pending_drafts
            if row is None:
                decodes = len(request.token_ids) - request.num_computed == 1
            else:
                decodes = not request.in_prefill
                num_drafts = row.num_next_draft if row.sample else num_drafts
            if decodes:
                self.num_decode_tokens += 1 + num_drafts
            else:
                in_prefill.append(request)
            self.num_positions += request.num_computed
        self.num_decoding = len(running) - len(in_prefill)
        self.num_without_token = len(in_prefill) + len(queue.waiting)
        self.num_prompt_tokens = sum(request.prefill_end - next_start(request) for request in in_prefill)
        self.num_prompt_tokens += queue.num_waiting_tokens
        return in_prefill

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens that the step can still take.

        A step takes as long as its tokens need, so beside decode rows a long prompt gets a share that keeps the pace of
        the running streams; without decode rows it gets the whole step. When more requests wait for their first token
        than for their next one, the share grows in proportion, or so that all prompts are computed within
        `STEPS_OF_PROMPTS` steps, if that is more: decode rows gain by company. The time of the step bounds it.
        """
        config = self.config
        budget = config.max_num_batched_tokens - self.num_decode_tokens - self.num_prefill_tokens
        if self.max_prefill_tokens is not None:
            budget = min(budget, self.max_prefill_tokens - self.num_prefill_tokens)
        if self.num_decode_tokens == 0:
            return budget
        share = config.max_prefill_tokens_per_step
        if share is None:
            # A step of few tokens takes nearly as long as one of some more, so its time counts, not its tokens alone.
            alike = max(self.num_decode_tokens, self.num_tokens_like_decoding)
            most = max(alike // 2, alike * self.num_without_token // self.num_decoding)
            share = max(config.min_prefill_tokens_per_step, most, self.num_prompt_tokens // STEPS_OF_PROMPTS)
        return min(budget, share - self.num_prefill_tokens)

    def share_out(self, in_prefill: list[Request], queue: FairQueue) -> None:
        """Share the prefill budget among the running requests in prefill, in the order of their tenants' turns.

        A prefill that does not finish leaves half to those after it and to waiting requests, and as much is kept for
        those that wait when it is their turn; what they do not use comes back to it at the end of the plan. Where less
        is left than a row is worth, the others skip the step, but for the one that arrived first: they have their turn
        when the first ones have got more. in_prefill: in order of arrival.
        """
        self.prefills = sorted(in_prefill, key=lambda request: queue.tenant_of(request).turn)
        first = queue.next_turn()
        if first is not None:
            queue.put_back(first)
        budget, waits, num_after = self.prefill_budget, first is not None, len(self.prefills)
        kept = 1  # for the one that arrived first
        for request in self.prefills:
            num_after -= 1
            kept = kept if request is not in_prefill[0] else 0
            if waits and first is not None and first.turn < queue.tenant_of(request).turn:
                budget -= budget // 2
                waits = False
            remaining = request.prefill_end - next_start(request)
            available = budget - kept
            if remaining > available and (waits or num_after):
                available -= available // 2
            chunk = min(remaining, available)
            if not self.chunks or request is in_prefill[0]:
                chunk = max(chunk, 1)
            elif chunk < min(remaining, MIN_CHUNK):
                chunk = 0
            if chunk:
                self.chunks[request.request_id] = chunk
                budget -= chunk
            if chunk < remaining:
                self.note_unfinished(request.sampling.tenant, remaining - chunk)

    def note_unfinished(self, tenant: str, remaining: int) -> None:
        """A request is in the middle of its prompt after this step, with about as many tokens to go."""
        self.unfinished.add(tenant)
        self._num_unfinished += 1
        self._least_remaining = min(self._least_remaining, remaining)

    def may_begin(self, tenant: str, remaining: int, made_way: bool) -> bool:
        """Whether a waiting request may begin its prompt of `remaining` tokens though it does not end it in this step:
        one of a tenant, and a few in all, else many prompts would all end late; but a shorter one goes ahead, and one
        that another was preempted for, as `made_way` says."""
        if tenant in self.unfinished:
            return False
        return made_way or self._num_unfinished < MAX_PARTIAL_PREFILLS or remaining < self._least_remaining

    def add_prefill(self, row: ScheduledRequest) -> None:
        """Add a prefill chunk, in place of a shorter one of the same request."""
        before = self.rows.get(row.request_id)
        if before is not None:
            self.num_prefill_tokens -= before.num_new
            row.new_block_ids[:0] = before.new_block_ids
            row.new_window_block_ids[:0] = before.new_window_block_ids
        self.rows[row.request_id] = row
        self.num_prefill_tokens += row.num_new

    def remove(self, request: Request) -> None:
        """Take out the row of a preempted request, if it has one."""
        row = self.rows.pop(request.request_id, None)
        if row is not None and request.request_id in self.chunks:
            self.num_prefill_tokens -= row.num_new


# Tenants whose first request cannot start that are passed over in a step.
MAX_PASSED_OVER = 32
# A tenant is crowded, which the stub is told, with this part of a queue: fewer of its requests than there are tenants.
CROWD_OF_QUEUE = 16
# One tenant is preempted for another that runs only if that one has had less by this part of a step's most tokens.
MIN_LAG_IN_STEPS = 1 / 8
# Steps without admissions after an out-of-memory step, unless a request finishes first.
STEPS_TO_RECOVER = 16


class Scheduler:
    """The waiting and the running requests, by id, and the blocks that they hold."""

    def __init__(self, config: SchedulerConfig, mover: KVMover | None = None) -> None:
        """mover: of the KV tiers that `config` names."""
        self._config = config
        self.kv = KVManager(config, mover)
        self.loading: dict[str, Request] = {}
        """The requests that wait for KV from a tier, by id; they are not in the queue."""
        self.queue = FairQueue(config.tenant_weights, max(1, config.max_queue_size // CROWD_OF_QUEUE))
        # In order of arrival when a plan begins; `_in_order` is False when that needs sorting.
        self.running: dict[str, Request] = {}
        self._in_order = True
        self._min_lag = config.max_num_batched_tokens * MIN_LAG_IN_STEPS
        self.speculation = AdaptiveSpeculation.of(config)
        """The policy of `adaptive_speculation`; None without it, or without a drafter."""
        self._prefill_bound = PrefillBound(config.max_step_s)
        # Requests that the worker still holds, to be removed at the start of the next step.
        self._finished_req_ids: list[str] = []
        # Tokens of a step in which all running requests decode with all of their drafts.
        self._num_running_tokens = 0
        self._step_id = 0
        # Whether a request must be preempted, for which nothing may be in flight.
        self._must_drain = False
        self._waits_since: float | None = None  # for loads that take the blocks of who waits, with nothing that runs
        # The first step that may admit requests again after an out-of-memory step.
        self._admits_from = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_prompt_tokens = 0

    @property
    def waiting(self) -> dict[str, Request]:
        """The requests that wait, in no order."""
        return self.queue.waiting

    def remove(self, request: Request, comes_back: bool = False) -> None:
        """Take out a request that finished or was aborted, or will be queued again, and free its blocks."""
        if self.running.pop(request.request_id, None) is not None:
            self._release(request)
            self.queue.stop(request)
            self._admits_from = 0
        elif self.loading.pop(request.request_id, None) is not None:
            self.queue.take_back(request)
        else:
            self.queue.discard(request)
        if self.kv.tiers is not None:
            self.kv.tiers.release(request, comes_back)

    def begin_drafter(self) -> None:
        """Another drafter drafts from now on, with nothing in flight."""
        self.kv.begin_drafter()
        if self.speculation is not None:
            self.speculation.begin_drafter()

    def plan(self, now: float, in_flight: bool = False) -> SchedulerOutput | None:
        """The next step. `now` is the clock in seconds; `in_flight` says that one step's result has not been applied.

        None when no request is left, or when what is in flight must be applied before anything can be planned.
        """
        waiting = self.queue.waiting
        if self.kv.tiers is not None:
            self._advance_tiers(self.kv.tiers, in_flight)
        if (not self.running and not waiting) or (in_flight and self._must_drain):
            return None
        waits_for_preemption, first = self._make_way(in_flight) if len(self.queue.tenants) > 1 else (False, None)
        builder = PlanBuilder(self._config)
        if not self._in_order:
            by_arrival = sorted(self.running.values(), key=lambda request: request.arrival)
            self.running = {request.request_id: request for request in by_arrival}
            self._in_order = True
        in_prefill = builder.count(self.running.values(), self.queue)
        if len(self.running) + len(waiting) > 1:
            builder.max_prefill_tokens = self._prefill_bound.max_prefill_tokens(
                self.queue,
                in_prefill,
                now,
                builder.num_prompt_tokens,
                builder.num_decode_tokens,
                builder.num_positions,
            )
            builder.num_tokens_like_decoding = self._prefill_bound.step_time.as_long_as_decoding(
                builder.num_decode_tokens, builder.num_positions
            )
        if self.speculation is not None:
            num_beginning = 0
            if waiting:
                num_beginning = self._num_beginning(len(waiting), len(in_prefill), builder.num_prompt_tokens)
            self.speculation.choose_draft_lengths(self.running.values(), builder.num_prompt_tokens, num_beginning)
        if in_prefill:
            builder.share_out(in_prefill, self.queue)
        has_blocks = self._schedule_running(builder, in_flight)
        if has_blocks and waiting:
            self._admit(builder, now, first)
        if has_blocks and builder.prefills:
            self._lengthen_chunks(builder)
        self._must_drain = waits_for_preemption or not has_blocks
        if not builder.rows:
            if in_flight or (self.kv.tiers is not None and self._wait_for_loads(self.kv.tiers, now)):
                return None
            raise RuntimeError(
                f"the scheduler found nothing to run for {len(self.running)} running and {len(waiting)} waiting "
                f"requests with {self.kv.pool.num_free} free KV blocks; this is a defect of the scheduler"
            )
        self._waits_since = None
        return self._make_output(builder)

    def _num_beginning(self, num_waiting: int, num_in_prefill: int, num_prompt_tokens: int) -> int:
        """Waiting requests that there are rows for, and free blocks if their prompts are as long as the mean of those
        that are left; one at least, where there is a row."""
        num_rows = min(num_waiting, self._config.max_num_seqs - len(self.running))
        if num_rows <= 1:
            return num_rows
        mean = -(-num_prompt_tokens // (num_waiting + num_in_prefill))
        num_blocks = blocks_for(mean + 1 + self._config.num_speculative_tokens, self._config.block_size)
        return min(num_rows, max(1, self.kv.pool.num_free // num_blocks))

    def _advance_tiers(self, tiers: KVTiers, in_flight: bool) -> None:
        """Let the requests whose KV has come back to their places; where there is nothing else to do, wait a little."""
        tiers.advance()
        if not self.queue.waiting:
            self._waits_since = None
        if self.loading and not self.running and not self.queue.waiting and not in_flight:
            tiers.wait(LOAD_WAIT_S)
            tiers.advance()
        for request in tiers.ended():
            if self.loading.get(request.request_id) is request:
                del self.loading[request.request_id]
                self.queue.take_back(request)
                self.queue.add(request)

    def _wait_for_loads(self, tiers: KVTiers, now: float) -> bool:
        """True if the plan is empty only because of KV loads. Waits a little for those under way; after
        `MAX_LOAD_WAIT_S`, or where none is, it gives back the blocks that loads hold."""
        if self._waits_since is None:
            self._waits_since = now
        if tiers.is_loading and now - self._waits_since < MAX_LOAD_WAIT_S:
            tiers.wait(LOAD_WAIT_S)
            return True
        return tiers.cancel_loads()

    def _begin_load(self, tiers: KVTiers, request: Request, hit: list[int], builder: PlanBuilder) -> bool:
        """Let a request that could start wait for KV from a tier instead, where that is quicker."""
        step_time = self._prefill_bound.step_time
        seconds_per_token, step_s = step_time.prompt_seconds(builder.num_decode_tokens, builder.num_positions)
        if not tiers.begin(request, hit, seconds_per_token, step_s):
            return False
        self.queue.discard(request)
        self.queue.set_aside(request)
        request.was_loading = True
        self._waits_since = None
        self.loading[request.request_id] = request
        return True

    def _make_output(self, builder: PlanBuilder) -> SchedulerOutput:
        """The step with these rows, whose tokens are charged to their tenants; those of new requests are already."""
        self._step_id += 1
        self.queue.was_charged = True
        if len(self.queue.tenants) == 1:
            (tenant,) = self.queue.tenants.values()
            num_tokens = builder.num_decode_tokens + builder.num_prefill_tokens - builder.num_admitted_tokens
            tenant.service += num_tokens / tenant.weight
        else:
            new = {request.request_id for request in builder.new_requests}
            for request_id, row in builder.rows.items():
                if request_id not in new:
                    self.queue.tenant_of(self.running[request_id]).charge(row.num_new + row.num_draft)
        rows = list(builder.rows.values())
        shared: list[SharedPrefix] = []
        if self._config.min_shared_positions and not builder.num_prefill_tokens:
            rows, shared = share_prefixes(rows, self.running, self._config)
        # After all hits of this plan: a slot that is given away is not found any more.
        snapshot_slots = self.kv.snapshot_slots(self.running, rows) if builder.num_prefill_tokens else {}
        finished, self._finished_req_ids = self._finished_req_ids, []
        writable = writable_of_windows = None
        if self._config.kv_write_guard:
            by_group = {row.request_id: self.kv.writable_blocks(self.running[row.request_id]) for row in rows}
            writable = {request_id: blocks[0] for request_id, blocks in by_group.items()}
            writable_of_windows = {request_id: blocks[1] for request_id, blocks in by_group.items() if blocks[1:]}
        budget: DraftBudget | None = None
        if self.speculation is not None:
            has_drafts = any(row.num_draft for row in rows)
            speculating = [self.running[row.request_id].speculation for row in rows] if has_drafts else []
            budget = self.speculation.choose_budget(rows, speculating)
        plan = SchedulerOutput(
            step_id=self._step_id,
            rows=rows,
            new_requests=builder.new_requests,
            finished_req_ids=finished,
            writable_block_ids=writable,
            writable_window_block_ids=writable_of_windows,
            budget=budget,
            wants_confidence=self.speculation is not None and self.speculation.uneven.wants_confidence,
            shared_prefixes=shared,
            num_prefill_tokens=builder.num_prefill_tokens,
            snapshot_slots=snapshot_slots,
        )
        if self.speculation is not None:
            self.speculation.planned(plan)
        return plan

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float, draft_s: float) -> None:
        """Take in how long a step has run, and how much of that was drafting."""
        num_prefill = plan.num_prefill_tokens
        num_positions = sum(row.num_computed for row in plan.rows)
        self._prefill_bound.step_time.observe(num_prefill, plan.num_tokens - num_prefill, seconds, num_positions)
        if self.speculation is not None:
            self.speculation.observe(plan, result, seconds, draft_s)

    def shrink(self, plan: SchedulerOutput) -> None:
        """Make the next step smaller than `plan`, which did not fit the device's memory: preempt the requests that it
        admitted, which restores the state before it, or else the latest request. The request that arrived first stays.
        Nothing may be in flight.

        Admitted again at once, they would run out of memory again, so admission waits for the end of a request or for
        `STEPS_TO_RECOVER` steps.
        """
        if self.speculation is not None:
            self.speculation.remove_planned()
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
            self._requeue(request)
        taken = sorted((*self.waiting.values(), *self.loading.values()), key=lambda request: request.arrival)
        for request in taken:
            self.remove(request, comes_back=True)
        self._finished_req_ids.clear()
        if self.speculation is not None:
            self.speculation.remove_planned()
        self._admits_from = 0
        self._must_drain = False
        return taken

    def _oldest(self) -> Request:
        """The running request that arrived first, which is never preempted."""
        return min(self.running.values(), key=lambda request: request.arrival)

    def _make_way(self, in_flight: bool) -> tuple[bool, Tenant | None]:
        """Preempt for the tenant whose turn it is, when it waits for rows or blocks of which another tenant holds more.

        Returns whether a request should be preempted but cannot be, because a step is in flight; and the tenant that
        way was made for, which is out of its turn and to be put back.
        """
        if self._step_id + 1 < self._admits_from or len(self.running) < 2:
            return False, None
        oldest, running_tenants = self._oldest(), self.queue.running_tenants.values()
        # A tenant's only row is never taken.
        with_several = [tenant for tenant in running_tenants if len(tenant.running) > 1]
        passed_over: list[Tenant] = []
        must_drain = preempted = False
        while len(passed_over) < MAX_PASSED_OVER and (tenant := self.queue.next_turn()) is not None:
            passed_over.append(tenant)
            request = self.queue.head(tenant)
            while (lacks := self._lacks(request)) is not None:
                others = running_tenants if lacks else with_several
                victim = request_to_make_way(tenant, lacks, others, oldest, self._min_lag)
                if victim is not None and lacks and self.kv.evict_kept():
                    continue  # what is kept for other servers goes before a running request
                must_drain = victim is not None and in_flight
                if victim is None or in_flight:
                    break
                self._preempt(victim)
                preempted = True
            # One tenant in a step. A tenant that lacks only rows is passed over: another one may lack blocks.
            if lacks is None or lacks > 0 or preempted or must_drain:
                break
        first = passed_over.pop() if preempted else None
        for tenant in passed_over:
            self.queue.put_back(tenant)
        return must_drain, first

    def _lacks(self, request: Request) -> int | None:
        """What a waiting request cannot start without: 0 for a row, else the blocks that it would hold; None when it
        lacks nothing."""
        config = self._config
        if len(self.running) >= config.max_num_seqs:
            return 0
        if self._num_running_tokens + request.max_decode_tokens > config.max_num_batched_tokens:
            return 0
        promised = sum(map(promised_blocks, self.running.values()))
        num_positions = positions_to_start(request, config)
        # Where it fits without a hit there is none to look up.
        if self.kv.fits(request, num_positions, (), promised):
            return None
        if self.kv.fits(request, num_positions, self.kv.find_hit(request), promised):
            return None
        return blocks_for(num_positions, config.block_size)

    def _schedule_running(self, builder: PlanBuilder, in_flight: bool) -> bool:
        """Give every running request its row, in order of arrival, preempting where blocks run out.

        Returns False when they ran out and no request could be preempted because a step is in flight.
        """
        config = self._config
        for request in list(self.running.values()):
            if request.request_id not in self.running:
                continue  # preempted for another request in this loop
            before = request.row_in_flight
            chunk = builder.chunks.get(request.request_id)
            if chunk is not None:
                row = self._prefill_row(request, next_start(request), chunk)
            elif before is None and len(request.token_ids) - request.num_computed == 1:
                row = decode_row(request, config)
            elif before is None or request.in_prefill or (ahead := decode_row_ahead(request, before, config)) is None:
                continue  # this step skips it
            else:
                row = ahead
            # `KVManager.claim` would ask the same; most of hundreds of rows need no block.
            if row.num_positions > len(request.block_ids) * config.block_size and not self.kv.claim(request, row):
                if in_flight:
                    return False
                if not self._preempt_for(request, row, builder):
                    continue
            if chunk is None:
                builder.rows[request.request_id] = row
            else:
                builder.add_prefill(row)
        return True

    def _prefill_row(self, request: Request, start: int, budget: int) -> ScheduledRequest:
        """The next chunk of a request's prefill, from position `start` on, of `budget` tokens at most."""
        end = chunk_end(request, start, budget)
        return prefill_row(request, start, end, self._config, request.draft_length)

    def _preempt_for(self, request: Request, row: ScheduledRequest, builder: PlanBuilder) -> bool:
        """Reserve the row's blocks: from the latest request of the tenant that holds most. False when the request had
        to be preempted itself. A preempted request loses the row that it may have in this plan."""
        oldest = self._oldest()
        while True:
            if len(self.running) == 1:
                raise RuntimeError(
                    f"request '{request.request_id}' runs alone and {self.kv.pool.num_blocks} KV blocks do not cover "
                    f"its {row.num_positions} positions; admission should have refused it"
                )
            victim = latest_of_heaviest(self.queue.running_tenants.values(), oldest)
            self._preempt(victim)
            builder.remove(victim)
            if victim is request:
                return False
            if self.kv.reserve(request, row):
                return True

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a running request for others; it waits again."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Put a running request back to where it waited."""
        del self.running[request.request_id]
        self._release(request)
        request.has_loaded, request.nothing_to_load_at = False, None
        # Added before it leaves: its tenant keeps its counter.
        self.queue.add(request)
        self.queue.stop(request)

    def _release(self, request: Request) -> None:
        self.kv.release(request)
        self._finished_req_ids.append(request.request_id)
        self._num_running_tokens -= request.max_decode_tokens

    def _admit(self, builder: PlanBuilder, now: float, first: Tenant | None) -> None:
        """Start waiting requests while there are rows, tokens and blocks for them: first one of `first`, for which a
        request was preempted, then of the tenant with the lowest counter. Behind many that cannot begin now, those that
        end in this step (`FairQueue.shorter`).

        Only the first chunk's blocks are taken, but those of the whole prefill and of the decode row after it must be
        free, without those promised so to others. With less, the request would be preempted before it yields anything,
        and again each time. A request that lacks blocks holds back all others.
        """
        config, queue = self._config, self.queue
        if self._step_id + 1 < self._admits_from or not self.waiting:
            return
        passed_over: list[Tenant] = []
        shorter: Iterator[Tenant] | None = None
        promised = sum(map(promised_blocks, builder.prefills))
        while builder.prefill_budget > 0 and len(self.running) < config.max_num_seqs:
            if len(passed_over) == MAX_PASSED_OVER and shorter is None:
                shorter = iter(queue.shorter(passed_over[0], builder.prefill_budget))
            made_way = first is not None
            tenant = first or (queue.next_turn() if shorter is None else next(shorter, None))
            first = None
            if tenant is None:
                break
            request = queue.head(tenant)
            hit = self.kv.find_hit(request)
            num_positions = positions_to_start(request, config)
            has_tokens = self._num_running_tokens + request.max_decode_tokens <= config.max_num_batched_tokens
            if not has_tokens or not self.kv.make_admissible(request, num_positions, hit, promised):
                passed_over.append(tenant)  # It waits for blocks or tokens, and so do all others: the loop ends.
                break
            if self.kv.tiers is not None:
                if self.kv.tiers.has_begun_enough:
                    passed_over.append(tenant)
                    break
                if self._begin_load(self.kv.tiers, request, hit, builder):
                    queue.put_back(tenant)
                    continue
            remaining = request.prefill_end - len(hit) * config.block_size
            if remaining > builder.prefill_budget:
                if not builder.may_begin(tenant.name, remaining, made_way):
                    passed_over.append(tenant)
                    continue
                builder.note_unfinished(tenant.name, remaining)
            request.num_blocks_to_decode = blocks_for(num_positions, config.block_size)
            self._start(request, hit, builder, now)
            promised += request.num_blocks_to_decode - len(request.block_ids)
            queue.put_back(tenant)
        for tenant in passed_over if first is None else [*passed_over, first]:
            queue.put_back(tenant)

    def _start(self, request: Request, hit: list[int], builder: PlanBuilder, now: float) -> None:
        """Let a waiting request run, with a first chunk in this step."""
        self.kv.start(request, hit)
        if self.kv.tiers is not None and (load := self.kv.tiers.release(request)) is not None:
            is_first = request.first_scheduled_s is None
            request.num_loaded_tokens = self.kv.tiers.count_hit(load, len(hit)) if is_first else {}
        if self.speculation is not None:
            request.draft_length = self.speculation.choose_first_block(request.speculation)
        row = self._prefill_row(request, request.num_computed, builder.prefill_budget)
        row.new_block_ids.extend(request.block_ids)
        row.new_window_block_ids.extend(request.window_block_ids)
        has_blocks = self.kv.reserve(request, row)
        assert has_blocks, "the blocks of the whole prefill are free"
        self.queue.start(request)
        if self.running and next(reversed(self.running.values())).arrival > request.arrival:
            self._in_order = False
        self.running[request.request_id] = request
        self._num_running_tokens += request.max_decode_tokens
        tenant = self.queue.tenant_of(request)
        tenant.charge(row.num_new)
        if request.first_scheduled_s is None:
            tenant.charge(CACHED_TOKEN_COST * request.num_computed)
            # Only the first time: a preempted request finds its own blocks again, which says nothing about shared
            # prefixes.
            request.first_scheduled_s = now
            request.num_cached_tokens = request.num_computed
            self.num_prompt_tokens += request.num_prompt_tokens
            if self._config.enable_prefix_caching:
                self.prefix_cache_queries += request.num_prompt_tokens
                self.prefix_cache_hits += request.num_computed
        builder.new_requests.append(request.to_new_request())
        builder.add_prefill(row)
        builder.num_admitted_tokens += row.num_new

    def _lengthen_chunks(self, builder: PlanBuilder) -> None:
        """Give the running requests in prefill the budget that is left, as far as blocks are free."""
        for request in builder.prefills:
            row = builder.rows.get(request.request_id)
            budget = builder.prefill_budget
            if budget <= 0:
                return
            if row is None or row.num_computed + row.num_new == request.prefill_end:
                continue
            longer = self._prefill_row(request, row.num_computed, row.num_new + budget)
            if self.kv.reserve(request, longer):
                builder.add_prefill(longer)

"""Which requests run in the next step, and with how many tokens. Called by `EngineCore`, once before each step.

Continuous batching with chunked prefill, first come first served (`docs/scheduling.md`). Both queues are in order of
arrival, and everybody who runs arrived before everybody who waits:

- running: decode rows, and at the end at most one request that is still in prefill, because a prefill that gets fewer
  tokens than it could use has used up what the step had for it, so nobody is admitted behind it;
- waiting: new requests at the end, preempted ones back at the head.

Whoever runs has a row in every step: no more requests are admitted than can decode in one step together. A request in
prefill thus finds at least the tokens that it will decode with.

When blocks run out the running request that arrived last is preempted: its blocks are freed and it computes them anew
later (for the most part from the prefix cache). The oldest request is never preempted and admission has checked that
the pool can hold it alone, so it always finishes, and in turn everybody does.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, field

from dflash_backend.core.kv_manager import KVManager
from dflash_backend.core.plan import EngineLimits, NewRequest, ScheduledRow, StepPlan
from dflash_backend.core.request import Request
from dflash_backend.core.row_shape import RowShape, peak_positions, shape_decode, shape_prefill


@dataclass(slots=True)
class _PlanBuilder:
    """A plan in the making: its rows, and how many tokens they have so far by kind."""

    limits: EngineLimits
    rows: list[ScheduledRow] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0

    @property
    def prefill_room(self) -> int:
        """Prompt tokens that the step can take yet. Complete only when all decode rows are in.

        A step takes as long as its tokens need, so beside decode rows a long prompt gets a share that keeps the pace of
        the running streams; with nobody to keep waiting it gets the whole step.
        """
        limits = self.limits
        room = limits.max_num_batched_tokens - self.num_decode_tokens - self.num_prefill_tokens
        if self.num_decode_tokens == 0:
            return room
        share = limits.max_prefill_tokens_per_step
        if share is None:
            share = max(limits.min_prefill_tokens_per_step, self.num_decode_tokens // 2)
        return min(room, share - self.num_prefill_tokens)

    def add(self, request: Request, shape: RowShape, new_block_ids: list[int]) -> None:
        self.rows.append(
            ScheduledRow(
                request.request_id,
                request.num_computed,
                shape.num_new,
                shape.num_draft,
                shape.sample,
                shape.num_next_draft,
                new_block_ids,
            )
        )


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
        else:
            del self.waiting[request.request_id]

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when no request is left. `now` is the clock in seconds."""
        if not self.running and not self.waiting:
            return None
        builder = _PlanBuilder(self._limits)
        self._schedule_running(builder)
        self._admit(builder, now)
        if not builder.rows:
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

    def _schedule_running(self, builder: _PlanBuilder) -> None:
        """Give every running request its row, oldest first, preempting from the other end where blocks run out."""
        for request in list(self.running.values()):
            if request.request_id not in self.running:
                break  # preempted for an older one in this loop, and so are all that arrived after it
            decodes = request.num_tokens - request.num_computed == 1
            if decodes:
                shape = shape_decode(request, self._limits)
            else:
                shape = shape_prefill(request, self._limits, builder.prefill_room)
            new_block_ids = self._reserve_or_preempt(request, shape.num_positions)
            if new_block_ids is None:
                break
            if decodes:
                builder.num_decode_tokens += 1 + shape.num_draft
            else:
                builder.num_prefill_tokens += shape.num_new
            builder.add(request, shape, new_block_ids)

    def _reserve_or_preempt(self, request: Request, num_positions: int) -> list[int] | None:
        """Blocks for a running request, or None when it had to be preempted itself.

        Whoever is preempted for it arrived later, so has no row in this plan yet.
        """
        while (new_block_ids := self.kv.reserve(request, num_positions)) is None:
            if len(self.running) == 1:
                raise RuntimeError(
                    f"request '{request.request_id}' runs alone and {self.kv.pool.num_blocks} KV blocks do not cover "
                    f"its {num_positions} positions; admission should have refused it"
                )
            _, latest = self.running.popitem()
            self._preempt(latest)
            if latest is request:
                return None
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

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
        while self.waiting and len(self.running) < limits.max_num_seqs and builder.prefill_room > 0:
            request = next(iter(self.waiting.values()))
            if self._num_running_tokens + request.max_decode_tokens > limits.max_num_batched_tokens:
                return
            hit = self.kv.find_hit(request)
            whole = shape_prefill(request, limits, budget=sys.maxsize)
            until_decode = whole.num_positions + 1 + whole.num_next_draft
            if not self.kv.fits(min(until_decode, peak_positions(request, limits)), hit):
                return
            self.kv.start(request, hit)
            shape = shape_prefill(request, limits, builder.prefill_room)
            new_block_ids = self.kv.reserve(request, shape.num_positions)
            assert new_block_ids is not None, "the blocks of the whole prefill are free"
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            self._num_running_tokens += request.max_decode_tokens
            if request.first_scheduled_s is None:
                self._count_admission(request, now)
            builder.num_prefill_tokens += shape.num_new
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

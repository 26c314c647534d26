"""Which requests run in the next step, and with how many tokens. Called by `EngineCore`, once before each step.

Continuous batching with chunked prefill, first come first served. Both queues are in order of arrival, and everybody
who runs arrived before everybody who waits:

- running: decode rows, and at the end at most one request that is still in prefill, because a prefill that gets fewer
  tokens than it could use has used up the step's budget, so nobody is admitted behind it;
- waiting: new requests at the end, preempted ones back at the head.

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
from dflash_backend.core.row_shape import RowShape, peak_positions, shape_row


@dataclass(slots=True)
class _PlanBuilder:
    """A plan in the making; `budget` is the tokens that the step has left."""

    budget: int
    rows: list[ScheduledRow] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)

    def add(self, request: Request, shape: RowShape, new_block_ids: list[int]) -> None:
        self.budget -= shape.num_tokens
        self.rows.append(
            ScheduledRow(
                request_id=request.request_id,
                num_computed=request.num_computed,
                num_new=shape.num_new,
                num_draft=shape.num_draft,
                sample=shape.sample,
                num_next_draft=shape.num_next_draft,
                new_block_ids=new_block_ids,
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
            self.kv.release(request)
            self._forgotten.append(request.request_id)
        else:
            del self.waiting[request.request_id]

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when no request is left. `now` is the clock in seconds."""
        if not self.running and not self.waiting:
            return None
        builder = _PlanBuilder(budget=self._limits.max_num_batched_tokens)
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
            shape = shape_row(request, self._limits, builder.budget)
            if shape is None:
                continue
            new_block_ids = self._reserve_or_preempt(request, shape.num_positions)
            if new_block_ids is None:
                break
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
        self.kv.release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._forgotten.append(request.request_id)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _admit(self, builder: _PlanBuilder, now: float) -> None:
        """Start waiting requests, the head first, while there are rows, tokens and blocks for it.

        Only the first chunk's blocks are taken, but those of the whole prefill and of the decode row after it must be
        free. With less, the request would be preempted before it yields anything; so would one that was preempted a
        moment ago, over and over.
        """
        limits = self._limits
        while self.waiting and len(self.running) < limits.max_num_seqs and builder.budget > 0:
            request = next(iter(self.waiting.values()))
            hit = self.kv.find_hit(request)
            whole = shape_row(request, limits, budget=sys.maxsize)
            assert whole is not None, "any row fits this budget"
            until_decode = whole.num_positions + 1 + whole.num_next_draft
            if not self.kv.fits(min(until_decode, peak_positions(request, limits)), hit):
                return
            self.kv.start(request, hit)
            shape = shape_row(request, limits, builder.budget)
            new_block_ids = None if shape is None else self.kv.reserve(request, shape.num_positions)
            assert shape is not None, "a waiting request has no drafts, so any budget will do"
            assert new_block_ids is not None, "the blocks of the whole prefill are free"
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
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

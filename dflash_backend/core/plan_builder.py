"""A plan in the making: its rows, and how many prompt tokens fit beside its decode rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_backend.core.plan import NewRequest, ScheduledRequest
from dflash_backend.core.request import Request
from dflash_backend.core.rows import decode_tokens, next_start
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.tenants import FairQueue

# Prompt tokens that a row has at least, but for the first row and for a prompt's end: fewer are hardly worth their row.
MIN_CHUNK = 16
# Requests that are in the middle of their prompts, at most, but for shorter ones.
MAX_PARTIAL_PREFILLS = 4


@dataclass(slots=True)
class PlanBuilder:
    """The rows of a step so far, and its token counts.

    max_prefill_tokens: prompt tokens that the step's time allows; None: no bound.
    num_tokens_like_decoding: prompt tokens that take as long as the decode rows, by the steps so far; 0: not known.
    prefills: the running requests in prefill, in the order of their tenants' turns.
    chunks: how many tokens those of them have at least that have a row in this step, by id.
    unfinished: tenants of which nothing may be admitted that would not finish its prefill in this step.
    num_decode_tokens: of all decode rows, also of those that are skipped, since they wait for the step.
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
    num_positions: int = 0
    num_prefill_tokens: int = 0
    num_admitted_tokens: int = 0
    num_decoding: int = 0
    num_without_token: int = 0
    _num_unfinished: int = 0
    _least_remaining: int = 1 << 62

    def count(self, running: list[Request], num_waiting: int) -> list[Request]:
        """Count the requests that decode and those without a first token; returns the running ones in prefill."""
        tokens = list(map(decode_tokens, running))
        num_in_prefill = tokens.count(0)
        self.num_decode_tokens = sum(tokens)
        self.num_positions = sum(request.num_computed for request in running)
        self.num_decoding = len(running) - num_in_prefill
        self.num_without_token = num_in_prefill + num_waiting
        if not num_in_prefill:
            return []
        return [request for request, num_tokens in zip(running, tokens, strict=True) if not num_tokens]

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens that the step can still take.

        A step takes as long as its tokens need, so beside decode rows a long prompt gets a share that keeps the pace of
        the running streams; without decode rows it gets the whole step. When more requests wait for their first token
        than for their next one, the share grows in proportion, and the time of the step bounds it.
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
            share = max(config.min_prefill_tokens_per_step, most)
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
        """A request is in the middle of its prompt behind this step, with about as many tokens to go."""
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

    def add_decode(self, row: ScheduledRequest, new_block_ids: list[int]) -> None:
        """Add a decode row, with the blocks that it gained."""
        if new_block_ids:
            row.new_block_ids.extend(new_block_ids)
        self.rows[row.request_id] = row

    def add_prefill(self, row: ScheduledRequest, new_block_ids: list[int]) -> None:
        """Add a prefill chunk, with the blocks that it gained, in place of a shorter one of the same request."""
        before = self.rows.get(row.request_id)
        if before is not None:
            self.num_prefill_tokens -= before.num_new
            row.new_block_ids.extend(before.new_block_ids)
        row.new_block_ids.extend(new_block_ids)
        self.rows[row.request_id] = row
        self.num_prefill_tokens += row.num_new

    def charge(self, queue: FairQueue, running: Mapping[str, Request]) -> None:
        """Charge the step's tokens to their tenants. Those of new requests are charged already."""
        if len(queue.tenants) == 1:
            (tenant,) = queue.tenants.values()
            tenant.charge(self.num_decode_tokens + self.num_prefill_tokens - self.num_admitted_tokens)
        else:
            new = {request.request_id for request in self.new_requests}
            for request_id, row in self.rows.items():
                if request_id not in new:
                    queue.tenant_of(running[request_id]).charge(row.num_new + row.num_draft)
        queue.settle()

    def remove(self, request: Request) -> None:
        """Take out the row of a preempted request, if it has one."""
        row = self.rows.pop(request.request_id, None)
        if row is not None and request.request_id in self.chunks:
            self.num_prefill_tokens -= row.num_new

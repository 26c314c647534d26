"""The step loop: requests in, token deltas out. Plan, run on the worker, apply; no threads and no queues of its own.

`EngineCore` runs in the engine process behind ZeroMQ and in-process behind `dflash_backend.LLM`; either calls
`add_request`, `stop` and `abort` between steps and `step` while `has_unfinished()`.

With a worker that overlaps, a step is in flight between two calls of `step` (`docs/gpu.md`): the next one is planned
and submitted behind it before its result is waited for. Requests may end while they have a row in flight, and their ids
be used again; so what is in flight is kept with the request objects that it belongs to.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dflash_backend.core.admission import RequestError, check_fits_alone, check_limits, check_prompt
from dflash_backend.core.plan import (
    EngineLimits,
    RowResult,
    ScheduledRow,
    StepOutOfMemory,
    StepPlan,
    StepResult,
    Worker,
)
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler import Scheduler
from dflash_backend.core.trace import StepTimes, StepTrace
from dflash_backend.messages import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestRejected,
    TokenDelta,
    TokenLogprobs,
)

__all__ = ["EngineCore", "RequestError"]


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that was submitted, the requests of its rows in the plan's order, and when it was planned (from `started`
    to `planned`) and submitted."""

    plan: StepPlan
    requests: list[Request]
    started: float
    planned: float
    submitted: float


class EngineCore:
    """Owns all requests from admission to their last token, and drives one worker."""

    def __init__(
        self,
        limits: EngineLimits,
        worker: Worker,
        clock: Callable[[], float] = time.monotonic,
        trace: StepTrace | None = None,
        overlap: bool = False,
    ) -> None:
        """`clock` gives seconds and never goes back; `trace` hears of requests and steps, in the same clock. `overlap`
        keeps a step in flight, on a worker that overlaps. Raises ValueError for limits that cannot work."""
        check_limits(limits)
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self._worker = worker
        self._overlap = overlap and worker.overlaps
        # Submitted and not collected, the oldest first: between two calls of `step` one at most.
        self._in_flight: deque[_StepInFlight] = deque()
        self._clock = clock
        self._trace = trace
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        # (deadline in s, arrival, id), a heap. An entry may outlive its request; the arrival number tells whether it
        # still counts.
        self._deadlines: list[tuple[float, int, str]] = []
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_accepted_tokens_per_pos = [0] * limits.num_speculative_tokens
        self._num_generation_tokens = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        # Of the step whose result the last call of `step` applied, by phase; empty when there was none.
        self.phase_seconds: dict[str, float] = {}
        # Requests that the last call of `step` gave up with an error. There is no delta for them.
        self.failed: list[RequestRejected] = []

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `RequestError`, and queues nothing, when it cannot be taken:

        INVALID_ARGUMENT for an id in use, an empty or too long prompt, too many speculative tokens, more than one
        completion, or a request that the KV pool could never hold; UNAVAILABLE when `max_queue_size` requests wait
        already.
        """
        if request.request_id in self._requests:
            raise RequestError("INVALID_ARGUMENT", f"a request with the id '{request.request_id}' is in progress")
        check_prompt(request, self.limits)
        state = Request.from_generation_request(request, self.limits, self._num_arrived, self._clock())
        check_fits_alone(state, self.limits)
        if len(self.scheduler.waiting) >= self.limits.max_queue_size:
            raise RequestError(
                "UNAVAILABLE",
                f"{len(self.scheduler.waiting)} requests wait already and max_queue_size is "
                f"{self.limits.max_queue_size}; try again later",
            )
        self._num_arrived += 1
        self._requests[state.request_id] = state
        self.scheduler.add(state)
        if self._trace is not None:
            self._trace.request_arrived(state.request_id, state.num_prompt_tokens, state.arrival_s)
        if state.deadline_s is not None:
            self._add_deadline(state, state.deadline_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests and free their blocks. No delta is sent; ids that are not in progress are ignored."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self.scheduler.remove(request)
                self._trace_end(request, "abort", self._clock())

    def stop(self, request_ids: Iterable[str]) -> list[TokenDelta]:
        """End these requests because their text reached a stop string, and free their blocks.

        Returns a last delta, without tokens, for each that was in progress; other ids are ignored.
        """
        now = self._clock()
        deltas = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                deltas.append(self._finish(request, [], "stop", now))
        return deltas

    def step(self) -> list[TokenDelta]:
        """Go on by one step and return what was yielded, at most one delta a request; [] when there was nothing to do.

        With overlap these are the deltas of the step before the one that was submitted: the first call yields none.
        """
        started = self._clock()
        self.phase_seconds, self.failed = {}, []
        deltas = self._expire(started)
        plan = self.scheduler.plan(started, in_flight=bool(self._in_flight))
        if plan is None and not self._in_flight:
            return deltas
        try:
            if plan is not None:
                self._submit(plan, started)
        except StepOutOfMemory as error:
            assert plan is not None
            deltas += self._make_room(plan, str(error))
        else:
            stays_in_flight = 1 if self._overlap and plan is not None else 0
            if len(self._in_flight) > stays_in_flight:
                deltas += self._collect()
        self._step_seconds += self._clock() - started
        return deltas

    def has_unfinished(self) -> bool:
        """Whether a request is queued or running, or a step of requests that have ended is in flight."""
        return bool(self._requests or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that are queued and do not run yet."""
        return len(self.scheduler.waiting)

    def stats(self) -> EngineStats:
        """Gauges as they are now and counters since the start."""
        scheduler = self.scheduler
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.kv.pool.usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_accepted_tokens_per_pos=list(self._num_accepted_tokens_per_pos),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
        )

    @property
    def num_deadlines(self) -> int:
        """Deadlines that are kept, some of requests that have ended: at most about twice the requests in progress."""
        return len(self._deadlines)

    def check_invariants(self) -> None:
        """Raise AssertionError when OWN, RETURN or the accounting of requests is broken. For tests: O(blocks)."""
        scheduler = self.scheduler
        queued = [*scheduler.running.values(), *scheduler.waiting.values()]
        assert {request.request_id: request for request in queued} == self._requests, "a request is in no queue"
        arrivals = [request.arrival for request in queued]
        assert arrivals == sorted(arrivals), "the queues are not in order of arrival"
        assert len(scheduler.running) <= self.limits.max_num_seqs, "more requests run than max_num_seqs"
        for request in scheduler.waiting.values():
            assert not request.block_ids, f"{request.request_id} waits and holds blocks"
            assert request.num_computed == 0, f"{request.request_id} waits and has computed positions"
        for request in scheduler.running.values():
            assert request.num_computed < request.num_tokens, f"{request.request_id} has computed its last token"
        scheduler.kv.check(scheduler.running.values())

    def _add_deadline(self, request: Request, deadline_s: float) -> None:
        """Keep a deadline; now and then drop those of requests that have ended, at O(1) for each that was added."""
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._request_of(entry) is not None]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, request.arrival, request.request_id))

    def _request_of(self, deadline: tuple[float, int, str]) -> Request | None:
        """The request in progress that a deadline belongs to, if it has not ended."""
        _, arrival, request_id = deadline
        request = self._requests.get(request_id)
        return request if request is not None and request.arrival == arrival else None

    def _expire(self, now: float) -> list[TokenDelta]:
        """End the requests whose deadline has passed, with what they have."""
        deltas = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._request_of(heapq.heappop(self._deadlines))
            if request is not None:
                deltas.append(self._finish(request, [], "abort", now))
        return deltas

    def _submit(self, plan: StepPlan, started: float) -> None:
        """Give a step to the worker. Raises `StepOutOfMemory`; the step is not in flight then."""
        planned = self._clock()
        running = self.scheduler.running
        requests = [running[row.request_id] for row in plan.rows]
        self._worker.submit(plan)
        if self._overlap:
            for row, request in zip(plan.rows, requests, strict=True):
                request.row_in_flight = row
        self._in_flight.append(_StepInFlight(plan, requests, started, planned, self._clock()))

    def _make_room(self, plan: StepPlan, message: str) -> list[TokenDelta]:
        """After a step that did not fit the device's memory: let the next one be smaller. What is in flight is applied
        first, since nobody can be preempted before."""
        if self._in_flight:
            deltas = self._collect()
        elif len(plan.rows) == 1:
            self._fail(self._requests[plan.rows[0].request_id], message)
            return []
        else:
            deltas = []
        if self.scheduler.running:
            self.scheduler.shrink(plan)
        return deltas

    def _fail(self, request: Request, message: str) -> None:
        """End a request that alone does not fit the device's memory."""
        del self._requests[request.request_id]
        self.scheduler.remove(request)
        self._trace_end(request, "error", self._clock())
        reason = (
            f"a step of this request alone does not fit the device's memory ({message}); send a shorter prompt, or "
            f"have the server's gpu_memory_utilization or max_num_batched_tokens lowered"
        )
        self.failed.append(RequestRejected(request.request_id, "INTERNAL", reason))

    def _collect(self) -> list[TokenDelta]:
        """Wait for the oldest step in flight and apply its result."""
        step = self._in_flight.popleft()
        waited = self._clock()
        result = self._worker.collect()
        executed = self._clock()
        self.phase_seconds = result.phase_seconds
        deltas = self._apply(step, result)
        self._num_steps += 1
        if self._trace is not None:
            times = StepTimes(step.started, step.planned, step.submitted, waited, executed, self._clock())
            self._trace.step(step.plan, result, times)
        return deltas

    def _apply(self, step: _StepInFlight, result: StepResult) -> list[TokenDelta]:
        """Bring the requests up to what the worker did, row by row. What a request yielded that has ended meanwhile is
        dropped, also when its id is in use again."""
        plan = step.plan
        if result.step_id != plan.step_id or len(result.rows) != len(plan.rows):
            raise RuntimeError(
                f"the worker answered step {result.step_id} with {len(result.rows)} rows; step {plan.step_id} with "
                f"{len(plan.rows)} rows was asked for"
            )
        now = self._clock()
        deltas = []
        for row, request, row_result in zip(plan.rows, step.requests, result.rows, strict=True):
            _check_row_result(row, row_result)
            if self._requests.get(row.request_id) is not request:
                continue
            delta = self._apply_row(request, row, row_result, now)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _apply_row(self, request: Request, row: ScheduledRow, result: RowResult, now: float) -> TokenDelta | None:
        if request.row_in_flight is row:
            request.row_in_flight = None  # else the step behind has a row of it too
        request.num_computed += row.num_new + result.num_accepted
        if row.num_draft:
            self._count_draft(request, row.num_draft, result.num_accepted)
        if row.sample or row.num_next_draft:
            # Not after a chunk: a resumed request's drafts are pending until its prefill has come to their anchor.
            request.pending_draft = row.num_next_draft
        token_ids: list[int] = []
        finish_reason: FinishReason | None = None
        if row.sample:
            token_ids, finish_reason = request.append(result.token_ids, self.limits.max_model_len)
            self._num_generation_tokens += len(token_ids)
        self.scheduler.kv.publish(request)
        # Accepted drafts past the request's end are dropped, and their log-probabilities with them.
        logprobs = None if result.logprobs is None else result.logprobs[: len(token_ids)]
        if finish_reason is not None:
            return self._finish(request, token_ids, finish_reason, now, logprobs)
        return TokenDelta(request.request_id, token_ids, logprobs=logprobs) if token_ids else None

    def _count_draft(self, request: Request, num_draft: int, num_accepted: int) -> None:
        request.count_draft(num_draft, num_accepted)
        self._num_drafts += 1
        self._num_draft_tokens += num_draft
        self._num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self._num_accepted_tokens_per_pos[position] += 1

    def _finish(
        self,
        request: Request,
        token_ids: list[int],
        reason: FinishReason,
        now: float,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> TokenDelta:
        del self._requests[request.request_id]
        self.scheduler.remove(request)
        self._trace_end(request, reason, now)
        return TokenDelta(request.request_id, token_ids, reason, request.stats(now), logprobs)

    def _trace_end(self, request: Request, reason: str, now: float) -> None:
        if self._trace is not None:
            self._trace.request_ended(request.request_id, reason, request.num_tokens - request.num_prompt_tokens, now)


def _check_row_result(row: ScheduledRow, result: RowResult) -> None:
    """Raise RuntimeError when a worker's answer cannot belong to the row: going on would corrupt the request."""
    expected = result.num_accepted + 1 if row.sample else 0
    if (
        result.request_id != row.request_id
        or not 0 <= result.num_accepted <= row.num_draft
        or len(result.token_ids) != expected
        or (result.logprobs is not None and len(result.logprobs) != expected)
    ):
        raise RuntimeError(f"the worker answered {result} to {row}, which does not fit it")

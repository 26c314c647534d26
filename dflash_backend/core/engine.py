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

import msgspec

from dflash_backend.core.admission import RequestError, check_config, check_fits_alone, check_prompt, check_queue
from dflash_backend.core.plan import (
    RequestResult,
    ScheduledRequest,
    StepFailed,
    StepOutOfMemory,
    StepPlan,
    StepResult,
    Worker,
)
from dflash_backend.core.request import Request
from dflash_backend.core.row_shape import prefills_next
from dflash_backend.core.scheduler import Scheduler
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.trace import StepTimes, StepTrace
from dflash_backend.messages import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestRejected,
    TokenDelta,
    TokenLogprobs,
)
from dflash_backend.spec_stats import SpecDecodingStats

__all__ = ["EngineCore", "RequestError"]

# A request ends when it was in this many failing steps of which no request failed alone.
MAX_UNEXPLAINED_FAILURES = 3
# A request that was in a failing step runs this many decode rows alone before it runs beside others again.
ROWS_TO_CLEAR = 2


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
        config: SchedulerConfig,
        worker: Worker,
        clock: Callable[[], float] = time.monotonic,
        trace: StepTrace | None = None,
        overlap: bool = False,
    ) -> None:
        """`clock` gives seconds and never goes back; `trace` hears of requests and steps, in the same clock. `overlap`
        keeps a step in flight, on a worker that overlaps. Raises ValueError for a config that cannot work."""
        check_config(config)
        self.config = config
        self.scheduler = Scheduler(config)
        self._worker = worker
        self._overlap = overlap and worker.overlaps
        # Submitted and not collected, the oldest first: between two calls of `step` one at most.
        self._in_flight: deque[_StepInFlight] = deque()
        # A step that the worker could not run, and why; nothing is planned before `_isolate` has looked into it.
        self._failed_step: tuple[StepPlan, str] | None = None
        self._clock = clock
        # When the last step that was collected had run.
        self._last_executed = 0.0
        self._trace = trace
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        # (deadline in s, arrival, id), a heap. An entry may outlive its request; the arrival number tells whether it
        # still counts.
        self._deadlines: list[tuple[float, int, str]] = []
        self._spec_stats = SpecDecodingStats.zeros(config.num_speculative_tokens)
        # As the last call of `stats` gave them. A stop string takes counts back, and a counter must not fall.
        self._reported_spec_stats = SpecDecodingStats.zeros(config.num_speculative_tokens)
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
        completion, or a request that the KV pool could never hold; UNAVAILABLE when the queue has no place for it.
        """
        if request.request_id in self._requests:
            raise RequestError("INVALID_ARGUMENT", f"a request with the id '{request.request_id}' is in progress")
        check_prompt(request, self.config)
        state = Request.from_generation_request(request, self.config, self._num_arrived, self._clock())
        check_fits_alone(state, self.config)
        check_queue(state, self.scheduler.queue, len(self.scheduler.running), self.config)
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

    def stop(self, request_ids: Iterable[str], num_tokens: Iterable[int]) -> list[TokenDelta]:
        """End these requests because their text reached a stop string, and free their blocks.

        `num_tokens`: how many of each request's output tokens belong to its answer. Those past them count for nothing.
        Returns a last delta, without tokens, for each that was in progress; other ids are ignored.
        """
        now = self._clock()
        deltas = []
        for request_id, num_kept in zip(request_ids, num_tokens, strict=True):
            request = self._requests.get(request_id)
            if request is not None:
                for num_draft, num_delivered, kept in request.trim_yields(num_kept):
                    request.spec_stats.take_back(num_draft, num_delivered, kept)
                    self._spec_stats.take_back(num_draft, num_delivered, kept)
                delta = self._finish(request, [], "stop", now)
                assert delta.stats is not None
                stats = msgspec.structs.replace(delta.stats, num_output_tokens=num_kept)
                deltas.append(msgspec.structs.replace(delta, stats=stats))
        return deltas

    def step(self) -> list[TokenDelta]:
        """Go on by one step and return what was yielded, at most one delta a request; [] when there was nothing to do.

        With overlap these are the deltas of the step before the one that was submitted: the first call yields none.
        """
        started = self._clock()
        self.phase_seconds, self.failed = {}, []
        deltas = self._expire(started)
        if self._failed_step is not None:
            deltas += self._isolate(*self._failed_step)
            self._step_seconds += self._clock() - started
            return deltas
        plan = self.scheduler.plan(started, in_flight=bool(self._in_flight))
        if plan is None and not self._in_flight:
            return deltas
        try:
            if plan is not None:
                self._submit(plan, started)
        except StepOutOfMemory as error:
            assert plan is not None
            deltas += self._make_room(plan, str(error))
        except StepFailed as error:
            assert plan is not None
            # What is in flight is applied now; the failed step is looked into by the next call.
            self._failed_step = plan, str(error)
            if self._in_flight:
                deltas += self._collect()
        else:
            stays_in_flight = 1 if self._overlap and plan is not None else 0
            if len(self._in_flight) > stays_in_flight:
                deltas += self._collect()
        self._step_seconds += self._clock() - started
        return deltas

    def has_unfinished(self) -> bool:
        """Whether a request is queued or running, or a step of requests that have ended is in flight."""
        return bool(self._requests or self._in_flight or self._failed_step)

    @property
    def num_waiting(self) -> int:
        """Requests that are queued and do not run yet."""
        return len(self.scheduler.waiting)

    @property
    def num_free_rows(self) -> int:
        """Requests that may run beside those that do."""
        return self.config.max_num_seqs - len(self.scheduler.running)

    def crowded_tenants(self) -> dict[str, int]:
        """How many requests wait of each tenant that has half of a queue or more: a few tenants at most."""
        return dict(self.scheduler.queue.crowded)

    def stats(self) -> EngineStats:
        """Gauges as they are now and counters since the start."""
        scheduler = self.scheduler
        self._reported_spec_stats = self._spec_stats.maximum(self._reported_spec_stats)
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.kv.pool.usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            spec_decoding=self._reported_spec_stats,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when OWN, RETURN or the accounting of requests is broken. For tests: O(blocks)."""
        scheduler = self.scheduler
        assert scheduler.running | scheduler.waiting == self._requests, "a request is in no queue"
        assert len(scheduler.running) + len(scheduler.waiting) == len(self._requests), "a request is in two queues"
        scheduler.queue.check()
        assert len(scheduler.running) <= self.config.max_num_seqs, "more requests run than max_num_seqs"
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
            self._fail(self._requests[plan.rows[0].request_id], _out_of_memory(message))
            return []
        else:
            deltas = []
        if self.scheduler.running:
            self.scheduler.shrink(plan)
        return deltas

    def _isolate(self, plan: StepPlan, message: str) -> list[TokenDelta]:
        """After a step that failed, with nothing in flight: end the requests that fail alone too; the others go on.

        The worker starts anew, without any request, and each request of the plan runs a few steps by itself. When all
        of them pass, the cause lies between them or has passed; a request ends with the third such step. All who are
        left compute their positions anew, as after a preemption, for the most part from the prefix cache.
        """
        self._failed_step = None
        deltas: list[TokenDelta] = []
        queued = self.scheduler.take_all()
        self._worker.reset()
        ids = {row.request_id for row in plan.rows}
        suspects = [request for request in queued if request.request_id in ids]
        for request in suspects:
            deltas += self._try_alone(request)
        if not self.failed:
            for request in suspects:
                request.num_unexplained_failures += 1
                if request.num_unexplained_failures == MAX_UNEXPLAINED_FAILURES and self._is_in_progress(request):
                    self._fail(request, _failed(message), queued=False)
        for request in queued:
            if self._is_in_progress(request):
                self.scheduler.add(request)
        return deltas

    def _is_in_progress(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _try_alone(self, request: Request) -> list[TokenDelta]:
        """Run a request that no queue holds by itself until it has decoded, with a step in flight where steps overlap;
        it is in no queue afterwards. Ends it if that fails. Returns one delta at most."""
        self.scheduler.add(request)
        deltas: list[TokenDelta] = []
        num_decodes = 0
        try:
            while num_decodes < ROWS_TO_CLEAR and self._is_in_progress(request):
                now = self._clock()
                plan = self.scheduler.plan(now, in_flight=bool(self._in_flight))
                if plan is not None:
                    num_decodes += not prefills_next(request)
                    self._submit(plan, now)
                if len(self._in_flight) > (1 if self._overlap and plan is not None else 0):
                    deltas += self._collect()
        except (StepFailed, StepOutOfMemory) as error:
            self._fail(request, _failed(str(error)))
        while self._in_flight:
            deltas += self._collect()
        self.scheduler.take_all()
        self._worker.reset()
        return _joined(deltas)

    def _fail(self, request: Request, reason: str, queued: bool = True) -> None:
        """End a request with an error. `queued`: whether the scheduler has it."""
        del self._requests[request.request_id]
        if queued:
            self.scheduler.remove(request)
        self._trace_end(request, "error", self._clock())
        self.failed.append(RequestRejected(request.request_id, "INTERNAL", reason))

    def _collect(self) -> list[TokenDelta]:
        """Wait for the oldest step in flight and apply its result."""
        step = self._in_flight.popleft()
        waited = self._clock()
        result = self._worker.collect()
        executed = self._clock()
        # Behind a step in flight it began when that one had run.
        self.scheduler.observe(step.plan, executed - max(step.planned, self._last_executed))
        self._last_executed = executed
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
            if not self._is_in_progress(request):
                continue
            if not _fits(row, row_result):
                self._fail(request, f"the worker answered {row_result} to {row}; this is a defect of the server")
                continue
            delta = self._apply_row(request, row, row_result, now)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _apply_row(
        self, request: Request, row: ScheduledRequest, result: RequestResult, now: float
    ) -> TokenDelta | None:
        if request.row_in_flight is row:
            request.row_in_flight = None  # else the step behind has a row of it too
        request.num_computed += row.num_new + result.num_accepted
        if row.sample or row.num_next_draft:
            # Not after a chunk: a resumed request's drafts are pending until its prefill has come to their anchor.
            request.pending_draft = row.num_next_draft
        token_ids: list[int] = []
        finish_reason: FinishReason | None = None
        if row.sample:
            token_ids, finish_reason = request.append(result.token_ids, self.config.max_model_len)
            self._num_generation_tokens += len(token_ids)
            request.note_yield(row.num_draft, len(token_ids))
            if row.num_draft:
                self._spec_stats.observe_draft(row.num_draft, len(token_ids))
        self.scheduler.kv.publish(request)
        # Accepted drafts past the request's end are dropped, and their log-probabilities with them.
        logprobs = None if result.logprobs is None else result.logprobs[: len(token_ids)]
        if finish_reason is not None:
            return self._finish(request, token_ids, finish_reason, now, logprobs)
        return TokenDelta(request.request_id, token_ids, logprobs=logprobs) if token_ids else None

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


def _fits(row: ScheduledRequest, result: RequestResult) -> bool:
    """Whether a worker's answer can belong to the row. Going on with another would corrupt the request."""
    expected = result.num_accepted + 1 if row.sample else 0
    return (
        result.request_id == row.request_id
        and 0 <= result.num_accepted <= row.num_draft
        and len(result.token_ids) == expected
        and (result.logprobs is None or len(result.logprobs) == expected)
    )


def _joined(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """One delta in place of several of one request, in order; [] for none."""
    if len(deltas) < 2:
        return deltas
    last = deltas[-1]
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return [TokenDelta(last.request_id, token_ids, last.finish_reason, last.stats, logprobs)]


def _out_of_memory(message: str) -> str:
    return (
        f"a step of this request alone does not fit the device's memory ({message}); send a shorter prompt, or "
        "have the server's gpu_memory_utilization or max_num_batched_tokens lowered"
    )


def _failed(message: str) -> str:
    return f"a step with this request failed ({message}); the server's log has the whole error"

"""The step loop: requests in, `EngineCoreOutputs` out. Plan, run on the worker, apply; no threads, no queues.

A step's tokens are there before its drafts. `step` returns them, and `collect_drafts`, called once they are sent, takes
in the drafts; a worker on a CPU drafts only then.

`EngineCore` runs in the engine process behind ZeroMQ, and in-process behind `dflash_backend.LLM`.

With a worker that overlaps, one step stays in flight between two calls of `step` (`docs/gpu.md`): the next step is
planned and submitted after it before its result is awaited. A request may end while it has a row in flight, and its id
may be used again, so a step in flight is kept with the request objects of its rows.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from dflash_backend.core.admission import RequestError, check_config, check_fits_alone, check_prompt, check_queue
from dflash_backend.core.drafter_swap import DrafterSwap, SwapEndsEngine
from dflash_backend.core.grammar_queue import GrammarCompiler, GrammarQueue
from dflash_backend.core.moves import KVMover
from dflash_backend.core.plan import (
    ModelRunnerOutput,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
    StepFailed,
    StepOutOfMemory,
    Worker,
)
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler import Scheduler
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.spec_counts import SpecDecodingCounts
from dflash_backend.core.trace import StepTimes, StepTrace
from dflash_backend.messages import (
    EngineCoreOutputs,
    EngineStats,
    ErrorStatus,
    FinishReason,
    GenerationRequest,
    KVTransferParams,
    RequestFailed,
    TokenDelta,
    TokenLogprobs,
    TransferStats,
)
from dflash_backend.spec_stats import Acceptance

__all__ = ["EngineCore", "RequestError"]

# A request ends with its third failed step that no request of it repeats when run alone.
MAX_UNEXPLAINED_FAILURES = 3
# Decode rows that a request of a failed step runs alone before it runs beside others again.
ROWS_TO_CLEAR = 2
# How often `EngineCoreOutputs` carry stats: a metrics page is read every few seconds.
STATS_INTERVAL_S = 0.25
_NO_STOPS: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class _StepInFlight:
    """A submitted step, the requests of its rows in the plan's order, and then its result."""

    plan: SchedulerOutput
    requests: list[Request]
    times: StepTimes
    result: ModelRunnerOutput | None = None


class EngineCore:
    """Owns all requests from admission to their last token, and drives one worker."""

    def __init__(
        self,
        config: SchedulerConfig,
        worker: Worker,
        clock: Callable[[], float] = time.monotonic,
        trace: StepTrace | None = None,
        overlap: bool = False,
        grammars: GrammarCompiler | None = None,
        mover: KVMover | None = None,
    ) -> None:
        """`clock` gives seconds and never goes back; `trace` records requests and steps on the same clock. `overlap`
        keeps a step in flight, on a worker that overlaps. `grammars`: of structured output. `mover`: of the KV tiers
        that `config` names. Raises `ConfigError` for a config that cannot work."""
        check_config(config)
        self.config = config
        self.scheduler = Scheduler(config, mover)
        self._worker = worker
        self._overlap = overlap and worker.overlaps
        # Submitted and not collected, the oldest first: at most one between two calls of `step`.
        self._in_flight: deque[_StepInFlight] = deque()
        # The step that was collected last, until its drafts are.
        self._drafting: _StepInFlight | None = None
        # What the next `step` returns beside its own.
        self._outputs = EngineCoreOutputs()
        # A step that the worker could not run, and why; nothing is planned before `_isolate` has looked into it.
        self._failed_step: tuple[SchedulerOutput, str] | None = None
        # The drafter that took the place of another one last, and what is to be done at the next step: to put one in,
        # or to take it out again.
        self._swap: DrafterSwap | None = None
        self._acceptance = Acceptance()  # of the drafter that drafts
        self._due_swap: DrafterSwap | None = None
        self.beat: Callable[[], None] = lambda: None
        """Called between the steps of a call that runs many of them, after a failed one: the engine goes on."""
        self._clock = clock
        self._last_finished = 0.0  # when the drafts of the last step had come
        self._trace = trace
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._deadlines = Deadlines(self._requests)
        self._grammars = GrammarQueue(grammars, self.scheduler.queue)
        self._spec_counts = SpecDecodingCounts(config.num_speculative_tokens)
        self._num_generation_tokens = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._stats_sent_at = -math.inf

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request. Raises `RequestError`, and queues nothing, when it cannot be taken:

        INVALID_ARGUMENT for an id in use, an empty or too long prompt, too many speculative tokens, more than one
        completion, or a request that the KV pool could never hold; UNAVAILABLE when the queue is full.
        """
        if request.request_id in self._requests:
            raise RequestError("INVALID_ARGUMENT", f"a request with the id '{request.request_id}' is in progress")
        check_prompt(request, self.config)
        state = Request.from_generation_request(request, self.config, self._num_arrived, self._clock())
        check_fits_alone(state, self.config)
        check_queue(state, self.scheduler.queue, len(self.scheduler.running), self.config)
        must_compile = self._grammars.add(state)
        self._num_arrived += 1
        self._requests[state.request_id] = state
        if not must_compile:
            self.scheduler.queue.add(state)
        if self._trace is not None:
            self._trace.request_arrived(state.request_id, state.num_prompt_tokens, state.arrival_s)
        if state.deadline_s is not None:
            self._deadlines.add(state, state.deadline_s)

    def abort(self, request_ids: Iterable[str], num_output_tokens: Mapping[str, int] = _NO_STOPS) -> None:
        """End these requests and free their blocks. No delta follows; ids that are not in progress are ignored.

        num_output_tokens: of requests whose text reached a stop string, how many of their output tokens belong to the
        answer. Tokens past them leave the counts of speculation, also when the request has ended by itself meanwhile.
        """
        now = self._clock()
        for request_id in request_ids:
            request, num_kept = self._requests.get(request_id), num_output_tokens.get(request_id)
            if num_kept is not None and (request is None or request.yields is not None):
                self._spec_counts.take_back(request_id, None if request is None else request.yields, num_kept)
            if request is not None:
                self._remove(request, "abort" if num_kept is None else "stop", now)

    def step(self) -> EngineCoreOutputs:
        """Advance by one step and return what came of it, with at most one delta a request.

        With overlap the deltas are those of the step before the one submitted now; the first call yields none.
        """
        self.collect_drafts()
        started = self._clock()
        outputs, self._outputs = self._outputs, EngineCoreOutputs()
        if self._deadlines.heap and self._deadlines.heap[0][0] <= started:
            self._expire(started, outputs)
        if self._grammars.waiting:
            self._queue_compiled(outputs)
        if self._failed_step is not None:
            failed_plan, reason = self._failed_step
            self._isolate(failed_plan, reason, outputs)
        elif self._due_swap is not None:
            self._exchange_drafters(self._due_swap, outputs)
        else:
            plan = self.scheduler.plan(started, in_flight=bool(self._in_flight))
            submitted = plan is not None and self._submit(plan, started, outputs)
            self._collect_down_to(1 if self._overlap and submitted else 0, outputs)
        ended = self._clock()
        self._step_seconds += ended - started
        if (events := self.scheduler.kv.events) is not None:
            outputs = msgspec.structs.replace(outputs, kv_events=events.take())
        if self.has_unfinished() and ended - self._stats_sent_at < STATS_INTERVAL_S:
            return outputs
        self._stats_sent_at = ended
        return msgspec.structs.replace(outputs, stats=self.stats())

    def collect_drafts(self) -> None:
        """Take in the drafts of the step whose tokens `step` returned last, where that has not been done. To be called
        once those are sent, which then does not wait for drafting; `step` calls it too."""
        step, self._drafting = self._drafting, None
        if step is None:
            return
        begun = self._clock()
        rows, result = list(zip(step.plan.rows, step.requests, strict=True)), step.result
        assert result is not None
        try:
            drafts = self._worker.collect_drafts(
                [row.request_id for row, request in rows if self._requests.get(row.request_id) is not request]
            )
        except StepFailed as error:
            # Blocks of the step are published, and what drafting was to write of them is missing (TOGETHER).
            self.scheduler.kv.reset_prefix_cache()
            self._drop_in_flight()
            self._failed_step = step.plan, str(error)
            return
        times = step.times
        times.finished = finished = self._clock()
        for request_id, (reason, status) in drafts.errors.items():
            request = next(request for row, request in rows if row.request_id == request_id)
            if self._is_in_progress(request):
                self._fail(request, reason, self._outputs, status=status)
        for (row, request), confidences in zip(rows, drafts.confidences, strict=False):
            if row.num_next_draft:
                request.speculation.confidences = confidences
        for row, request in rows if drafts.num_kept else ():
            if row.request_id in drafts.num_kept:
                request.num_pending_drafts = drafts.num_kept[row.request_id]
        for row, request in rows if drafts.num_looked_up else ():
            if row.num_next_draft:
                # A row that has ended looked nothing up, though the plan had drafts for it.
                request.looks_up = drafts.num_looked_up.get(row.request_id, 0) > 0
                if request.looks_up:
                    request.speculation.confidences = ()  # they are lookup's, and tell nothing of the drafter's
        self._outputs.phase_seconds.update(drafts.phase_seconds)
        if self._overlap:
            # Behind another step in flight, this one began when that one had run.
            seconds = finished - max(times.planned, self._last_finished)
        else:
            seconds = times.executed - times.planned + finished - begun
        self._last_finished = finished
        self._step_seconds += finished - begun
        self.scheduler.observe(step.plan, result, seconds, drafts.phase_seconds.get("draft", 0.0))
        if drafts.next_error is not None:
            plan = self._in_flight[0].plan
            self._drop_in_flight()
            self._take_error(drafts.next_error, plan, self._outputs)
        if self._trace is not None:
            times.drafted_from = None if self._overlap else begun
            self._trace.step(step.plan, result, drafts.phase_seconds, times)

    def check_swap(self) -> None:
        """Raise `RequestError` (UNAVAILABLE) while a drafter is still compared with the one before it."""
        if self._due_swap is not None or (self._swap is not None and self._swap.exchange is not None):
            raise RequestError("UNAVAILABLE", "the last drafter that was swapped in is still compared; try again later")

    def swap_drafter(self, swap: DrafterSwap) -> None:
        """Draft with another drafter from the next `step` on, which says so. Raises as `check_swap`."""
        self.check_swap()
        self._due_swap = swap

    def idle_outputs(self) -> EngineCoreOutputs:
        """What is left to say once nothing is unfinished: the counts as they are now."""
        outputs, self._outputs = self._outputs, EngineCoreOutputs()
        return msgspec.structs.replace(outputs, stats=self.stats())

    def has_unfinished(self) -> bool:
        """Whether a request is queued or running, or a step of ended requests is in flight."""
        more = self._failed_step or self._due_swap or self._outputs.failed
        return bool(self._requests or self._in_flight or more)

    @property
    def is_moving(self) -> bool:
        """Whether KV goes to tiers, or is to."""
        tiers = self.scheduler.kv.tiers
        return tiers is not None and not tiers.is_idle

    @property
    def is_keeping(self) -> bool:
        """Whether KV is kept for other servers."""
        tiers = self.scheduler.kv.tiers
        return tiers is not None and tiers.is_keeping

    def advance_moves(self) -> EngineCoreOutputs:
        """Go on with what is to go to tiers while nothing is unfinished, and say what came of it: gauges and counters
        now and then, and once nothing is left to do."""
        assert self.scheduler.kv.tiers is not None
        self.scheduler.kv.tiers.advance()
        outputs = EngineCoreOutputs(kv_events=[] if (events := self.scheduler.kv.events) is None else events.take())
        now = self._clock()
        if (self.is_moving or self.is_keeping) and now - self._stats_sent_at < STATS_INTERVAL_S:
            return outputs
        self._stats_sent_at = now
        return msgspec.structs.replace(outputs, stats=self.stats())

    @property
    def num_waiting(self) -> int:
        """Queued requests that do not run yet."""
        return len(self.scheduler.waiting) + len(self.scheduler.loading) + len(self._grammars.waiting)

    @property
    def num_free_rows(self) -> int:
        """How many more requests may run at the same time."""
        return self.config.max_num_seqs - len(self.scheduler.running)

    def crowded_tenants(self) -> dict[str, int]:
        """The number of waiting requests of each tenant that fills a sixteenth of a queue or more."""
        return dict(self.scheduler.queue.crowded)

    def stats(self) -> EngineStats:
        """Gauges as they are now, and counters since the start."""
        scheduler = self.scheduler
        policy = scheduler.speculation
        spec_decoding, speculation = self._spec_counts.report(None if policy is None else policy.stats)
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=self.num_waiting,
            speculation=speculation,
            kv_cache_usage=scheduler.kv.usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            spec_decoding=spec_decoding,
            lookup=self._spec_counts.looked_up.copy(),
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            grammars=self._grammars.stats(),
            tiers={} if scheduler.kv.tiers is None else scheduler.kv.tiers.report(),
            kept=TransferStats() if scheduler.kv.tiers is None else scheduler.kv.tiers.kept_stats,
        )

    def _expire(self, now: float, outputs: EngineCoreOutputs) -> None:
        """End the requests whose deadline has passed, with what they have."""
        for request in self._deadlines.pop_expired(now):
            self._remove(request, "abort", now)
            outputs.deltas.append(TokenDelta(request.request_id, [], "abort", request.stats(now)))

    def _queue_compiled(self, outputs: EngineCoreOutputs) -> None:
        """Queue the requests whose grammars are compiled; refuse those whose grammars cannot be followed."""
        for request, error in self._grammars.pop_done(idle=len(self._requests) == len(self._grammars.waiting)):
            if error is None:
                self.scheduler.queue.add(request)
            else:
                self._remove(request, "error", self._clock(), queued=False)
                outputs.failed.append(RequestFailed(request.request_id, error.status, error.message))

    def _take_error(
        self, error: StepFailed | StepOutOfMemory, plan: SchedulerOutput, outputs: EngineCoreOutputs
    ) -> None:
        """After a step that failed, its requests run alone. After one for which memory lacked, the next one is smaller,
        or its only request fails; nothing may be in flight then."""
        if isinstance(error, StepFailed):
            self._failed_step = plan, str(error)
        elif len(plan.rows) > 1:
            if self.scheduler.running:
                self.scheduler.shrink(plan)
        elif (request := self._requests.get(plan.rows[0].request_id)) is not None:
            self._fail(request, out_of_memory_message(str(error)), outputs)

    def _drop_in_flight(self) -> None:
        """Drop the steps in flight: what they yield would follow from a step that failed."""
        for step in self._in_flight:
            for request in step.requests:
                request.row_in_flight = None
        self._in_flight.clear()

    def _exchange_drafters(self, swap: DrafterSwap, outputs: EngineCoreOutputs) -> None:
        """Put a drafter in the worker, or the one before back, once nothing is in flight."""
        self._collect_down_to(0, outputs)
        self.collect_drafts()
        if self._failed_step is not None:
            return  # the next step does it, or has taken the drafter out
        if swap is self._swap:
            self._roll_back_drafter(swap, swap.comparison(), outputs)
            return
        self._due_swap = None
        assert swap.exchange is not None
        try:
            drafting = swap.exchange()
        except SwapEndsEngine:
            raise
        except Exception as error:  # noqa: BLE001 - the drafter before goes on, whatever is wrong with the new one
            outputs.drafter_swaps.append(swap.says("refused", f"it cannot take the other's place: {error}"))
            return
        self.scheduler.begin_drafter()
        swap.before, self._acceptance, self._swap = self._acceptance, swap.now, swap
        outputs.drafter_swaps.append(swap.says("swapped", f"{swap.wanted.draft_model} drafts now", drafting))
        if not swap.wanted.window:
            swap.exchange = None

    def _roll_back_drafter(self, swap: DrafterSwap, reason: str, outputs: EngineCoreOutputs) -> None:
        """Put the drafter before this one back, with nothing in flight and nothing that waits for drafts."""
        assert swap.exchange is not None
        drafting = swap.exchange()
        swap.exchange = self._due_swap = None
        self.scheduler.begin_drafter()
        self._acceptance = swap.before
        name = swap.wanted.draft_model
        outputs.drafter_swaps.append(swap.says("reverted", f"the drafter before {name} is back: {reason}", drafting))

    def _compare_drafters(self, swap: DrafterSwap, outputs: EngineCoreOutputs) -> None:
        """Keep a drafter that was looked at for long enough, or have it taken out."""
        if swap.loses():
            self._due_swap = swap
        else:
            outputs.drafter_swaps.append(swap.says("kept", f"{swap.wanted.draft_model} stays: {swap.comparison()}"))
            swap.exchange = None

    def _submit(self, plan: SchedulerOutput, started: float, outputs: EngineCoreOutputs) -> bool:
        """Put a step in flight; False when it could not run, and then the next one is smaller or isolates the requests
        of this one."""
        planned = self._clock()
        running = self.scheduler.running
        requests = [running[row.request_id] for row in plan.rows]
        try:
            self._worker.submit(plan)
        except StepOutOfMemory as error:
            if self._in_flight:
                self._collect_down_to(0, outputs)  # no request can be preempted while a step is in flight
                if self.scheduler.running:
                    self.scheduler.shrink(plan)
            else:
                self._take_error(error, plan, outputs)
            return False
        except StepFailed as error:
            self._take_error(error, plan, outputs)
            return False
        if self._overlap:
            for row, request in zip(plan.rows, requests, strict=True):
                request.row_in_flight = row
        self._in_flight.append(_StepInFlight(plan, requests, StepTimes(started, planned, self._clock())))
        return True

    def _isolate(self, plan: SchedulerOutput, message: str, outputs: EngineCoreOutputs) -> None:
        """After a failed step, with nothing in flight: end the requests that fail alone too; the others go on.

        The worker starts again, without any request, and each request of the plan runs a few steps alone. When all of
        them pass, their combination was the cause, or the cause has passed; a request ends with its third such step.
        The others compute their positions again, as after a preemption, for the most part from the prefix cache.
        """
        self._failed_step = None
        queued = self.scheduler.take_all()
        self._worker.reset()
        if self._swap is not None and self._swap.exchange is not None:
            self._roll_back_drafter(self._swap, f"a step failed ({message})", outputs)
        ids = {row.request_id for row in plan.rows}
        suspects = [request for request in queued if request.request_id in ids]
        failed_before = len(outputs.failed)  # of other causes
        for request in suspects:
            self._run_alone(request, outputs)
        if len(outputs.failed) == failed_before:
            for request in suspects:
                request.num_unexplained_failures += 1
                if request.num_unexplained_failures == MAX_UNEXPLAINED_FAILURES and self._is_in_progress(request):
                    self._fail(request, failure_message(message), outputs, queued=False)
        for request in queued:
            if self._is_in_progress(request):
                self.scheduler.queue.add(request)

    def _run_alone(self, request: Request, outputs: EngineCoreOutputs) -> None:
        """Run a request that no queue holds until it has decoded, overlapping as usual; fail it if a step fails. No
        queue holds it afterwards."""
        self.scheduler.queue.add(request)
        alone = EngineCoreOutputs(phase_seconds=outputs.phase_seconds, failed=outputs.failed)
        num_decodes = 0
        while num_decodes < ROWS_TO_CLEAR and self._is_in_progress(request):
            self.beat()
            self.collect_drafts()
            if self._failed_step is not None:
                self._fail(request, failure_message(self._failed_step[1]), alone)
                break
            now = self._clock()
            plan = self.scheduler.plan(now, in_flight=bool(self._in_flight))
            decodes = not request.in_prefill
            submitted = plan is not None and self._submit(plan, now, alone)
            num_decodes += submitted and decodes
            self._collect_down_to(1 if self._overlap and submitted else 0, alone)
        self._collect_down_to(0, alone)
        self.collect_drafts()
        self._failed_step = None
        self.scheduler.take_all()
        self._worker.reset()
        if alone.deltas:
            outputs.deltas.append(TokenDelta.joined(alone.deltas))

    def _is_in_progress(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _collect_down_to(self, num_left: int, outputs: EngineCoreOutputs) -> None:
        """Wait for the oldest steps in flight and apply their results, until `num_left` are in flight."""
        while len(self._in_flight) > num_left:
            self.collect_drafts()
            if not self._in_flight:
                return  # a step that waited for those drafts did not run
            step = self._in_flight[0]
            step.times.waited = self._clock()
            try:
                step.result = result = self._worker.collect_results()
            except StepFailed as error:
                self._drop_in_flight()
                self._failed_step = step.plan, str(error)
                return
            self._in_flight.popleft()
            step.times.executed = now = self._clock()
            plan = step.plan
            if result.step_id != plan.step_id or len(result.rows) != len(plan.rows):
                raise RuntimeError(
                    f"the worker answered step {result.step_id} with {len(result.rows)} rows; step {plan.step_id} with "
                    f"{len(plan.rows)} rows was asked for"
                )
            for row, request, row_result in zip(plan.rows, step.requests, result.rows, strict=True):
                # The result of a request that has ended meanwhile is dropped, also when its id is in use again.
                if self._requests.get(request.request_id) is request:
                    self._apply(request, row, row_result, now, outputs)
            self._num_steps += 1
            if (swap := self._swap) is not None and self._due_swap is None:
                policy = self.scheduler.speculation
                if swap.is_due(policy is None or policy.pays):
                    self._compare_drafters(swap, outputs)
            if result.mask_seconds:
                self._grammars.observe_masks(result.mask_seconds)
            step.times.applied = self._clock()
            self._drafting = step

    def _apply(
        self, request: Request, row: ScheduledRequest, result: RequestResult, now: float, outputs: EngineCoreOutputs
    ) -> None:
        """Bring a request up to what the worker did in its row."""
        if not result.fits(row):
            self._fail(request, f"the worker answered {result} to {row}; this is a defect of the server", outputs)
            return
        if result.error is not None:
            self._fail(request, result.error, outputs, status=result.error_status)
            return
        if request.row_in_flight is row:
            request.row_in_flight = None  # else the step after has a row of it too
        request.num_computed += row.num_new + result.num_accepted
        if row.sample or row.num_next_draft:
            # Not after a chunk: a resumed request's drafts are pending until its prefill has come to their anchor.
            request.num_pending_drafts = row.num_next_draft
        token_ids: list[int] = []
        finish_reason: FinishReason | None = None
        if row.sample:
            token_ids, finish_reason = request.append(result.token_ids, self.config.max_model_len)
            self._num_generation_tokens += len(token_ids)
            if result.num_verified:
                request.spec_stats.observe_draft(result.num_verified, len(token_ids))
                self._spec_counts.delivered.observe_draft(result.num_verified, len(token_ids))
                if request.looks_up:
                    self._spec_counts.looked_up.observe_draft(result.num_verified, len(token_ids))
                elif request.drafter_epoch == self.scheduler.kv.drafter_epoch:
                    num_output = len(request.token_ids) - request.num_prompt_tokens - len(token_ids)
                    self._acceptance.note(num_output, result.num_verified, len(token_ids) - 1)
            if request.yields is not None:
                request.yields.note(result.num_verified, len(token_ids))
        if (speculation := self.scheduler.speculation) is not None:
            speculation.observe_row(request.speculation, row, result)
        self.scheduler.kv.publish(request)
        # Accepted drafts past the request's end are dropped, and their log-probabilities with them.
        logprobs = None if result.logprobs is None else result.logprobs[: len(token_ids)]
        prompt_logprobs: list[TokenLogprobs] = []
        if result.prompt_logprobs:
            prompt_logprobs = request.take_prompt_logprobs(row.num_computed, result.prompt_logprobs)
        kept: KVTransferParams | None = None
        if finish_reason is not None:
            if request.sampling.kv_transfer_params is not None and (tiers := self.scheduler.kv.tiers) is not None:
                kept = tiers.keep(request)
            self._remove(request, finish_reason, now)
        elif not token_ids and not prompt_logprobs:
            return
        is_first = 0 < len(token_ids) == len(request.token_ids) - request.num_prompt_tokens
        has_stats = is_first or finish_reason is not None or request.yields is not None
        stats = request.stats(now) if has_stats else None
        delta = TokenDelta(
            request.request_id, token_ids, finish_reason, stats, logprobs, prompt_logprobs, result.num_verified, kept
        )
        outputs.deltas.append(delta)

    def _fail(
        self,
        request: Request,
        reason: str,
        outputs: EngineCoreOutputs,
        queued: bool = True,
        status: ErrorStatus = "INTERNAL",
    ) -> None:
        """End a request with an error. `queued`: whether the scheduler has it."""
        self._remove(request, "error", self._clock(), queued)
        outputs.failed.append(RequestFailed(request.request_id, status, reason))

    def _remove(self, request: Request, reason: str, now: float, queued: bool = True) -> None:
        del self._requests[request.request_id]
        if request.yields is not None:
            self._spec_counts.remember(request.request_id, request.yields)
        if not self._grammars.remove(request) and queued:
            self.scheduler.remove(request)
        if self._trace is not None:
            self._trace.request_ended(request.request_id, reason, request.num_output_tokens, now)


class Deadlines:
    """A heap of deadlines. An entry may outlive its request: the arrival number tells whether it still counts."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        """`requests`: those in progress, by id; the owner keeps it up to date."""
        self._requests = requests
        self.heap: list[tuple[float, int, str]] = []  # deadline in seconds, arrival, id

    def add(self, request: Request, deadline_s: float) -> None:
        """Keep a deadline. Now and then this drops those of ended requests, at O(1) for each that was added."""
        if len(self.heap) > 2 * len(self._requests) + 64:
            self.heap = [entry for entry in self.heap if self._request_of(entry) is not None]
            heapq.heapify(self.heap)
        heapq.heappush(self.heap, (deadline_s, request.arrival, request.request_id))

    def pop_expired(self, now: float) -> Iterator[Request]:
        """The requests in progress whose deadline has passed, each once."""
        while self.heap and self.heap[0][0] <= now:
            request = self._request_of(heapq.heappop(self.heap))
            if request is not None:
                yield request

    def _request_of(self, entry: tuple[float, int, str]) -> Request | None:
        _, arrival, request_id = entry
        request = self._requests.get(request_id)
        return request if request is not None and request.arrival == arrival else None


def out_of_memory_message(message: str) -> str:
    """Of a request that does not fit the device's memory even alone."""
    return (
        f"a step of this request alone does not fit the device's memory ({message}); send a shorter prompt, or "
        "have the server's gpu_memory_utilization or max_num_batched_tokens lowered"
    )


def failure_message(message: str) -> str:
    """Of a request that fails alone, or whose steps fail again and again."""
    return f"a step with this request failed ({message}); the server's log has the whole error"

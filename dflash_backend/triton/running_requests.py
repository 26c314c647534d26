"""The requests between their submission and their last response: adds the engine's outputs and answers the clients."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_backend.config import EngineConfig
from dflash_backend.cores import usable_cores
from dflash_backend.engine_client.engines import RESTARTING, EngineOutputs, Engines, NoEngineError, Placement
from dflash_backend.engine_client.supervisor import EngineLost
from dflash_backend.messages import AbortRequests, GenerationRequest, RequestFailed, SamplingParams, TokenDelta
from dflash_backend.text.output import RequestState, request_id_of
from dflash_backend.traffic import Row, TrafficWriter
from dflash_backend.triton.cancellation import CancellationWatch
from dflash_backend.triton.delta_streams import DeltaStream, DeltaStreams, entry
from dflash_backend.triton.log import Log
from dflash_backend.triton.metrics import Metrics
from dflash_backend.triton.reporter import Reporter
from dflash_backend.triton.request_metrics import count_finished, count_first_token, count_tokens, count_wait
from dflash_backend.triton.responder import Responder, SendFailed, one_line
from dflash_backend.triton.responses import ResponseBuilder
from dflash_backend.triton.server_memory import SMALLEST_STREAM_BYTES, ServerMemory

# With more new deltas at once this thread is behind the engines, and a response for each would leave it there. As many
# take a few milliseconds to send.
MAX_SEPARATE_DELTAS = 32
# `max_stream_responses_per_s` auto: from stub to client a response takes some 300 us of processor time, an eighth of
# each core's at this rate; and one thread of Python sends them.
RESPONSES_PER_CORE, MOST_RESPONSES = 600, 6000
# A batch of a delta stream with one request costs as much as a response. Each other request adds this part of one, some
# 60 us, in its client.
BATCHED_RESPONSE = 0.25
# For no longer than this do tokens wait: readers see no difference.
MAX_WAIT_S = 0.05


@dataclass(eq=False)
class TritonRequest:
    """A request's state, where its responses go, which engine runs it, and what that is sent.

    answered: a response was sent. num_alone: those of its own, outside batches. sent: the engine was sent all of its
    completions. num_moves: engines that were lost before it reached them. prefilled: it has its first token. has_wait,
    has_first_token: the metrics have its time in the queue, and that to its first token. released: its engine is done
    with it. delta_stream: what carried some of its deltas.
    """

    state: RequestState
    responder: Responder
    placement: Placement
    messages: list[GenerationRequest]
    answered: bool = False
    num_alone: int = 0
    sent: bool = False
    num_moves: int = 0
    prefilled: bool = False
    has_wait: bool = False
    has_first_token: bool = False
    released: bool = False
    delta_stream: DeltaStream | None = None


def is_recorded(sampling: SamplingParams) -> bool:
    """Whether a request may be written down: its client does not refuse, has no salt that keeps it apart from others,
    and left the target and its logits as they are; and another server does not answer it."""
    changed = sampling.penalised or bool(sampling.logit_bias or sampling.lora_name) or sampling.masks_tokens
    is_prefill = sampling.kv_transfer_params is not None and sampling.kv_transfer_params.do_remote_decode
    return sampling.record_traffic and not sampling.cache_salt and not changed and not is_prefill


def _record(traffic: TrafficWriter, state: RequestState) -> None:
    """Write the answers of a finished request down, those that are whole."""
    for completion in state.completions:
        if completion.answer and completion.finish_reason != "abort":
            traffic.offer(Row(state.parsed.prompt_token_ids, completion.answer, state.parsed.sampling.temperature))


class RunningRequests:
    """Any thread may call `start`, `refuse` and `fail_lost`; the output thread calls all else."""

    def __init__(
        self,
        config: EngineConfig,
        engines: Engines,
        responses: ResponseBuilder,
        metrics: Metrics,
        reporter: Reporter,
        log: Log,
        server_memory: ServerMemory,
        traffic: TrafficWriter | None = None,
        as_vllm: bool = False,
    ) -> None:
        self._engines = engines
        self._responses = responses
        self._metrics = metrics
        self._reporter = reporter
        self._log = log
        self._server_memory = server_memory
        self._traffic = traffic
        self._as_vllm = as_vllm
        self._max_response_mb = config.max_response_mb
        self.delta_streams = DeltaStreams(responses, log)
        most = min(MOST_RESPONSES, RESPONSES_PER_CORE * usable_cores())
        self._responses_per_s = config.max_stream_responses_per_s or most
        # Those whose next response waits for others, by id, and when the last ones of them left.
        self._waiting: dict[str, TritonRequest] = {}
        self._sent_waiting_at = -math.inf
        self._requests: dict[str, TritonRequest] = {}
        self._cancellations = CancellationWatch()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def poll_s(self) -> float:
        """How long the output thread may wait for outputs before it asks about cancelled requests, or sends responses
        that wait."""
        timeout_s = self._cancellations.timeout_s()
        if not self._waiting:
            return timeout_s
        return min(timeout_s, max(0.0, self._sent_waiting_at + self._wait_s - time.monotonic()))

    @property
    def _wait_s(self) -> float:
        """How long the responses that wait do so: as many leave in a second as may. A stream whose steps take longer
        never waits, nor one alone of vLLM's backend, whose tests count its responses."""
        waiting = Counter(request.delta_stream for request in self._waiting.values())
        num_responses: float = waiting.pop(None, 0) - self._as_vllm
        num_responses += sum(1 + BATCHED_RESPONSE * (num_requests - 1) for num_requests in waiting.values())
        return min(MAX_WAIT_S, num_responses / self._responses_per_s)

    def add(self, request: TritonRequest) -> None:
        """Hand a request over to the output thread."""
        request_id = request.state.request_id
        self._requests[request_id] = request
        self._cancellations.add(request_id, request.responder)

    def start(self, request: TritonRequest) -> None:
        """Send a request to its engine; from here on the output thread owns it."""
        if self._traffic is not None and is_recorded(request.state.parsed.sampling) and self._traffic.wants():
            request.state.keep_answers()
        self.add(request)
        for message in request.messages:
            request.placement.client.send(message)
        request.sent = True
        # The engine may have died meanwhile. The thread that removes the request answers it.
        if self._engines.is_lost(request.placement):
            self.fail_lost(request, self._engines.how_lost(request.placement))

    def process(self, outputs: list[EngineOutputs]) -> None:
        """Add the engines' outputs and send the responses that are due: one for each step, as vLLM's backend does, or
        for all steps that have arrived when those are many."""
        if sum(len(message.outputs.deltas) for message in outputs) > MAX_SEPARATE_DELTAS:
            self._process_together(outputs)
            return
        for message in outputs:
            self._process_together([message])
        if not outputs:
            self._send_waiting()

    def _process_together(self, outputs: list[EngineOutputs]) -> None:
        updated: dict[str, TritonRequest] = {}
        for message in outputs:
            self._add_outputs(message, updated)
        updated = {request_id: request for request_id, request in updated.items() if request_id in self._requests}
        finished = [request for request in updated.values() if request.state.finished]
        begins = False
        for request in updated.values():
            state = request.state
            if state.finished:
                continue
            # The first tokens may share a batch too, and wait for no others.
            if state.parsed.may_wait and (request.answered or self._stream_of(request) is not None):
                begins |= not request.answered
                self._waiting[state.request_id] = request
            else:
                self._answer(request)
        if finished:
            self._finish(finished)
        self._send_waiting(at_once=begins)

    def _send_waiting(self, at_once: bool = False) -> None:
        """Send the responses that wait, all together, if they have waited long enough: client and server wake once."""
        now = time.monotonic()
        if not self._waiting or (now - self._sent_waiting_at < self._wait_s and not at_once):
            return
        self._sent_waiting_at = now
        waiting, self._waiting = self._waiting, {}
        together: dict[DeltaStream, list[TritonRequest]] = {}
        for request in waiting.values():
            if (stream := self._stream_of(request)) is None:
                self._answer(request)
            else:
                together.setdefault(stream, []).append(request)
        for stream, requests in together.items():
            self._answer_together(stream, requests)

    def _stream_of(self, request: TritonRequest) -> DeltaStream | None:
        """The delta stream of a request's next tokens. None for one with several responses of its own, as where its
        stream opens late: its client reads batches as soon as it has read one response, and would have later tokens
        before earlier ones."""
        return self.delta_streams.of(request.state) if request.num_alone < 2 else None

    def _answer_together(self, stream: DeltaStream, requests: list[TritonRequest]) -> None:
        """Send what these requests have for their client as one batch of their delta stream."""
        requests = [each for each in requests if each.state.request_id in self._requests and each.state.has_output]
        if not requests:
            return
        try:
            num_bytes = self.delta_streams.send(stream, [entry(each.state, not each.answered) for each in requests])
        except SendFailed as error:
            # What they have leaves with what the next step adds.
            self._log.error(f"a delta stream failed, and its requests go on without it: {error}")
            return
        self._server_memory.note_sent(num_bytes)
        num_tokens = num_prompt_tokens = 0
        for request in requests:
            request.delta_stream = stream
            request.responder.num_bytes_sent += request.state.num_bytes
            num_tokens += request.state.num_new_tokens
            num_prompt_tokens += 0 if request.answered else len(request.state.parsed.prompt_token_ids)
            request.answered = True
            request.state.clear()
        self._metrics.count("dflash:generation_tokens_total", num_tokens)
        if num_prompt_tokens:
            self._metrics.count("dflash:prompt_tokens_total", num_prompt_tokens)

    def _add_outputs(self, message: EngineOutputs, updated: dict[str, TritonRequest]) -> None:
        index, outputs = message
        for failure in outputs.failed:
            self._fail(failure)
        aborted: list[str] = []
        stopped_at: dict[str, int] = {}
        for delta in outputs.deltas:
            request = self._requests.get(request_id_of(delta.request_id))
            if request is None:
                # Cancelled or refused, perhaps before all its completions had been sent to the engine.
                if delta.finish_reason is None:
                    aborted.append(delta.request_id)
                continue
            for part in request.state.parts(delta):
                if request.state.request_id not in self._requests or not self._add_tokens(request, part, stopped_at):
                    break
                updated[request.state.request_id] = request
                if not part.token_ids and part.finish_reason is None:
                    # Log-probabilities of its prompt alone, which leave as they come where they are many.
                    self._answer(request)
        if aborted or stopped_at:
            self._engines.send(index, AbortRequests([*aborted, *stopped_at], stopped_at))
        self._reporter.follow(index, outputs)

    def _add_tokens(self, request: TritonRequest, delta: TokenDelta, stopped_at: dict[str, int]) -> bool:
        """Add new tokens to their request; False when that ended it with an error."""
        state = request.state
        if not request.prefilled and delta.token_ids:
            request.prefilled = True
            self._engines.prefilled(request.placement)
        if not request.has_wait and delta.stats is not None:
            request.has_wait = True
            count_wait(self._metrics, delta.stats)
        try:
            added = state.add(delta)
        except Exception as error:  # noqa: BLE001 - a fault in one request's text must not reach the others
            self._log.error(f"request {state.request_id} failed: {one_line(error)}")
            self._give_up(request, "INTERNAL", f"the new tokens could not be turned into text: {one_line(error)}")
            return False
        if not request.has_first_token and (first_token_at := state.first_token_at) is not None:
            request.has_first_token = True
            count_first_token(self._metrics, state, first_token_at)
        if added.num_intervals:
            self._metrics.observe("dflash:inter_token_latency_seconds", added.interval_s, times=added.num_intervals)
        if request.responder.num_bytes_sent + state.num_bytes > int(self._max_response_mb * 1e6):
            self._give_up(
                request,
                "INVALID_ARGUMENT",
                f"the answer has grown past max_response_mb ({self._max_response_mb:g} MB); ask for fewer "
                "tokens, completions or log-probabilities",
            )
            return False
        if added.stopped_at is not None:
            stopped_at[delta.request_id] = added.stopped_at
        return True

    def _answer(self, request: TritonRequest) -> None:
        """Send what a request has for its client, if anything. It stays here until its last response was sent."""
        state = request.state
        if state.request_id not in self._requests or not state.has_output:
            return
        final, new_tokens, first = state.finished, state.num_new_tokens, not request.answered
        try:
            batches = None if request.delta_stream is None else request.delta_stream.num_batches
            response = self._responses.output(state, batches)
            request.responder.send(response, final)
            request.num_alone += 1
        except Exception as error:  # noqa: BLE001 - SendFailed, or a response that cannot even be built
            reason = str(error) if isinstance(error, SendFailed) else one_line(error)
            self._log.error(f"request {state.request_id} failed: {reason}")
            self._give_up(request, "INTERNAL", reason)
            return
        self._server_memory.note_sent(response.num_bytes)
        state.clear()
        request.answered = True
        if final:
            self._remove(state.request_id)
        else:
            count_tokens(self._metrics, state, new_tokens, first)

    def _finish(self, requests: list[TritonRequest]) -> None:
        """Count requests, bring the metrics page up to date, then send their last responses: a client that has its
        answer finds the request on the page, unless very many requests finish every second."""
        now = time.monotonic()
        for request in requests:
            # A client that has its answer may send the next request at once.
            self._release(request)
            count_tokens(self._metrics, request.state, request.state.num_new_tokens, not request.answered)
            count_finished(self._metrics, request.state, now)
            if self._traffic is not None:
                _record(self._traffic, request.state)
        self._reporter.report_finished(now, len(self._requests) - len(requests))
        for request in requests:
            self._answer(request)

    def _give_up(self, request: TritonRequest, status: str, message: str) -> None:
        """End a request that the engine still runs, with an error. The others go on."""
        if self._remove(request.state.request_id):
            self._engines.send(request.placement.engine, AbortRequests(request.state.engine_ids))
            self.end_with_error(request.responder, status, message)

    def _fail(self, failure: RequestFailed) -> None:
        """One completion that the engine cannot take ends the whole request."""
        request = self._requests.get(request_id_of(failure.request_id))
        if request is not None:
            self._send_waiting(at_once=True)
            self._give_up(request, failure.status, failure.message)

    def check_cancelled(self, now: float) -> None:
        """Ask Triton for some of the requests, and the delta streams, whether their client is still there."""
        if self.delta_streams.is_due(now):
            # A copy: the other thread adds requests.
            self.delta_streams.look(now, [request.state for request in list(self._requests.values())])
        cancelled, failed = self._cancellations.ask(now, self._requests)
        for request_id in cancelled:
            if (request := self._requests.get(request_id)) is not None:
                self._log.vllm("Cancelling the request")
                self._give_up(request, "CANCELLED", "the request was cancelled")
                self._log.vllm("Successfully cancelled the request")
                self._reporter.note_finished()
        for request_id, error in failed:
            self._log.error(f"request {request_id} failed: {error}")
            if (request := self._requests.get(request_id)) is not None:
                self._give_up(request, "INTERNAL", str(error))

    def check_server_memory(self, now: float) -> None:
        """When `tritonserver` holds too much, end the stream that was sent the most, unless that is little: nothing
        tells which client does not read. No stream ends for memory that grew by more than was sent."""
        memory = self._server_memory
        if not memory.is_over(now):
            return
        held = f"tritonserver holds {memory.num_bytes / 1e9:.1f} GB (max_server_memory_gb)"
        if memory.is_of_requests:
            memory.note_acted()
            self._log.warning(f"{held} and grew by more than was sent: large requests hold it, so no stream is ended")
            return
        if not memory.is_of_responses:
            return
        # A copy: the other thread adds requests.
        streams = (request for request in list(self._requests.values()) if request.state.parsed.stream)
        largest = max(streams, key=lambda request: request.responder.num_bytes_sent, default=None)
        together = self.delta_streams.largest()
        if together is not None and together.responder.num_bytes_sent >= SMALLEST_STREAM_BYTES:
            memory.note_acted()
            self._log.warning(f"{held} and grows; a delta stream is closed, whose requests go on without it")
            self.delta_streams.close(together)
            return
        if largest is None or largest.responder.num_bytes_sent < SMALLEST_STREAM_BYTES:
            return
        memory.note_acted()
        size = largest.responder.num_bytes_sent / 1e6
        self._log.warning(f"{held} and grows; the stream that was sent the most, {size:.1f} MB, is ended")
        self._give_up(
            largest,
            "UNAVAILABLE",
            f"{held}, most likely responses that clients do not read, and this stream was sent the most ({size:.1f} "
            "MB); read faster, or ask for fewer log-probabilities",
        )

    def fail_all_lost(self, lost: EngineLost) -> None:
        """Answer the requests of an engine that is gone."""
        # A copy, without those that the other thread is sending: it notices afterwards that the engine is gone.
        self._send_waiting(at_once=True)
        for request in list(self._requests.values()):
            if request.sent and request.placement.client is lost.engine:
                self.fail_lost(request, lost)

    def fail_lost(self, request: TritonRequest, lost: EngineLost | None) -> None:
        """Answer a request whose engine is gone, unless it was answered. Another engine gets it, or its client may send
        it again, only if it never reached the engine: one that may have caused the engine's error would end the next
        engine as well."""
        if not self._remove(request.state.request_id):
            return
        if lost is not None and (lost.has_reason or not all(map(lost.engine.is_unconfirmed, request.state.engine_ids))):
            self.end_with_error(request.responder, "INTERNAL", str(lost))
        elif not self._move(request):
            self.end_with_error(request.responder, "UNAVAILABLE", RESTARTING)

    def _move(self, request: TritonRequest) -> bool:
        """Send a request that reached no engine to another one; False when there is none."""
        request.num_moves += 1
        if request.num_moves >= len(self._engines):
            return False
        parsed = request.state.parsed
        try:
            request.placement = self._engines.place(parsed.prompt_token_ids, parsed.sampling)
        except NoEngineError:
            return False
        request.sent = request.released = False
        self.start(request)
        return True

    def fail_all(self, status: str, message: str) -> None:
        """End every request with an error."""
        for request in self._take_all():
            self.end_with_error(request.responder, status, message)

    def _take_all(self) -> Iterator[TritonRequest]:
        """Remove and return each request; the other thread may remove its newest as well (`fail_lost`)."""
        with contextlib.suppress(KeyError):
            while True:
                yield self._requests.popitem()[1]

    def _remove(self, request_id: str) -> bool:
        """Take a request out; False when another call has."""
        request = self._requests.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if request is not None:
            self._release(request)
        return request is not None

    def _release(self, request: TritonRequest) -> None:
        """The request is no load of its engine any more."""
        if not request.released:
            request.released = True
            self._engines.finished(request.placement, request.prefilled)

    def end_with_error(self, responder: Responder, status: str, message: str, *, counted: bool = True) -> None:
        """End a request with an error, which the metrics count unless told otherwise."""
        if counted:
            self._metrics.count("dflash:request_errors_total", 1, status)
        if not responder.fail(status, message):
            self._log.error(f"a client could not be told of its error: {status}: {message}")
        self._reporter.note_change()

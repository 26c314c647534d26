"""What the Triton model delegates to: takes requests, feeds the engine, and sends the responses.

Two threads. Triton's calls `submit`, which validates, tokenises and hands over. The output thread reads the engine and
owns every request from then on: it alone sends their responses, asks whether they were cancelled, and forgets them, so
nothing here needs a lock. What touches Triton costs a round trip between processes; that is why there is one response
for all of a request's new tokens, and why cancellation and metrics are looked at only now and then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dflash_backend.checkpoints import resolve_target_dir
from dflash_backend.config import EngineConfig
from dflash_backend.frontend.detokenizer import Detokenizer
from dflash_backend.frontend.engine_client import EngineClient, EngineError
from dflash_backend.frontend.metrics import Metrics
from dflash_backend.frontend.request import InputError, ParsedRequest, PromptError, parse_request
from dflash_backend.frontend.responses import ResponseBuilder
from dflash_backend.frontend.tokenizer import Tokenizer
from dflash_backend.messages import (
    AbortRequests,
    EngineFailed,
    EngineReady,
    FinishReason,
    GenerationRequest,
    RequestRejected,
    RequestStats,
    StepOutputs,
    StopRequests,
    TokenDelta,
)
from dflash_backend.sampling_params import ParameterError

LOAD_TIMEOUT_S = 3600.0
CANCEL_CHECK_S = 0.5
# So that many requests in flight never keep the output thread from sending: about 2 ms of asking at a time.
CANCEL_CHECKS_A_TURN = 16
METRICS_FLUSH_S = 1.0
# Requests in flight may finish for so long when the model is unloaded.
DRAIN_S = 10.0


class Flight:
    """A request that the engine works on, and what of its answer was not sent yet."""

    def __init__(self, sender: Any, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        self.sender = sender
        self.parsed = parsed
        self.detokenizer = Detokenizer(tokenizer, parsed.sampling)
        self.text: list[str] = [parsed.prefix] if parsed.prefix else []
        self.token_ids: list[int] = []
        # A stop string was found: the engine was told, and only its last delta is still to come.
        self.stopped = False
        self.finish_reason: FinishReason | None = None
        self.stats: RequestStats | None = None
        self.num_tokens = 0
        self.submitted_at = time.monotonic()
        self.first_token_at = 0.0

    def add(self, delta: TokenDelta) -> None:
        """Take new tokens. Those past a stop string do not count."""
        finished = delta.finish_reason is not None
        if not self.stopped:
            text, self.stopped = self.detokenizer.append(delta.token_ids, finished)
            if text:
                self.text.append(text)
            self.token_ids += delta.token_ids
            if self.num_tokens == 0 and delta.token_ids:
                self.first_token_at = time.monotonic()
            self.num_tokens += len(delta.token_ids)
        if finished:
            self.finish_reason = "stop" if self.stopped else delta.finish_reason
            self.stats = delta.stats

    @property
    def due(self) -> bool:
        """Whether a response should go out now: at the end, and when streaming as soon as there is something new."""
        if self.finish_reason is not None:
            return True
        return self.parsed.stream and bool(self.text or (self.parsed.returns.token_ids and self.token_ids))


class FrontendService:
    """One per Triton model instance. `submit` from Triton's thread; `close` when the model is unloaded."""

    def __init__(
        self, config: EngineConfig, model_name: str, pb_utils: ModuleType, command: Sequence[str] | None = None
    ) -> None:
        """Load the tokenizer and start the engine process, by `command` unless it is the usual one.

        Raises `ConfigError`, `CheckpointError` or `EngineError` with a sentence for the operator.
        """
        self._pb = pb_utils
        self._log = pb_utils.Logger
        self._config = config
        self._responses = ResponseBuilder(pb_utils)
        self._metrics = Metrics(pb_utils, model_name, self._log.log_info)
        self._flights: dict[str, Flight] = {}
        # (when to ask next, request id), the earliest first.
        self._cancel_checks: deque[tuple[float, str]] = deque()
        self._ids = map(str, itertools.count())
        self._failure: str | None = None
        self._closing = False
        self._drained = threading.Event()
        self._flushed_at = 0.0
        target_dir = resolve_target_dir(config)
        self._log_progress("starting the engine process", 0.0)
        self._engine = EngineClient(config, command)
        try:
            self._tokenizer = Tokenizer.load(target_dir)
        except ValueError:
            self._engine.close()
            raise
        self._ready: EngineReady = self._engine.wait_until_ready(self._log_progress, LOAD_TIMEOUT_S)
        self._log.log_info(f"dflash: ready: {self._ready.description}")
        self._thread = threading.Thread(target=self._run, name="dflash-output", daemon=True)
        self._thread.start()

    def submit(self, request: Any) -> None:
        """Take one Triton request. Whatever is wrong with it is answered; nothing is raised."""
        sender = request.get_response_sender()
        if self._closing:
            self._refuse(sender, "UNAVAILABLE", "the server is shutting down; try again later")
            return
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            parsed = parse_request(inputs, request.parameters(), self._tokenizer, self._ready)
        except (InputError, PromptError, ParameterError) as error:
            self._refuse(sender, "INVALID_ARGUMENT", str(error))
            return
        request_id = next(self._ids)
        flight = Flight(sender, parsed, self._tokenizer)
        self._flights[request_id] = flight
        self._cancel_checks.append((flight.submitted_at + CANCEL_CHECK_S, request_id))
        if self._failure is None:
            self._engine.send(
                GenerationRequest(
                    request_id,
                    parsed.prompt_token_ids,
                    parsed.sampling,
                    self._tokenizer.eos_token_ids,
                    self._config.request_timeout_s,
                )
            )
        # The engine may have died between: whoever takes the request out of the table answers it.
        if self._failure is not None and self._flights.pop(request_id, None) is not None:
            self._refuse(sender, "INTERNAL", self._failure)

    def close(self) -> None:
        """Let requests in flight finish for a while, refuse new ones, then end the engine process."""
        if self._closing:
            return
        self._closing = True
        self._engine.wake()
        if not self._drained.wait(DRAIN_S):
            self._log.log_warn(f"dflash: {len(self._flights)} requests were still running at the shutdown")
        self._drained.set()
        self._failure = "the server was shut down while it worked on this request"
        self._engine.wake()
        self._thread.join()
        self._engine.close()

    def _run(self) -> None:
        """The output thread. However it ends, no request stays without an answer."""
        try:
            while self._failure is None:
                self._turn()
        except EngineError as error:
            self._failure = str(error)
            self._log.log_error(f"dflash: {error}; unload and load the model, or restart the server")
        finally:
            self._failure = self._failure or "the server's output thread died; the server's log says why"
            self._fail_all(self._failure)
            self._metrics.flush()
            self._drained.set()

    def _turn(self) -> None:
        """Read what the engine has said, answer, and do what is due now and then."""
        outputs = self._engine.receive(int(CANCEL_CHECK_S * 1000))
        # When this thread is behind, several steps are here at once: their tokens leave in one response.
        touched: dict[str, Flight] = {}
        for message in outputs:
            if isinstance(message, StepOutputs):
                self._take(message, touched)
            elif isinstance(message, EngineFailed):
                raise EngineError(message.message)
        for request_id, flight in touched.items():
            self._answer(request_id, flight)
        now = time.monotonic()
        self._check_cancelled(now)
        if now - self._flushed_at >= METRICS_FLUSH_S:
            self._metrics.flush()
            self._flushed_at = now
        if self._closing and not self._flights:
            self._drained.set()

    def _take(self, outputs: StepOutputs, touched: dict[str, Flight]) -> None:
        for rejected in outputs.rejected:
            self._reject(rejected)
        stopped: list[str] = []
        for delta in outputs.deltas:
            flight = self._flights.get(delta.request_id)
            if flight is None:
                continue
            was_stopped = flight.stopped
            flight.add(delta)
            touched[delta.request_id] = flight
            if flight.stopped and not was_stopped and flight.finish_reason is None:
                stopped.append(delta.request_id)
        if stopped:
            self._engine.send(StopRequests(stopped))
        if outputs.stats is not None:
            self._metrics.follow(outputs.stats)

    def _answer(self, request_id: str, flight: Flight) -> None:
        """Send what a request has for its client, if anything."""
        if not flight.due:
            return
        response = self._responses.output(
            flight.parsed.returns,
            "".join(flight.text),
            flight.token_ids,
            len(flight.parsed.prompt_token_ids),
            flight.finish_reason,
            flight.stats,
        )
        flight.text, flight.token_ids = [], []
        if flight.finish_reason is None:
            flight.sender.send(response)
            return
        del self._flights[request_id]
        flight.sender.send(response, flags=self._responses.final)
        self._count_finished(flight)

    def _count_finished(self, flight: Flight) -> None:
        metrics, now = self._metrics, time.monotonic()
        metrics.count("dflash:request_success_total", 1, str(flight.finish_reason))
        metrics.observe("dflash:e2e_request_latency_seconds", now - flight.submitted_at)
        if flight.stats is not None:
            metrics.observe("dflash:request_queue_time_seconds", flight.stats.queue_time_s)
        if flight.num_tokens:
            metrics.observe("dflash:time_to_first_token_seconds", flight.first_token_at - flight.submitted_at)
        if flight.num_tokens > 1:
            mean = (now - flight.first_token_at) / (flight.num_tokens - 1)
            metrics.observe("dflash:inter_token_latency_seconds", mean)

    def _check_cancelled(self, now: float) -> None:
        """Ask Triton for some of the requests whether their client is still there, each about twice a second."""
        cancelled: list[str] = []
        for _ in range(CANCEL_CHECKS_A_TURN):
            if not self._cancel_checks or self._cancel_checks[0][0] > now:
                break
            _, request_id = self._cancel_checks.popleft()
            flight = self._flights.get(request_id)
            if flight is None:
                continue
            if flight.sender.is_cancelled():
                cancelled.append(request_id)
            else:
                self._cancel_checks.append((now + CANCEL_CHECK_S, request_id))
        if cancelled:
            self._engine.send(AbortRequests(cancelled))
            for request_id in cancelled:
                self._refuse(self._flights.pop(request_id).sender, "CANCELLED", "the request was cancelled")

    def _reject(self, rejected: RequestRejected) -> None:
        flight = self._flights.pop(rejected.request_id, None)
        if flight is not None:
            self._refuse(flight.sender, rejected.status, rejected.message)

    def _fail_all(self, message: str) -> None:
        while self._flights:
            _, flight = self._flights.popitem()
            self._refuse(flight.sender, "INTERNAL", message)

    def _refuse(self, sender: Any, status: str, message: str) -> None:
        """End a request with an error."""
        sender.send(self._responses.error(status, message), flags=self._responses.final)
        self._metrics.count("dflash:request_errors_total", 1, status)

    def _log_progress(self, message: str, fraction: float) -> None:
        self._log.log_info(f"dflash: loading {fraction:.0%}: {message}")

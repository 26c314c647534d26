"""What the Triton model delegates to: takes requests, feeds the engine, and sends the responses.

Two threads. Triton's calls `submit`, which validates, tokenises and hands over. The output thread reads the engine and
owns every request from then on: it alone sends their responses, asks whether they were cancelled, and forgets them, so
nothing here needs a lock. It also starts the engine again when that has died, and ends it.

What touches Triton costs a round trip between processes; that is why there is one response for all of a request's new
tokens, and why cancellation and metrics are looked at only now and then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dflash_backend.checkpoints import resolve_target_dir
from dflash_backend.config import EngineConfig
from dflash_backend.frontend.activity_log import ActivityLog
from dflash_backend.frontend.cancellation import CancellationWatch
from dflash_backend.frontend.engine_client import EngineClient
from dflash_backend.frontend.flight import Flight, flight_id
from dflash_backend.frontend.log import Log
from dflash_backend.frontend.metrics import Metrics
from dflash_backend.frontend.request import InputError, ParsedRequest, PromptError, parse_request
from dflash_backend.frontend.responses import ResponseBuilder
from dflash_backend.frontend.supervisor import EngineLost, EngineSupervisor
from dflash_backend.frontend.tokenizer import Tokenizer
from dflash_backend.messages import (
    AbortRequests,
    GenerationRequest,
    RequestRejected,
    StepOutputs,
    StopRequests,
)
from dflash_backend.sampling_params import ParameterError

# How old the metrics page may be: while something happens, and otherwise.
METRICS_BUSY_S = 0.25
METRICS_IDLE_S = 1.0
# How long the output thread sleeps when there is no request to ask about.
IDLE_S = 0.25
# Requests in flight may finish for so long when the model is unloaded.
DRAIN_S = 10.0
RESTARTING = "the engine is being restarted after it died; try again in a few seconds"


class FrontendService:
    """One per Triton model instance. `submit` from Triton's thread; `close` when the model is unloaded."""

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        pb_utils: ModuleType,
        command: Sequence[str] | None = None,
        instance: str = "",
    ) -> None:
        """Load the tokenizer and start the engine process, by `command` unless it is the usual one.

        `instance` is Triton's name of the model instance, by default that of a model's first one. Raises `ConfigError`,
        `CheckpointError` or `EngineError` with a sentence for the operator.
        """
        self._pb = pb_utils
        self._log = Log(pb_utils, config.log_level)
        self._config = config
        self._responses = ResponseBuilder(pb_utils)
        self._metrics = Metrics(pb_utils, model_name, instance or f"{model_name}_0_0", self._log.info)
        self._flights: dict[str, Flight] = {}
        self._cancellations = CancellationWatch()
        self._activity = ActivityLog()
        self._ids = map(str, itertools.count())
        self._closing = False
        # Set when the output thread must end, whatever is still in flight, and by that thread when it has.
        self._ended = False
        self._drained = threading.Event()
        self._flushed_at = 0.0
        self._stale = False
        settings = sorted(config.as_strings().items())
        self._log.info("settings: " + " ".join(f"{name}={value}" for name, value in settings))
        target_dir = resolve_target_dir(config)
        self._log.info("loading 0%: starting the engine process")
        self._engine = EngineSupervisor(config, self._log, command)
        self._engine.start()
        try:
            self._tokenizer = Tokenizer.load(target_dir)
        except ValueError:
            self._engine.close()
            raise
        self._engine.wait_until_ready()
        self._num_restarts = 0
        self._log.info(f"ready: {self._engine.ready.description}")
        self._report(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="dflash-output", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether a request that is sent now would be taken."""
        return self._refusal() is None

    def submit(self, request: Any) -> None:
        """Take one Triton request. Whatever is wrong with it is answered; nothing is raised."""
        sender = request.get_response_sender()
        engine = self._engine.engine
        if (refusal := self._refusal()) is not None or engine is None:
            self._refuse(sender, "UNAVAILABLE", refusal or RESTARTING)
            return
        # Before anything is done for it: what an overloaded server refuses must cost next to nothing.
        if self._refuse_overflow(sender, engine, 1):
            return
        try:
            parsed = self._parsed(request)
        except (InputError, PromptError, ParameterError) as error:
            self._refuse(sender, "INVALID_ARGUMENT", str(error))
            return
        if self._refuse_overflow(sender, engine, parsed.sampling.n):
            return
        request_id = next(self._ids)
        flight = Flight(request_id, sender, parsed, self._tokenizer)
        self._flights[request_id] = flight
        self._cancellations.add(request_id, sender)
        if self._log.debugging:
            prompt = self._tokenizer.decode(parsed.prompt_token_ids, skip_special_tokens=False)
            self._log.debug(
                f"request {request_id}: {len(parsed.prompt_token_ids)} tokens: {prompt!r}: {parsed.sampling}"
            )
        for index, engine_id in enumerate(flight.engine_ids):
            engine.send(
                GenerationRequest(
                    engine_id,
                    parsed.prompt_token_ids,
                    flight.engine_sampling(index),
                    self._tokenizer.eos_token_ids,
                    self._config.request_timeout_s,
                )
            )
        # The engine may have died between: whoever takes the request out of the table answers it.
        if self._engine.engine is not engine and self._flights.pop(request_id, None) is not None:
            self._refuse(sender, "UNAVAILABLE", RESTARTING)

    def _refuse_overflow(self, sender: Any, engine: EngineClient, num_completions: int) -> bool:
        """Refuse a request that the queue has no room for; whether it had none.

        The engine would say the same, a step later, and of each completion by itself.
        """
        waiting, limit = engine.num_waiting, self._config.max_queue_size
        if waiting + num_completions <= limit:
            return False
        self._refuse(
            sender,
            "UNAVAILABLE",
            f"{waiting} requests wait already, this one has {num_completions}, and max_queue_size is {limit}; try "
            "again later",
        )
        return True

    def _parsed(self, request: Any) -> ParsedRequest:
        """The request, checked and tokenised. Raises what `parse_request` raises."""
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            parameters = request.parameters()
        except UnicodeDecodeError:
            # Triton lets half a surrogate pair of HTTP's JSON pass.
            raise InputError("the request's parameters are not UTF-8 text") from None
        return parse_request(inputs, parameters, self._tokenizer, self._engine.ready, self._config.max_num_seqs)

    def close(self) -> None:
        """Let requests in flight finish for a while, refuse new ones, then end the engine process."""
        if self._closing:
            return
        self._closing = True
        self._engine.wake()
        if not self._drained.wait(DRAIN_S):
            self._log.warning(f"{len(self._flights)} requests were still running at the shutdown")
        self._ended = True
        self._engine.wake()
        self._thread.join()

    def _refusal(self) -> str | None:
        """Why a new request cannot be taken, if it cannot; the status is UNAVAILABLE."""
        if self._closing:
            return "the server is shutting down; try again later"
        if self._ended:
            return "the model has stopped working; the server's log says why; load it again or restart the server"
        if self._engine.engine is None:
            return RESTARTING
        return None

    def _run(self) -> None:
        """The output thread. However it ends, no request stays without an answer, and no engine behind."""
        try:
            while not self._ended:
                self._turn()
        finally:
            self._ended = True
            self._engine.close()
            self._fail_all("the server was shut down while it worked on this request")
            self._metrics.forget_engine()
            self._metrics.flush()
            self._drained.set()

    def _turn(self) -> None:
        """Read what the engine has said, answer, and do what is due now and then."""
        patience_s = self._cancellations.timeout_s() if self._flights else IDLE_S
        try:
            outputs = self._engine.receive(int(patience_s * 1000))
        except EngineLost as lost:
            outputs = []
            self._fail_all(str(lost))
            self._metrics.forget_engine()
            self._metrics.flush()
            self._activity.restart()
        # When this thread is behind, several steps are here at once: their tokens leave in one response.
        touched: dict[str, Flight] = {}
        for message in outputs:
            self._take(message, touched)
        for request_id, flight in touched.items():
            self._answer(request_id, flight)
        now = time.monotonic()
        self._check_cancelled(now)
        self._stale = self._stale or bool(outputs or self._flights)
        if now - self._flushed_at >= (METRICS_BUSY_S if self._stale else METRICS_IDLE_S):
            self._report(now)
        if self._closing and not self._flights:
            self._drained.set()

    def _report(self, now: float) -> None:
        """Bring the metrics page up to date, and write the line of the minute."""
        restarts = self._engine.num_restarts
        if restarts != self._num_restarts:
            self._metrics.count("dflash:engine_restarts_total", restarts - self._num_restarts)
            self._num_restarts = restarts
        self._metrics.set("dflash:engine_ready", float(self.ready))
        self._metrics.flush()
        self._flushed_at = now
        self._stale = False
        if (line := self._activity.line(now)) is not None:
            self._log.info(line)

    def _take(self, outputs: StepOutputs, touched: dict[str, Flight]) -> None:
        for rejected in outputs.rejected:
            self._reject(rejected)
        stopped: list[str] = []
        orphans: list[str] = []
        for delta in outputs.deltas:
            request_id = flight_id(delta.request_id)
            flight = self._flights.get(request_id)
            if flight is None:
                # Cancelled or refused, perhaps while its completions were still being sent to the engine.
                if delta.finish_reason is None:
                    orphans.append(delta.request_id)
                continue
            flight.add(delta)
            touched[request_id] = flight
            if flight.wants_stop(delta.request_id):
                stopped.append(delta.request_id)
        if stopped:
            self._engine.send(StopRequests(stopped))
        if orphans:
            self._engine.send(AbortRequests(orphans))
        self._metrics.observe_step(outputs.phase_seconds)
        if outputs.stats is not None:
            self._metrics.follow(outputs.stats)
            self._activity.follow(outputs.stats)

    def _answer(self, request_id: str, flight: Flight) -> None:
        """Send what a request has for its client, if anything."""
        if not flight.due:
            return
        response = self._responses.output(flight)
        # What a client is told of is what counts: one that is refused or cancelled before that has got no token.
        if not flight.answered:
            self._metrics.count("dflash:prompt_tokens_total", len(flight.parsed.prompt_token_ids))
        self._metrics.count("dflash:generation_tokens_total", flight.num_new_tokens)
        flight.clear()
        if not flight.ended:
            flight.sender.send(response)
            return
        del self._flights[request_id]
        flight.sender.send(response, flags=self._responses.final)
        self._count_finished(flight)

    def _count_finished(self, flight: Flight) -> None:
        """Each of the latencies is observed once a request, also when it has several completions."""
        metrics, now = self._metrics, time.monotonic()
        for completion in flight.completions:
            metrics.count("dflash:request_success_total", 1, str(completion.finish_reason))
        metrics.observe("dflash:e2e_request_latency_seconds", now - flight.submitted_at)
        metrics.observe("dflash:request_queue_time_seconds", flight.queue_time_s)
        if flight.first_token_at is None:
            return
        metrics.observe("dflash:time_to_first_token_seconds", flight.first_token_at - flight.submitted_at)
        longest = max(completion.num_tokens for completion in flight.completions)
        if longest > 1:
            metrics.observe("dflash:inter_token_latency_seconds", (now - flight.first_token_at) / (longest - 1))

    def _check_cancelled(self, now: float) -> None:
        """Ask Triton for some of the requests whether their client is still there."""
        cancelled = self._cancellations.ask(now, self._flights)
        if cancelled:
            flights = [self._flights.pop(request_id) for request_id in cancelled]
            self._engine.send(AbortRequests([engine_id for flight in flights for engine_id in flight.engine_ids]))
            for flight in flights:
                self._refuse(flight.sender, "CANCELLED", "the request was cancelled")

    def _reject(self, rejected: RequestRejected) -> None:
        """One completion that the engine cannot take ends the whole request."""
        flight = self._flights.pop(flight_id(rejected.request_id), None)
        if flight is not None:
            if len(flight.completions) > 1:
                self._engine.send(AbortRequests(flight.engine_ids))
            self._refuse(flight.sender, rejected.status, rejected.message)

    def _fail_all(self, message: str) -> None:
        while self._flights:
            _, flight = self._flights.popitem()
            self._refuse(flight.sender, "INTERNAL", message)

    def _refuse(self, sender: Any, status: str, message: str) -> None:
        """End a request with an error."""
        sender.send(self._responses.error(status, message), flags=self._responses.final)
        self._metrics.count("dflash:request_errors_total", 1, status)

"""What the Triton model delegates to: takes requests, feeds the engine, and sends the responses.

Two threads. Triton's calls `submit`, which validates, tokenises and hands over. The output thread reads the engine and
owns every request from then on: it alone sends their responses, asks whether they were cancelled, and forgets them, so
nothing here needs a lock. It also starts the engine again when that has died, and ends it.

What touches Triton costs a round trip between processes; that is why there is one response for all of a request's new
tokens, and why cancellation and metrics are looked at only now and then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from dflash_backend.checkpoints import resolve_target_dir
from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineClient
from dflash_backend.engine_client.supervisor import EngineLost, EngineSupervisor
from dflash_backend.messages import (
    TENANTS_IN_QUEUE,
    AbortRequests,
    GenerationRequest,
    RequestRejected,
    SamplingParams,
    StepOutputs,
    TokenDelta,
)
from dflash_backend.process_watch import WatchedProcess
from dflash_backend.text.request import InputError, ParsedRequest, PromptError, RequestRules, parse_request
from dflash_backend.text.sampling_defaults import read_sampling_defaults
from dflash_backend.text.sampling_params import ParameterError
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.triton.activity_log import ActivityLog
from dflash_backend.triton.cancellation import CancellationWatch
from dflash_backend.triton.flight import Flight, flight_id
from dflash_backend.triton.heartbeat import HEARTBEAT_FILE, Heartbeat
from dflash_backend.triton.log import Log
from dflash_backend.triton.metrics import Metrics
from dflash_backend.triton.request_metrics import count_finished, count_tokens
from dflash_backend.triton.responder import Responder, SendFailed, one_line, shared_memory_room
from dflash_backend.triton.responses import ResponseBuilder
from dflash_backend.triton.server_memory import SMALLEST_STREAM_BYTES, ServerMemory, private_memory

# How old the metrics page may be: while something happens, and otherwise.
METRICS_BUSY_S = 0.25
METRICS_IDLE_S = 1.0
# It is brought up to date before a request's last response leaves, but where very many end every second: this costs at
# most this share of the output thread's time, and then the page is so old at most.
METRICS_ENDED_SHARE = 0.1
METRICS_ENDED_S = 0.05
# How long the output thread sleeps when there is no request to ask about.
IDLE_S = 0.25
# Requests in flight may finish for so long when the model is unloaded.
DRAIN_S = 10.0
# How long Triton's stub may take to end by itself after the server.
SERVER_END_S = 2.0
RESTARTING = "the engine is being restarted after it died; try again in a few seconds"
SHUT_DOWN = "the server was shut down while it worked on this request"
BROKEN = "the model stopped working while it worked on this request; the server's log says why"


def end_process() -> None:
    """End Triton's stub at once: whoever supervises the server sees that, and a model that is up but dead is seen by
    nobody."""
    os._exit(1)


class QueueFullError(Exception):
    """The queue has no place for a request. The message is for the client."""


class FrontendService:
    """One per Triton model instance. `submit` from Triton's thread; `close` when the model is unloaded."""

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        pb_utils: ModuleType,
        command: Sequence[str] | None = None,
        instance: str = "",
        version: str = "1",
        server_pid: int = 0,
        abandon: Callable[[], None] = end_process,
    ) -> None:
        """Load the tokenizer and start the engine process, by `command` unless it is the usual one.

        `instance` is Triton's name of the model instance, by default that of a model's first one, and `version` the
        model's. This process ends
        with the process `server_pid`, if one is given. `abandon` is called when the output thread has died of an error,
        or the server has ended. Raises `ConfigError`, `CheckpointError` or `EngineError` with a
        sentence for the operator.
        """
        self._pb = pb_utils
        self._log = Log(pb_utils, config.log_level)
        self._config = config
        self._abandon = abandon
        self._responses = ResponseBuilder(pb_utils, config.report_cached_tokens)
        self._has_room = shared_memory_room()
        self._max_response_bytes = int(config.max_response_mb * 1e6)
        self._server_memory = ServerMemory(
            int(config.max_server_memory_gb * 1e9) if server_pid else 0, lambda: private_memory(server_pid)
        )
        self._flights: dict[str, Flight] = {}
        self._cancellations = CancellationWatch()
        self._activity = ActivityLog()
        self._heartbeat = Heartbeat(os.environ.get(HEARTBEAT_FILE), self._log.warning)
        self._ids = map(str, itertools.count())
        self._closing = False
        # Set when the output thread must end, whatever is still in flight, and by that thread when it has.
        self._ended = False
        self._drained = threading.Event()
        self._flushed_at = self._next_ended_report_at = 0.0
        self._stale = self._has_ended = False
        settings = sorted(config.as_strings().items())
        self._log.info("settings: " + " ".join(f"{name}={value}" for name, value in settings))
        target_dir = resolve_target_dir(config, lambda text: self._log.info(f"loading 0%: {text}"))
        self._log.info("loading 0%: starting the engine process")
        self._engine = EngineSupervisor(config, self._log, command, server_pid=server_pid)
        self._engine.start()
        try:
            self._tokenizer = Tokenizer.load(target_dir, config.message_special_tokens == "control")
            self._rules = RequestRules(
                config.max_num_seqs,
                config.require_cache_salt,
                read_sampling_defaults(target_dir) if config.generation_config == "auto" else {},
            )
        except ValueError:
            self._engine.close()
            raise
        self._engine.wait_until_ready()
        # Last: Triton 2.51 crashes when a model that has made metrics fails to load while it replaces one that serves.
        self._metrics = Metrics(
            pb_utils,
            model_name,
            instance or f"{model_name}_0_0",
            self._log.warning,
            version,
            enabled=config.report_custom_metrics is not False,
            vllm_names=config.report_custom_metrics is True,
        )
        self._num_restarts = 0
        self._log.info(f"ready: {self._engine.ready.description}")
        self._report(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="dflash-output", daemon=True)
        self._thread.start()
        if server_pid:
            watch = threading.Thread(
                target=self._end_with_server,
                args=(WatchedProcess(server_pid),),
                name="dflash-server-watch",
                daemon=True,
            )
            watch.start()

    @property
    def ready(self) -> bool:
        """Whether a request that is sent now would be taken."""
        return self._refusal() is None

    def submit(self, request: Any) -> None:
        """Take one Triton request. Whatever is wrong with it is answered; nothing is raised."""
        responder = Responder(
            request.get_response_sender(), self._responses.error, self._responses.final, self._has_room
        )
        engine = self._engine.engine
        # An engine may have died a moment ago, so that the output thread has yet to notice.
        if (refusal := self._refusal()) is not None or engine is None or not engine.alive:
            self._refuse(responder, "UNAVAILABLE", refusal or RESTARTING)
            return
        # Before anything is done for it: what an overloaded server refuses must cost next to nothing.
        if (overflow := self._overflow(engine, 1)) is not None:
            self._refuse(responder, "UNAVAILABLE", overflow)
            return
        try:
            parsed = self._parsed(request, engine)
        except QueueFullError as error:
            self._refuse(responder, "UNAVAILABLE", str(error))
            return
        except (InputError, PromptError, ParameterError) as error:
            self._refuse(responder, "INVALID_ARGUMENT", str(error))
            return
        except Exception as error:  # noqa: BLE001 - Triton could not hand over its inputs: this request alone ends
            self._log.error(f"a request could not be read: {one_line(error)}")
            self._refuse(responder, "INTERNAL", f"the request could not be read: {one_line(error)}")
            return
        self._begin(Flight(next(self._ids), responder, parsed, self._tokenizer), engine)

    def _begin(self, flight: Flight, engine: EngineClient) -> None:
        """Hand a request to the engine; from here on the output thread owns it."""
        parsed = flight.parsed
        self._flights[flight.request_id] = flight
        self._cancellations.add(flight.request_id, flight.responder)
        if self._log.debugging:
            prompt = self._tokenizer.decode(parsed.prompt_token_ids, skip_special_tokens=False)
            self._log.debug(
                f"request {flight.request_id}: {len(parsed.prompt_token_ids)} tokens: {prompt!r}: {parsed.sampling}"
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
        flight.sent = True
        # The engine may have died between: whoever takes the request out of the table answers it.
        if self._engine.engine is not engine:
            self._fail_lost(flight, self._engine.lost)

    def _overflow(self, engine: EngineClient, num_completions: int, tenant: str | None = None) -> str | None:
        """Why the queue has no place for a request, if it has none. `tenant` of None: it may be anybody's.

        The engine would say the same, a step later, and of each completion by itself.
        """
        all_waiting, limit = engine.num_waiting, self._config.max_queue_size
        num_more = num_completions - engine.num_free_rows
        waiting = all_waiting if tenant is None else engine.num_waiting_of(tenant)
        is_full = all_waiting + num_more > TENANTS_IN_QUEUE * limit
        if tenant is not None and all_waiting + num_more > 0:
            is_full = is_full or waiting + num_more > limit
        if not is_full:
            return None
        return (
            f"{waiting} requests wait already, this one has {num_completions}, and max_queue_size is {limit}; try "
            "again later"
        )

    def _parsed(self, request: Any, engine: EngineClient) -> ParsedRequest:
        """The request, checked and tokenised. Raises `QueueFullError`, and what `parse_request` raises."""

        def check_queue(sampling: SamplingParams) -> None:
            if (overflow := self._overflow(engine, sampling.n, sampling.tenant)) is not None:
                raise QueueFullError(overflow)

        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            parameters = request.parameters()
        except UnicodeDecodeError:
            # Triton lets half a surrogate pair of HTTP's JSON pass.
            raise InputError("the request's parameters are not UTF-8 text") from None
        return parse_request(inputs, parameters, self._tokenizer, self._engine.ready, self._rules, check_queue)

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
        failure: Exception | None = None
        try:
            while not self._ended:
                self._turn()
        except Exception as error:  # noqa: BLE001 - a fault of ours: said in the log, and the end of this process
            failure = error
            self._say_why(error)
        self._ended = True
        # The clients first: the engine may take seconds to end.
        self._fail_all("INTERNAL", BROKEN if failure is not None else SHUT_DOWN)
        for last in (self._engine.close, self._metrics.forget_engine, self._metrics.flush):
            try:
                last()
            except Exception as error:  # noqa: BLE001 - what comes after must happen all the same
                self._say_why(error)
        # Requests that came in as the engine was closed.
        self._fail_all("INTERNAL", SHUT_DOWN)
        self._drained.set()
        if failure is not None and not self._closing:
            self._abandon()

    def _end_with_server(self, server: WatchedProcess) -> None:
        """End this process after the server, also when a call to it never returns. The engine watches as well, in case
        such a call holds the interpreter's lock."""
        server.wait()
        time.sleep(SERVER_END_S)
        self._abandon()

    def _say_why(self, error: Exception) -> None:
        """The error in Triton's log, and where it came from on standard error, in case the log cannot be reached."""
        self._log.error(f"the model stops: {one_line(error)}; the server must be restarted")
        traceback.print_exception(error, file=sys.stderr)

    def _turn(self) -> None:
        """Read what the engine has said, answer, and do what is due now and then."""
        patience_s = self._cancellations.timeout_s() if self._flights else IDLE_S
        if self._has_ended:
            patience_s = min(patience_s, METRICS_ENDED_S)
        try:
            outputs = self._engine.receive(int(patience_s * 1000))
        except EngineLost as lost:
            outputs = []
            # A copy, and not those that the other thread is handing over: it sees afterwards that the engine is gone.
            for flight in [flight for flight in list(self._flights.values()) if flight.sent]:
                self._fail_lost(flight, lost)
            self._metrics.forget_engine()
            self._metrics.flush()
            self._activity.restart()
        # When this thread is behind, several steps are here at once: their tokens leave in one response.
        touched: dict[str, Flight] = {}
        for message in outputs:
            self._take(message, touched)
        ending = [flight for flight in touched.values() if flight.ended and flight.request_id in self._flights]
        for flight in touched.values():
            if not flight.ended:
                self._answer(flight)
        if ending:
            self._finish(ending)
        now = time.monotonic()
        self._heartbeat.beat(now)
        if self._server_memory.is_over(now):
            self._end_largest_stream()
        self._check_cancelled(now)
        self._stale = self._stale or bool(outputs or self._flights)
        due_s = METRICS_ENDED_S if self._has_ended else METRICS_BUSY_S if self._stale else METRICS_IDLE_S
        if now - self._flushed_at >= due_s:
            self._report(now)
        if self._closing and not self._flights:
            self._drained.set()

    def _report(self, now: float, num_ending: int = 0) -> None:
        """Bring the metrics page up to date, and write the line of the minute. `num_ending` of the requests in flight
        are about to get their last response."""
        restarts = self._engine.num_restarts
        if restarts != self._num_restarts:
            self._metrics.count("dflash:engine_restarts_total", restarts - self._num_restarts)
            self._num_restarts = restarts
        self._metrics.set("dflash:engine_ready", float(self.ready))
        self._metrics.set("dflash:num_requests_in_flight", float(len(self._flights) - num_ending))
        self._metrics.set("dflash:engine_silence_seconds", self._engine.silence_s)
        self._metrics.set("dflash:frontend_heartbeat_timestamp_seconds", time.time())
        self._metrics.flush()
        self._flushed_at = now
        self._stale = self._has_ended = False
        if (line := self._activity.line(now)) is not None:
            self._log.info(line)

    def _take(self, outputs: StepOutputs, touched: dict[str, Flight]) -> None:
        for rejected in outputs.rejected:
            self._reject(rejected)
        stopped: dict[str, int] = {}
        orphans: list[str] = []
        for delta in outputs.deltas:
            flight = self._flights.get(flight_id(delta.request_id))
            if flight is None:
                # Cancelled or refused, perhaps while its completions were still being sent to the engine.
                if delta.finish_reason is None:
                    orphans.append(delta.request_id)
            elif self._add(flight, delta):
                touched[flight.request_id] = flight
                if delta.finish_reason is None and flight.has_ended(delta.request_id):
                    stopped[delta.request_id] = flight.num_tokens(delta.request_id)
        if stopped:
            self._engine.send(AbortRequests(list(stopped), stopped))
        if orphans:
            self._engine.send(AbortRequests(orphans))
        self._metrics.observe_step(outputs.phase_seconds)
        if outputs.stats is not None:
            self._metrics.follow(outputs.stats)
            self._activity.follow(outputs.stats)

    def _add(self, flight: Flight, delta: TokenDelta) -> bool:
        """Add new tokens to their request; False when that ended it with an error."""
        try:
            num_gaps, gap_s = flight.add(delta)
        except Exception as error:  # noqa: BLE001 - a fault in one request's text must not reach the others
            self._log.error(f"request {flight.request_id} failed: {one_line(error)}")
            self._give_up(flight, "INTERNAL", f"the new tokens could not be turned into text: {one_line(error)}")
            return False
        if num_gaps:
            self._metrics.observe("dflash:inter_token_latency_seconds", gap_s, times=num_gaps)
        if flight.num_bytes > self._max_response_bytes:
            self._give_up(
                flight,
                "INVALID_ARGUMENT",
                f"the answer has grown past max_response_mb ({self._config.max_response_mb:g} MB); ask for fewer "
                "tokens, completions or log-probabilities",
            )
            return False
        return True

    def _answer(self, flight: Flight) -> None:
        """Send what a request has for its client, if anything. It stays in flight until its last response was sent."""
        if flight.request_id not in self._flights or not flight.due:
            return
        final, new_tokens, first = flight.ended, flight.num_new_tokens, not flight.answered
        try:
            flight.responder.send(self._responses.output(flight), final)
        except Exception as error:  # noqa: BLE001 - SendFailed, or an answer that cannot even be built
            reason = str(error) if isinstance(error, SendFailed) else one_line(error)
            self._log.error(f"request {flight.request_id} failed: {reason}")
            self._give_up(flight, "INTERNAL", reason)
            return
        flight.clear()
        if final:
            self._flights.pop(flight.request_id, None)
        else:
            count_tokens(self._metrics, flight, new_tokens, first)

    def _finish(self, flights: list[Flight]) -> None:
        """Send the last responses of requests. They are counted and on the metrics page first: who asks for that page
        with the answer in hand finds it there, unless very many requests end every second."""
        started = time.monotonic()
        for flight in flights:
            count_tokens(self._metrics, flight, flight.num_new_tokens, not flight.answered)
            count_finished(self._metrics, flight, started)
        self._has_ended = True
        if started >= self._next_ended_report_at:
            self._report(started, len(flights))
            ended = time.monotonic()
            self._next_ended_report_at = ended + (ended - started) / METRICS_ENDED_SHARE
        for flight in flights:
            self._answer(flight)

    def _give_up(self, flight: Flight, status: str, message: str) -> None:
        """End a request that the engine still works on, with an error. The others go on."""
        if self._flights.pop(flight.request_id, None) is not None:
            self._engine.send(AbortRequests(flight.engine_ids))
            self._refuse(flight.responder, status, message)

    def _check_cancelled(self, now: float) -> None:
        """Ask Triton for some of the requests whether their client is still there."""
        gone, failed = self._cancellations.ask(now, self._flights)
        for request_id in gone:
            if (flight := self._flights.get(request_id)) is not None:
                self._give_up(flight, "CANCELLED", "the request was cancelled")
        for request_id, error in failed:
            self._log.error(f"request {request_id} failed: {error}")
            if (flight := self._flights.get(request_id)) is not None:
                self._give_up(flight, "INTERNAL", str(error))

    def _reject(self, rejected: RequestRejected) -> None:
        """One completion that the engine cannot take ends the whole request."""
        flight = self._flights.get(flight_id(rejected.request_id))
        if flight is not None:
            self._give_up(flight, rejected.status, rejected.message)

    def _end_largest_stream(self) -> None:
        """End the stream that was sent the most, if any was sent much: `tritonserver` holds too much, and nothing tells
        for whom."""
        # A copy: the other thread adds requests.
        streams = (flight for flight in list(self._flights.values()) if flight.parsed.stream)
        largest = max(streams, key=lambda flight: flight.responder.num_bytes_sent, default=None)
        if largest is None or largest.responder.num_bytes_sent < SMALLEST_STREAM_BYTES:
            return
        self._server_memory.note_ended()
        held = f"tritonserver holds {self._server_memory.num_bytes / 1e9:.1f} GB (max_server_memory_gb)"
        size = largest.responder.num_bytes_sent / 1e6
        self._log.warning(f"{held} and grows; the stream that was sent the most, {size:.1f} MB, is ended")
        self._give_up(
            largest,
            "UNAVAILABLE",
            f"{held}, most likely responses that clients do not read, and this stream was sent the most ({size:.1f} "
            "MB); read faster, or ask for fewer log-probabilities",
        )

    def _fail_lost(self, flight: Flight, lost: EngineLost | None) -> None:
        """Answer a request whose engine is gone, unless it was answered. One that never reached the engine may be sent
        again. Not so one that may have caused the error that the engine ended with: sent again, it would end the next
        engine as well."""
        if self._flights.pop(flight.request_id, None) is None:
            return
        if lost is not None and (lost.has_reason or not all(map(lost.engine.is_unconfirmed, flight.engine_ids))):
            self._refuse(flight.responder, "INTERNAL", str(lost))
        else:
            self._refuse(flight.responder, "UNAVAILABLE", RESTARTING)

    def _fail_all(self, status: str, message: str) -> None:
        for flight in self._take_all():
            self._refuse(flight.responder, status, message)

    def _take_all(self) -> Iterator[Flight]:
        """Take each request out of the table; the other thread may take its newest out as well (`_begin`)."""
        with contextlib.suppress(KeyError):
            while True:
                yield self._flights.popitem()[1]

    def _refuse(self, responder: Responder, status: str, message: str) -> None:
        """End a request with an error."""
        if not responder.fail(status, message):
            self._log.error(f"a client could not be told of its error: {status}: {message}")
        self._metrics.count("dflash:request_errors_total", 1, status)
        self._stale = True

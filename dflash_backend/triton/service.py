"""The service behind the Triton model: takes requests, feeds the engine, and sends the responses.

Two threads. Triton's thread calls `submit`, which validates, tokenises and sends to the engine. The output thread reads
the engine and owns every request from then on: it alone sends responses, asks about cancellation and removes requests,
so no lock is needed. It also restarts an engine that has died, and ends the engine.

Each call to Triton costs a round trip between processes. So all new tokens of a request share a response, and
cancellation and metrics are looked at only now and then.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.drafters.resolve import resolve_target_dir
from dflash_backend.engine_client.engines import RESTARTING, EngineOutputs, NoEngineError, Placement
from dflash_backend.engine_client.kv_publisher import make_publishers
from dflash_backend.engine_client.replicas import make_engines
from dflash_backend.engine_client.supervisor import EngineLost
from dflash_backend.process_watch import WatchedProcess
from dflash_backend.text.output import RequestState
from dflash_backend.text.request import DELTA_STREAM, RequestRules, delta_stream_name
from dflash_backend.text.sampling_defaults import read_sampling_defaults
from dflash_backend.text.tokenizer import InputError, Tokenizer
from dflash_backend.traffic import TrafficError, TrafficWriter
from dflash_backend.triton.description import describe_model
from dflash_backend.triton.drafter_swaps import INPUT as SWAP_DRAFTER
from dflash_backend.triton.drafter_swaps import DrafterSwaps
from dflash_backend.triton.heartbeat import HEARTBEAT_FILE, Heartbeat
from dflash_backend.triton.log import Log
from dflash_backend.triton.metrics import Metrics, engine_names
from dflash_backend.triton.reporter import FINISHED_S, Reporter
from dflash_backend.triton.responder import Responder, SendFailed, one_line, shared_memory_check
from dflash_backend.triton.responses import ResponseBuilder
from dflash_backend.triton.running_requests import RunningRequests, TritonRequest
from dflash_backend.triton.server_memory import ServerMemory, private_memory
from dflash_backend.triton.submission import Refused, RequestReader, input_text

# How long the output thread waits for outputs when there is no request to ask about.
IDLE_S = 0.25
# How long running requests may take to finish when the model is unloaded.
DRAIN_S = 10.0
# How long Triton's stub may take to end by itself after the server.
SERVER_END_S = 2.0
SHUT_DOWN = "the server was shut down while it worked on this request"
BROKEN = "the model stopped working while it worked on this request; the server's log says why"


def end_process() -> None:
    """End Triton's stub at once. A supervisor of the server notices that, and not a model that is up but dead."""
    os._exit(1)


class TritonService:
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
        as_vllm: bool = False,
        num_instances: int = 1,
    ) -> None:
        """Load the tokenizer and start the engine process, by `command` unless it is the usual one.

        `instance` is Triton's name of the model instance, by default that of a model's first one. This process ends
        with the process `server_pid`, if one is given. `abandon` is called when the output thread has died, or the
        server has ended. `as_vllm`: the model stands in for one of Triton's vLLM backend. `num_instances`: of the
        model. Raises `ConfigError`, `CheckpointError` or `EngineError`.
        """
        self._log = Log(pb_utils, config.log_level, as_vllm)
        self._config = config
        self._abandon = abandon
        self._responses = ResponseBuilder(pb_utils, config.report_cached_tokens)
        self._fits_shared_memory = shared_memory_check()
        self._heartbeat = Heartbeat(os.environ.get(HEARTBEAT_FILE), self._log.warning)
        self._ids = map(str, itertools.count())
        self._closing = self._ended = False  # ended: the output thread must end, whatever runs; then `_drained` is set
        self._drained = threading.Event()
        self._load(command, server_pid)
        # Last: Triton 2.51 crashes when a model that has made metrics fails to load while it replaces one that serves.
        self._metrics = self._make_metrics(pb_utils, model_name, instance or f"{model_name}_0_0", version)
        self._reporter = Reporter(
            self._metrics,
            self._log,
            self._engines,
            lambda: self._stopped() is None,
            lambda: self._engines.ready.has_drafter,
        )
        max_bytes = int(config.max_server_memory_gb * 1e9) if server_pid else 0
        memory = ServerMemory(max_bytes, lambda: private_memory(server_pid))
        self._publishers = make_publishers(config, self._log.warning)
        self._requests = RunningRequests(
            config, self._engines, self._responses, self._metrics, self._reporter, self._log, memory, self._traffic,
            as_vllm,
        )  # fmt: skip
        self._swaps = DrafterSwaps(config, self._engines, self._responses, self._metrics, self._log, num_instances)
        several = f"{len(self._engines)} engines, each: " if len(self._engines) > 1 else ""
        self._log.info(f"ready: {several}{self._engines.ready.description}")
        self._reporter.report(time.monotonic(), 0)
        self._thread = threading.Thread(target=self._run, name="dflash-output", daemon=True)
        self._thread.start()
        if server_pid:
            self._end_with(WatchedProcess(server_pid))

    def _make_metrics(self, pb_utils: ModuleType, model_name: str, instance: str, version: str) -> Metrics:
        return Metrics(
            pb_utils,
            model_name,
            instance,
            self._log.warning,
            version,
            enabled=self._config.report_custom_metrics is not False,
            vllm_names=self._config.report_custom_metrics is True,
            engines=engine_names(instance, len(self._engines)),
        )

    def _load(self, command: Sequence[str] | None, server_pid: int) -> None:
        """Start the engine, read the tokenizer meanwhile, and wait until the engine is ready."""
        config = self._config
        settings = sorted(config.as_strings().items())
        self._log.info("settings: " + " ".join(f"{name}={value}" for name, value in settings))
        target_dir = resolve_target_dir(config, lambda text: self._log.info(f"loading 0%: {text}"))
        self._traffic = self._make_traffic(target_dir)
        self._log.info("loading 0%: starting the engine process")
        self._engines = make_engines(config, self._log, command, server_pid)
        self._engines.start()
        try:
            self._tokenizer = Tokenizer.load(target_dir, config.message_special_tokens == "control")
            defaults = read_sampling_defaults(target_dir) if config.generation_config == "auto" else {}
        except ValueError:
            self._engines.close()
            raise
        rules = RequestRules(config.max_num_seqs, config.require_cache_salt, config.stream_interval, defaults)
        self._target_dir, self._rules = target_dir, rules
        self._reader = RequestReader(self._tokenizer, rules, config.max_queue_size, self._log)
        self._engines.wait_until_ready()

    def _make_traffic(self, target_dir: Path) -> TrafficWriter | None:
        """What writes prompts and answers down, where that is asked for. Raises `ConfigError`."""
        config = self._config
        if not config.record_traffic:
            return None
        try:
            return TrafficWriter(
                Path(config.record_traffic),
                target_dir,
                config.record_traffic_rate,
                int(config.record_traffic_gb * 1e9),
                lambda name, amount, label: self._metrics.count(name, amount, label),
                self._log.warning,
            )
        except TrafficError as error:
            raise ConfigError(f"setting 'record_traffic' is {config.record_traffic!r}: {error}") from None

    @property
    def ready(self) -> bool:
        """Whether a request that is sent now would be taken."""
        return self._refusal() is None and self._engines.any_alive

    def submit(self, request: Any) -> None:
        """Take one Triton request. Raises nothing: every error is a response."""
        responder = Responder(
            request.get_response_sender(), self._responses.error, self._responses.final, self._fits_shared_memory
        )
        special = special_input(request)
        counted = special is None or special.name() == SWAP_DRAFTER
        # The output thread may not have noticed yet that an engine is dead.
        if (refusal := self._refusal()) is not None or not self._engines.any_alive:
            # Who asks whether requests are taken, over and over, has had none refused.
            self._requests.end_with_error(responder, "UNAVAILABLE", refusal or RESTARTING, counted=counted)
            return
        try:
            if special is not None:
                self._take_special(special, responder)
                return
            parsed, full = self._reader.read(request, self._engines)
            state = RequestState(next(self._ids), parsed, self._tokenizer)
            placement = self._engines.place(parsed.prompt_token_ids, parsed.sampling, full)
        except Refused as refused:
            self._requests.end_with_error(responder, refused.status, str(refused))
        except InputError as error:
            # The tokenizer cannot decode the prompt's last tokens.
            self._requests.end_with_error(responder, "INVALID_ARGUMENT", str(error))
        except NoEngineError as error:
            self._requests.end_with_error(responder, "UNAVAILABLE", str(error))
        else:
            self._start(state, responder, placement)

    def _take_special(self, tensor: Any, responder: Responder) -> None:
        """Take a request that generates nothing. Raises `Refused` or `InputError`."""
        if tensor.name() == SWAP_DRAFTER:
            self._swaps.begin(input_text(tensor), responder)
        elif tensor.name() == DELTA_STREAM:
            self._requests.delta_streams.open(delta_stream_name(input_text(tensor)), responder)
        else:
            self._describe(responder)

    def _describe(self, responder: Responder) -> None:
        """Answer with what a front end must know of the model."""
        text = describe_model(self._config, self._engines.ready, self._target_dir, self._rules)
        try:
            responder.send(self._responses.description(text), final=True)
        except SendFailed as error:
            self._log.error(str(error))

    def _start(self, state: RequestState, responder: Responder, placement: Placement) -> None:
        """Send a request to its engine."""
        if self._log.debugging:
            token_ids = state.parsed.prompt_token_ids
            prompt = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            self._log.debug(f"request {state.request_id}: {len(token_ids)} tokens: {prompt!r}: {state.parsed.sampling}")
        if len(self._engines) > 1:
            self._metrics.count("dflash:requests_routed_total", 1, self._metrics.engines[placement.engine])
        messages = list(state.generation_requests(self._tokenizer.eos_token_ids, self._config.request_timeout_s))
        self._requests.start(TritonRequest(state, responder, placement, messages))

    def close(self) -> None:
        """Refuse new requests, let running ones finish for a while, then end the engine process."""
        if self._closing:
            return
        self._closing = True
        self._engines.wake()
        if not self._drained.wait(DRAIN_S):
            self._log.warning(f"{len(self._requests)} requests were still running at the shutdown")
        self._ended = True
        self._engines.wake()
        self._thread.join()

    def _refusal(self) -> str | None:
        """Why a new request cannot be taken, if it cannot; the status is UNAVAILABLE."""
        return self._stopped() or (None if self._engines.up else RESTARTING)

    def _stopped(self) -> str | None:
        """Why no request will be taken any more, if none will."""
        if self._closing:
            return "the server is shutting down; try again later"
        if self._ended:
            return "the model has stopped working; the server's log says why; load it again or restart the server"
        return None

    def _run(self) -> None:
        """The output thread. However it ends, every request gets an answer, and the engine ends."""
        failure: Exception | None = None
        try:
            while not self._ended:
                self._turn()
        except Exception as error:  # noqa: BLE001 - a defect of this process: it is logged, and the process ends
            failure = error
            self._log_failure(error)
        self._ended = True
        # The clients first: the engine may take seconds to end.
        self._requests.fail_all("INTERNAL", BROKEN if failure is not None else SHUT_DOWN)
        self._requests.delta_streams.close_all()
        self._swaps.fail_all(BROKEN if failure is not None else SHUT_DOWN)
        closers = [publisher.close for publisher in self._publishers]
        if self._traffic is not None:
            closers.append(self._traffic.close)
        for last in (self._engines.close, *closers, self._metrics.reset_engines, self._metrics.flush):
            try:
                last()
            except Exception as error:  # noqa: BLE001 - the steps after it must run all the same
                self._log_failure(error)
        # Requests that arrived as the engine was closed.
        self._requests.fail_all("INTERNAL", SHUT_DOWN)
        self._swaps.fail_all(SHUT_DOWN)
        self._drained.set()
        if failure is not None and not self._closing:
            self._abandon()

    def _end_with(self, server: WatchedProcess) -> None:
        """End this process after the server, even if a call to the server never returns. The engine watches as well, in
        case such a call holds the interpreter's lock."""

        def end() -> None:
            server.wait()
            time.sleep(SERVER_END_S)
            self._abandon()

        threading.Thread(target=end, name="dflash-server-watch", daemon=True).start()

    def _log_failure(self, error: Exception) -> None:
        """The error in Triton's log, and its traceback on standard error, in case the log cannot be reached."""
        self._log.error(f"the model stops: {one_line(error)}; the server must be restarted")
        traceback.print_exception(error, file=sys.stderr)

    def _turn(self) -> None:
        """Read the engine's outputs, answer, and do the regular work that is due."""
        outputs = self._receive()
        if self._publishers:
            self._publish(outputs)
        self._requests.process(outputs)
        self._swaps.take(outputs)
        now = time.monotonic()
        self._heartbeat.beat(now, len(self._requests))
        self._requests.check_server_memory(now)
        self._requests.check_cancelled(now)
        self._swaps.check_cancelled(now)
        if outputs or self._requests:
            self._reporter.note_change()
        self._reporter.report_if_due(now, len(self._requests))
        if self._closing and not self._requests:
            self._drained.set()

    def _publish(self, outputs: list[EngineOutputs]) -> None:
        """Publish what the engines report of their prefix caches."""
        block_size = self._engines.ready.kv_block_size
        for index, message in outputs:
            if message.kv_events:
                self._publishers[index].publish(message.kv_events, block_size)
                self._metrics.count("dflash:kv_events_total", len(message.kv_events))

    def _receive(self) -> list[EngineOutputs]:
        timeout_s = self._requests.poll_s if self._requests else IDLE_S
        if self._reporter.has_finished:
            timeout_s = min(timeout_s, FINISHED_S)
        try:
            return self._engines.receive(math.ceil(timeout_s * 1000))
        except EngineLost as lost:
            # The page says so before the first client knows: one that then waits for readiness sees the next engine's.
            self._reporter.reset_engine(lost.index)
            self._requests.fail_all_lost(lost)
            self._swaps.lose_engine(lost.index)
            if self._publishers:
                self._publishers[lost.index].clear()
            return []


def special_input(request: Any) -> Any | None:
    """The input of a Triton request that asks for something else than tokens, if there is one: `describe`, where it is
    true, `swap_drafter`, or `delta_stream` where there is no other."""
    tensors = request.inputs()
    for tensor in tensors:
        name = tensor.name()
        is_alone = name == DELTA_STREAM and len(tensors) == 1
        if is_alone or name == SWAP_DRAFTER or (name == "describe" and tensor.as_numpy().any()):
            return tensor
    return None

"""The engine's own process: builds the engine, then steps it and talks to Triton's Python stub over ZeroMQ.

`engine_client.client` starts it as `python -m dflash_backend.engine.process` and writes an `EngineSetup` to its
standard input, which then stays open: its end says that the stub is gone. The process ends on `Shutdown`, on
`END_SIGNAL`, and with the stub. It ignores SIGINT, and SIGTERM once it has loaded: a Ctrl-C in a terminal and a service
manager that stops all processes of a server reach it as well, and the stub decides.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import zmq

from dflash_backend.config import EngineConfig
from dflash_backend.core.admission import RequestError
from dflash_backend.core.drafter_swap import DrafterSwap
from dflash_backend.heap import collector_at_rest, freeze_heap
from dflash_backend.messages import (
    ENCODER,
    END_SIGNAL,
    ENGINE_INPUT,
    AbortRequests,
    DrafterSwapped,
    EngineCoreOutputs,
    EngineFailed,
    EngineOutput,
    EngineSetup,
    GenerationRequest,
    LoadProgress,
    QueueState,
    RequestFailed,
    Shutdown,
    SwapDrafter,
)
from dflash_backend.process_watch import WatchedProcess

if TYPE_CHECKING:
    from dflash_backend.engine.build import BuiltEngine

_log = logging.getLogger(__name__)
# `serve` shows warnings and errors of our own modules (dflash_cli/launcher/server_log.py).
LOG_FORMAT = "dflash: engine: %(levelname)s: %(name)s: %(message)s"

STDIN = 0
# How long an idle engine sleeps before it looks whether it was told to end; a request wakes it at once.
IDLE_POLL_MS = 500
# And while KV is still to go to tiers.
MOVING_POLL_MS = 2
# And while KV is kept for other servers.
KEEPING_POLL_MS = 20
# And while a drafter is loaded beside the one that drafts.
LOADER_POLL_MS = 20
# How long that may take: as long as an engine (`supervisor.LOAD_TIMEOUT_S`).
DRAFTER_LOAD_S = 3600.0
# How often the engine speaks at least, between two steps and without any: the stub takes its silence for a hang.
BEAT_S = 1.0
# A flood of requests must not keep those that run from being stepped.
MESSAGES_A_STEP = 256
# How long the last message may take to leave; its reader is in this machine.
LINGER_MS = 2000
# How long the stub may take to end by itself after its server, which it notices within a second.
STUB_END_S = 3.0


Builder = Callable[[EngineConfig, Callable[[str, float], None]], "BuiltEngine"]


class Channel:
    """The two sockets: a PULL for what the stub says and a PUSH for what the engine answers."""

    def __init__(self, setup: EngineSetup) -> None:
        self._context = zmq.Context()
        self._inputs = self._context.socket(zmq.PULL)
        self._outputs = self._context.socket(zmq.PUSH)
        for socket in (self._inputs, self._outputs):
            # No bound: the engine bounds its queue itself, and a step must never wait for the stub.
            socket.set_hwm(0)
            socket.linger = LINGER_MS
        self._inputs.connect(setup.inputs)
        self._outputs.connect(setup.outputs)

    def receive(self, timeout_ms: int) -> list[bytes]:
        """Messages that have arrived, at most `MESSAGES_A_STEP`; waits at most `timeout_ms` for the first."""
        messages: list[bytes] = []
        while len(messages) < MESSAGES_A_STEP and self._inputs.poll(0 if messages else timeout_ms):
            messages.append(self._inputs.recv(zmq.NOBLOCK))
        return messages

    def send(self, message: EngineOutput) -> None:
        """Queue a message for the stub."""
        self._outputs.send(ENCODER.encode(message))

    def close(self) -> None:
        """Let what is queued leave, then close."""
        self._context.destroy(linger=LINGER_MS)


class EngineLoop:
    """Takes what the stub sent, steps the engine while it has work, and sends what came of it."""

    def __init__(self, built: BuiltEngine, channel: Channel) -> None:
        self._core = built.core
        self._core.beat = self._beat
        self._check = built.check
        self._channel = channel
        self._trace = built.trace
        self._drafters = built.drafters
        # The thread that loads a drafter, and what it has to say, once; which drafter that is, None where it is not
        # wanted any more; and when the thread is given up, by `time.monotonic`.
        self._loader: threading.Thread | None = None
        self._loaded: queue.SimpleQueue[DrafterSwap | DrafterSwapped] = queue.SimpleQueue()
        self._loading: SwapDrafter | None = None
        self._load_until = 0.0
        self._ending = False
        self._num_received = 0
        self._spoke_at = 0.0

    def end(self) -> None:
        """Make `run` return before the next step. Safe in a signal handler."""
        self._ending = True

    def run(self) -> None:
        """Serve until `Shutdown` or `end`."""
        while True:
            busy = self._core.has_unfinished()
            if not busy:
                self._check()
            self._take(self._channel.receive(0 if busy else self._idle_ms()))
            if self._ending:
                return
            if self._loader is not None:
                self._follow_loading()
            moves = self._core.is_moving or self._core.is_keeping
            if self._core.has_unfinished():
                outputs = self._core.step()
                started = time.monotonic()
                work = outputs.deltas or outputs.failed or outputs.phase_seconds
                if work or outputs.stats or outputs.kv_events or outputs.drafter_swaps:
                    self._say(outputs)
                if self._trace is not None:
                    self._trace.messages("send", started, len(outputs.deltas))
                self._core.collect_drafts()
            elif busy:
                self._say(self._core.idle_outputs())
            elif moves:
                outputs = self._core.advance_moves()
                if outputs.stats or outputs.kv_events:
                    self._say(outputs)
            if time.monotonic() - self._spoke_at >= BEAT_S:
                self._say(EngineCoreOutputs())

    def _idle_ms(self) -> int:
        """How long an idle engine may sleep before there is something to do for it that no message tells."""
        if self._core.is_moving:
            return MOVING_POLL_MS
        if self._core.is_keeping:
            return KEEPING_POLL_MS
        return IDLE_POLL_MS if self._loader is None else LOADER_POLL_MS

    def _take(self, messages: list[bytes]) -> None:
        """Do what the messages say. One that cannot be done is answered, and the others are not affected."""
        started = time.monotonic()
        failed: list[RequestFailed] = []
        decoded = [ENGINE_INPUT.decode(raw) for raw in messages]
        if requests := [message for message in decoded if isinstance(message, GenerationRequest)]:
            # Before anything is done with them: what dies with this process from here on was worked on.
            self._num_received += len(requests)
            self._say(EngineCoreOutputs(queue=_with_more_waiting(self._queue(), requests)))
        for message in decoded:
            if isinstance(message, GenerationRequest):
                if (refusal := self._add(message)) is not None:
                    failed.append(refusal)
            elif isinstance(message, AbortRequests):
                self._core.abort(message.request_ids, message.num_output_tokens)
                if self._loading is not None and self._loading.swap_id in message.request_ids:
                    self._drop_loading("the client that asked for it has left")
            elif isinstance(message, SwapDrafter):
                self._begin_loading(message)
            elif isinstance(message, Shutdown):
                self._ending = True
        if failed:
            self._say(EngineCoreOutputs(failed=failed))
        if messages and self._trace is not None:
            self._trace.messages("receive", started, len(messages))

    def _add(self, request: GenerationRequest) -> RequestFailed | None:
        """Queue a request, or say why it cannot be. A defect that one request shows must not end the others."""
        try:
            self._core.add_request(request)
        except RequestError as error:
            return RequestFailed(request.request_id, error.status, error.message)
        except Exception as error:  # noqa: BLE001
            _log.exception("request %s could not be queued", request.request_id)
            message = f"the request could not be queued ({type(error).__name__}: {error}); the server's log has more"
            return RequestFailed(request.request_id, "INTERNAL", message)
        return None

    def _begin_loading(self, wanted: SwapDrafter) -> None:
        """Load a drafter beside the one that drafts, in a thread, while steps go on."""
        drafters = self._drafters
        loaded: queue.SimpleQueue[DrafterSwap | DrafterSwapped] = queue.SimpleQueue()
        try:
            if drafters is None:
                reason = "this server was started without a drafter that is a model; set draft_model and restart it"
                raise RequestError("INVALID_ARGUMENT", reason)
            if self._loader is not None:
                raise RequestError("UNAVAILABLE", "another drafter is loaded; try again later")
            self._core.check_swap()
        except RequestError as error:
            self._refuse(wanted, error)
            return

        def load() -> None:
            try:
                loaded.put(drafters.load(wanted))
            except ValueError as error:
                loaded.put(DrafterSwapped(wanted.swap_id, "refused", str(error)))
            except Exception as error:  # noqa: BLE001 - it must be answered, whatever it is
                _log.exception("the drafter %s could not be loaded", wanted.draft_model)
                reason = f"it could not be loaded ({type(error).__name__}: {error}); the server's log has more"
                loaded.put(DrafterSwapped(wanted.swap_id, "refused", reason, "INTERNAL"))

        self._loading, self._loaded, self._load_until = wanted, loaded, time.monotonic() + DRAFTER_LOAD_S
        self._loader = threading.Thread(target=load, name="drafter-loader", daemon=True)
        self._loader.start()

    def _follow_loading(self) -> None:
        """End what has loaded, and what has loaded for too long: its thread may hang, and another drafter may come."""
        if not self._loaded.empty():
            self._end_loading()
        elif time.monotonic() > self._load_until:
            self._drop_loading(f"it was not loaded within {DRAFTER_LOAD_S:g} s; the disk may hang")
            self._loader = None

    def _drop_loading(self, reason: str) -> None:
        """What is loaded is not wanted any more. Its thread goes on: until it ends, no other one is started."""
        if self._loading is not None:
            self._refuse(self._loading, RequestError("UNAVAILABLE", reason))
            self._loading = None

    def _end_loading(self) -> None:
        """Give the core what was loaded, or say why it was not."""
        loaded, wanted = self._loaded.get(), self._loading
        self._loader = self._loading = None
        if wanted is None:
            return
        if isinstance(loaded, DrafterSwapped):
            self._say(EngineCoreOutputs(drafter_swaps=[loaded]))
            return
        try:
            self._core.swap_drafter(loaded)
        except RequestError as error:
            self._refuse(loaded.wanted, error)

    def _refuse(self, wanted: SwapDrafter, error: RequestError) -> None:
        said = DrafterSwapped(wanted.swap_id, "refused", error.message, error.status)
        self._say(EngineCoreOutputs(drafter_swaps=[said]))

    def _say(self, outputs: EngineCoreOutputs) -> None:
        """Send it with how full the queue is, unless it says so itself."""
        self._send(msgspec.structs.replace(outputs, queue=outputs.queue or self._queue()))

    def _send(self, outputs: EngineCoreOutputs) -> None:
        self._channel.send(outputs)
        self._spoke_at = time.monotonic()

    def _beat(self) -> None:
        """Within a step that takes long: say something, which need not be how full the queue is."""
        if time.monotonic() - self._spoke_at >= BEAT_S:
            self._send(EngineCoreOutputs())

    def _queue(self) -> QueueState:
        core = self._core
        return QueueState(self._num_received, core.num_waiting, core.num_free_rows, core.crowded_tenants())


def _with_more_waiting(state: QueueState, requests: list[GenerationRequest]) -> QueueState:
    """The queue with requests that were received and are not in it yet. All their tenants count as crowded: none may
    send more than its share in the meantime."""
    crowded = Counter(state.crowded) + Counter(request.sampling.tenant for request in requests)
    return msgspec.structs.replace(state, num_waiting=state.num_waiting + len(requests), crowded=dict(crowded))


@contextmanager
def _failure_report(channel: Channel, doing: str) -> Iterator[None]:
    """Tells the stub why the block was left, when that was an error; the error goes on."""
    try:
        yield
    except Exception as error:
        channel.send(EngineFailed(f"{doing}: {type(error).__name__}: {error}"))
        raise


def serve(build: Builder, load_errors: tuple[type[Exception], ...] = (ValueError,)) -> int:
    """Run the engine that `build` makes, as told on standard input, and return the exit status.

    `load_errors` are what `build` raises with a sentence for the operator; any other error is passed on with its type,
    and its trace goes to standard error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSetup)
    # Children of this process must not hold the lifeline: its end is how the stub sees this process die.
    os.set_inheritable(setup.lifeline, False)
    threading.Thread(target=_end_with_stub, args=(setup.socket_dir,), name="stub-watch", daemon=True).start()
    if setup.server_pid:
        watch = (WatchedProcess(setup.server_pid), WatchedProcess(os.getppid()), setup.socket_dir)
        threading.Thread(target=_end_with_server, args=watch, name="server-watch", daemon=True).start()
    channel = Channel(setup)
    try:
        with _failure_report(channel, "the engine could not start"):
            try:
                config = EngineConfig.from_values(setup.settings)
                # What libraries have to say goes to standard error, which is the server's.
                logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT)
                built = build(config, lambda message, fraction: channel.send(LoadProgress(message, fraction)))
            except load_errors as error:
                channel.send(EngineFailed(str(error), setup_error=True))
                return 1
        freeze_heap()
        loop = EngineLoop(built, channel)
        signal.signal(END_SIGNAL, lambda number, frame: loop.end())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.send(built.ready)
        with _failure_report(channel, "the engine stopped"):
            loop.run()
        if built.trace is not None:
            built.trace.close()
        return 0
    finally:
        channel.close()


def _end_with_stub(socket_dir: str) -> None:
    """Wait for the end of standard input, then end this process at once, whatever it is doing.

    The stub closes it only after the engine has ended, so it closes early only when the stub was killed; its
    sockets are then left to clean up here.
    """
    # Not through sys.stdin: a thread that waits in there would stop the interpreter from ending normally.
    while os.read(STDIN, 4096):
        pass
    shutil.rmtree(socket_dir, ignore_errors=True)
    os._exit(1)


def _end_with_server(server: WatchedProcess, stub: WatchedProcess, socket_dir: str) -> None:
    """Wait for the end of the server, then make the stub end, and with it this process.

    The stub may not be able to: it may be in a call to the server that never returns, and hold its interpreter's
    lock meanwhile, so that no thread of its own can notice.
    """
    server.wait()
    time.sleep(STUB_END_S)
    stub.kill()
    # Once it has ended, `_end_with_stub` ends this process; this is for a pipe that another process holds open.
    time.sleep(STUB_END_S)
    shutil.rmtree(socket_dir, ignore_errors=True)
    os._exit(1)


def build_claimed(config: EngineConfig, progress: Callable[[str, float], None]) -> BuiltEngine:
    """`build_engine`, with all the memory of its KV cache: a server must not find too little of it while it serves."""
    from dflash_backend.engine.build import build_engine  # loads torch

    built = build_engine(config, progress)
    built.runner.model.kv.claim()
    return built


def main() -> int:
    """The engine of `dflash_backend.engine.build`. Importing it loads torch, which is why that happens here."""
    with collector_at_rest():
        from dflash_backend.engine.build import LOAD_ERRORS

    return serve(build_claimed, LOAD_ERRORS)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through sys.exit: everything is closed by now, and taking the interpreter down with torch in it lasts up to
    # two seconds, for which a server that stops would wait.
    os._exit(status)

"""Starts one engine process, exchanges messages with it, notices when it dies, and ends it.

The process is a plain subprocess, not `multiprocessing`'s: inside Triton's stub the main program is no Python script,
so the spawn method has no main module to import and may have no `sys.executable`. The end of the process's standard
input tells the engine that the stub is gone, however the stub ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import zmq

from dflash_backend.config import EngineConfig
from dflash_backend.messages import (
    ENCODER,
    END_SIGNAL,
    ENGINE_OUTPUT,
    AbortRequests,
    EngineCoreOutputs,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineReady,
    EngineSetup,
    GenerationRequest,
    LoadProgress,
    QueueState,
    Shutdown,
)

ENGINE_MODULE = "dflash_backend.engine.process"
SHUTDOWN_S = 3.0
END_S = 2.0
# A process that waits in the kernel, such as for a driver that has lost its device, cannot end before the call returns.
KILL_S = 10.0
# The most messages of one `receive`: a fast engine must not keep its reader from all other work.
MESSAGES_A_TURN = 64
# How long the second of the two connections may take after the first.
CONNECT_MS = 5000
# How long the last messages of a process that has died may take to arrive.
FINAL_MESSAGES_MS = 200
# How long a process may take from the end of its lifeline to its exit status.
REAP_S = 1.0
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class EngineError(Exception):
    """The engine process could not start, or has died. The message is for the operator. `setup_error`: the settings or
    files are at fault."""

    def __init__(self, message: str, setup_error: bool = False) -> None:
        super().__init__(message)
        self.setup_error = setup_error


class QueueLoad(NamedTuple):
    """How full an engine's queue is: the requests that wait there, or that it has not confirmed, of all tenants and of
    one, and how many the engine may run beside those that run, by its last message. Of a tenant, those at the engine
    count when they are a sixteenth of a queue or more."""

    all_tenants: int
    of_tenant: int
    num_free_rows: int


def engine_command(module: str = ENGINE_MODULE) -> list[str]:
    """The command that runs an engine module in the Python of this process."""
    return [_interpreter(), "-m", module]


def _interpreter() -> str:
    """The Python that this process runs in: inside Triton's stub `sys.executable` may be the stub, or empty."""
    candidates = [
        sys.executable,
        os.path.join(sys.prefix, "bin", "python3"),
        os.path.join(sys.exec_prefix, "bin/python"),
    ]
    for candidate in candidates:
        if candidate and Path(candidate).name.startswith("python") and os.access(candidate, os.X_OK):
            return candidate
    raise EngineError(f"no Python interpreter was found in {sys.prefix} to run the engine process with")


class EngineClient:
    """One engine process. Any thread may call `send` and `wake`; all else is for one thread at a time."""

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] | None = None,
        server_pid: int = 0,
        environ: Mapping[str, str] = _NO_VARIABLES,
    ) -> None:
        """Start the process; `wait_until_ready` comes next. `command` is `engine_command()` unless given. When the
        process `server_pid` ends, the engine also ends this process, even one that hangs. `environ`: variables of the
        engine's environment beside this process's.

        Raises `EngineError` when the process cannot be started.
        """
        arguments = list(command or engine_command())
        theirs = self._prepare()
        self._send_lock = threading.Lock()
        self._num_requests_sent = 0
        # Requests that the engine has not confirmed, the oldest first: number among those sent, and tenant.
        self._unconfirmed: dict[str, tuple[int, str]] = {}
        self._unconfirmed_lock = threading.Lock()
        self._queue = QueueState(0, 0, config.max_num_seqs)
        self._ready = False
        self._poller = zmq.Poller()
        for source in (self._outputs, self._lifeline, self._wake_read):
            self._poller.register(source, zmq.POLLIN)
        setup = EngineSetup(
            config.as_strings(), self._address("in"), self._address("out"), self._dir, theirs, server_pid
        )
        self._process = self._start(arguments, environ, theirs)
        assert self._process.stdin is not None
        # If it died before it could read, `receive` says so.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(setup) + b"\n")
            self._process.stdin.flush()

    def _prepare(self) -> int:
        """Make the sockets, their folder and the pipes; returns the engine's end of the lifeline. Raises `EngineError`
        where the system has no place for them; then none of them is left."""
        with contextlib.ExitStack() as made:
            try:
                self._dir = tempfile.mkdtemp(prefix="dflash-")
                made.callback(shutil.rmtree, self._dir, ignore_errors=True)
                self._context = zmq.Context()
                made.callback(self._context.destroy, linger=0)
                self._inputs = self._bind(zmq.PUSH, "in")
                self._outputs = self._bind(zmq.PULL, "out")
                self._wake_read, self._wake_write = os.pipe()
                for end in (self._wake_read, self._wake_write):
                    made.callback(os.close, end)
                    os.set_blocking(end, False)
                # Last: what starts the process closes the engine's end.
                self._lifeline, theirs = os.pipe()
                made.callback(os.close, self._lifeline)
            except (OSError, zmq.ZMQError) as error:
                raise EngineError(
                    f"the engine process could not be started: {error}; free space in the folder for temporary files, "
                    "or allow this process more open files"
                ) from error
            self._made = made.pop_all()
        return theirs

    def _start(self, arguments: list[str], environ: Mapping[str, str], lifeline: int) -> subprocess.Popen[bytes]:
        """Start the process, which takes over its end of the lifeline."""
        try:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                env=_environment(environ),
                pass_fds=(lifeline,),
                # A session of its own: signals to the server's process group are for the stub.
                start_new_session=True,
            )
        except OSError as error:
            self._release()
            raise EngineError(f"the engine process could not be started: {error}") from error
        finally:
            os.close(lifeline)

    @property
    def pid(self) -> int:
        """The engine's process number."""
        return self._process.pid

    def wait_until_ready(self, on_progress: Callable[[str, float], None], timeout_s: float) -> EngineReady:
        """Wait until the models are loaded; `on_progress` is called with each `(message, fraction)`.

        Raises `EngineError` when the engine fails, dies, or takes longer than `timeout_s`; the process has ended then.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                if (ready := self.poll_ready(on_progress, int(remaining * 1000) + 1)) is not None:
                    return ready
            raise EngineError(f"the engine was not ready within {timeout_s:g} s")
        except EngineError:
            self.close()
            raise

    def poll_ready(self, on_progress: Callable[[str, float], None], timeout_ms: int) -> EngineReady | None:
        """Follow the loading for at most `timeout_ms`; None while it goes on. Raises `EngineError` when it fails."""
        for message in self.receive(timeout_ms):
            if isinstance(message, EngineReady):
                self._settle()
                return message
            if isinstance(message, EngineFailed):
                raise EngineError(message.message, message.setup_error)
            if isinstance(message, LoadProgress):
                on_progress(message.message, message.fraction)
        return None

    def queue_load(self, tenant: str | None = None) -> QueueLoad:
        """How full the engine's queue is, for all tenants and for `tenant`. Any thread may ask; it does not wait.

        Between two steps the engine compares these numbers with `max_queue_size`; here they are known without waiting
        for the step. A request that was aborted before the engine confirmed it does not count.
        """
        with self._unconfirmed_lock:
            queue = self._queue
            num_waiting = queue.num_waiting + len(self._unconfirmed)
            unconfirmed = sum(one == tenant for _, one in self._unconfirmed.values())
            of_tenant = num_waiting if tenant is None else queue.crowded.get(tenant, 0) + unconfirmed
            return QueueLoad(num_waiting, of_tenant, queue.num_free_rows)

    def is_unconfirmed(self, request_id: str) -> bool:
        """Whether this request was sent and the engine has not confirmed that it received it."""
        return request_id in self._unconfirmed

    @property
    def alive(self) -> bool:
        """Whether the process lives. Does not wait; any thread may ask."""
        with self._send_lock:
            if self._context.closed:
                return False
            lifeline = select.poll()
            lifeline.register(self._lifeline, select.POLLIN)
            return not lifeline.poll(0)

    def send(self, message: EngineInput) -> None:
        """Queue a message for the engine. Never waits. A message to a dead engine is lost; `receive` raises then."""
        raw = ENCODER.encode(message)
        with self._unconfirmed_lock:
            if isinstance(message, GenerationRequest):
                self._num_requests_sent += 1
                self._unconfirmed[message.request_id] = self._num_requests_sent, message.sampling.tenant
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    self._unconfirmed.pop(request_id, None)
        # One thread at a time may use a ZeroMQ socket; it raises Again when its peer is gone.
        with self._send_lock, contextlib.suppress(zmq.Again):
            if not self._inputs.closed:
                self._inputs.send(raw, zmq.NOBLOCK)

    def receive(self, timeout_ms: int) -> list[EngineOutput]:
        """The messages that have arrived, waiting at most `timeout_ms` for the first, or until `wake`.

        Raises `EngineError` when the process has died and all its messages were received.
        """
        events = dict(self._poller.poll(timeout_ms))
        if self._wake_read in events:
            os.read(self._wake_read, 4096)
        messages = self._drain()
        if messages or self._lifeline not in events:
            return messages
        # The lifeline may end a moment before ZeroMQ has passed on the last message.
        if self._outputs.poll(FINAL_MESSAGES_MS):
            return self._drain()
        raise EngineError(f"the engine process died ({self._how_it_ended()}); the server's log has its last words")

    def wake(self) -> None:
        """Make a `receive` in another thread return."""
        # A full pipe wakes the reader as well. The lock: the number of a closed descriptor may be in use again.
        with self._send_lock, contextlib.suppress(BlockingIOError):
            if not self._context.closed:
                os.write(self._wake_write, b"w")

    def close(self, hung: bool = False) -> bool:
        """End the process by `Shutdown`, then `END_SIGNAL`, then SIGKILL, and remove its sockets. One that `hung` gets
        no `Shutdown`.

        False when the process lives on, which one that waits in the kernel does until its call returns.
        """
        if self._context.closed:
            return True
        # An engine that loads reads no messages.
        reads = self._ready and not hung
        if reads:
            self.send(Shutdown())
        ended = reads and self._ended_within(SHUTDOWN_S)
        if not ended:
            self._process.send_signal(END_SIGNAL)
            ended = self._ended_within(END_S)
        if not ended:
            self._process.kill()
            ended = self._ended_within(KILL_S)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._release()
        return ended

    def _settle(self) -> None:
        """After the engine's `EngineReady`: wait until its input is connected, then remove the sockets' folder.
        Connections stay, and no file is left however both processes end. Raises `EngineError` without a connection."""
        if not self._inputs.poll(CONNECT_MS, zmq.POLLOUT):
            raise EngineError("the engine process answers but takes no messages; restart the server")
        self._ready = True
        shutil.rmtree(self._dir, ignore_errors=True)

    def _release(self) -> None:
        """Close the sockets and descriptors, and remove the sockets' folder."""
        with self._send_lock:
            self._made.close()

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self._dir}/{name}"

    def _drain(self) -> list[EngineOutput]:
        messages: list[EngineOutput] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < MESSAGES_A_TURN:
                message = ENGINE_OUTPUT.decode(self._outputs.recv(zmq.NOBLOCK))
                if isinstance(message, EngineCoreOutputs) and message.queue is not None:
                    self._confirm(message.queue)
                messages.append(message)
        return messages

    def _confirm(self, queue: QueueState) -> None:
        """Store the state of the engine's queue. The engine receives requests in the order in which they were sent."""
        with self._unconfirmed_lock:
            self._queue = queue
            while self._unconfirmed:
                request_id, (number, _) = next(iter(self._unconfirmed.items()))
                if number > queue.num_received:
                    break
                del self._unconfirmed[request_id]

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _how_it_ended(self) -> str:
        if not self._ended_within(REAP_S):
            return "it closed its connection"
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with its import path: Triton's stub has entries that no variable names.

    The launcher sets few malloc arenas, which suits Triton's many threads; the engine's compute threads get the
    default.
    """
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environ |= more
    environ.pop("MALLOC_ARENA_MAX", None)
    return environ

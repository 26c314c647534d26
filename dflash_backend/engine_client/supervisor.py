"""Keeps an engine running: starts it, notices when it has died or hangs, and starts it again.

It has no thread of its own. Each call of `receive` does the next thing that is due: read outputs, wait out a delay,
start a process, follow its loading. Without an engine there is nothing else to read.

The supervisor kills and restarts an engine that sends nothing for `engine_hang_timeout_s`. An engine sends after every
step and once a second without one, so this bounds a step. A step has no longest duration of its own (a long prompt on a
CPU, a kernel that must be compiled first, a shared device), hence a generous setting. A heartbeat thread in the engine
would prove only that the process lives. Only time in which this side polls counts, so a machine or a stub that was
suspended does not cost a healthy engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import msgspec

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineClient, EngineError
from dflash_backend.messages import (
    AbortRequests,
    DrafterSwapped,
    EngineCoreOutputs,
    EngineFailed,
    EngineInput,
    EngineReady,
    SwapDrafter,
)

LOAD_TIMEOUT_S = 3600.0
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
# The most that one interval between two polls adds to the silence.
LONGEST_POLL_S = 1.0


class Logger(Protocol):
    """Where the supervisor reports: one line a call."""

    def info(self, text: str) -> None: ...
    def error(self, text: str) -> None: ...


class EngineLost(Exception):
    """The engine has died or hangs, and all its requests are lost. The message is for clients and the operator.

    engine: its client, which knows which requests had reached it. has_reason: the engine reported an error of its own,
    which any request that was sent to it may have caused. index: the engine's number among several.
    """

    def __init__(self, message: str, engine: EngineClient, has_reason: bool = False) -> None:
        super().__init__(message)
        self.engine = engine
        self.has_reason = has_reason
        self.index = 0


class Backoff:
    """The delay before the next start; it doubles with each failed one."""

    def __init__(self) -> None:
        self._next_s = FIRST_DELAY_S

    def delay_s(self, served: bool, setup_error: bool) -> float:
        """The delay in seconds after a death. `served`: the engine had finished a request, so its start works.
        `setup_error`: its settings or files are at fault, and a restart fails until a person changes them."""
        if served:
            self._next_s = FIRST_DELAY_S
            return 0.0
        if setup_error:
            return LONGEST_DELAY_S
        delay, self._next_s = self._next_s, min(2.0 * self._next_s, LONGEST_DELAY_S)
        return delay


class EngineSupervisor:
    """`start` once, then `receive` over and over from one thread; `engine`, `ready`, `send` and `wake` from any."""

    def __init__(
        self,
        config: EngineConfig,
        log: Logger,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        server_pid: int = 0,
        name: str = "",
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`command` runs the engine, by default the project's own; `server_pid` and `environ` as for `EngineClient`.
        `name` is in each line of the log, for one of several engines. Nothing is started yet."""
        self._config = config
        self._log = log
        self._name = f"{name}: " if name else ""
        self._environ = environ
        self._command = command
        self._clock = clock
        self._server_pid = server_pid
        self._backoff = Backoff()
        self._woken = threading.Event()
        # The engine that takes requests now, or None; another object after every restart.
        self.engine: EngineClient | None = None
        # How the last engine that took requests was lost: set before `engine` becomes None; None if none was lost.
        self.lost: EngineLost | None = None
        # Processes that were started after the first.
        self.num_restarts = 0
        # The process that exists, in whatever state.
        self._process: EngineClient | None = None
        self._ready: EngineReady | None = None
        self._served = False
        self._dead = False
        self._hung = False
        # Drafters that the engine was asked for and has not answered, by id; and the one before that which drafts, as
        # `drafter`, while the engine compares them.
        self._asked: dict[str, SwapDrafter] = {}
        self._drafter_before: tuple[str | None, str] | None = None
        # How long the engine that takes requests has sent nothing, and when it was last polled.
        self._silence_s = 0.0
        self._polled_at = 0.0
        # The error that the engine reported before it ended.
        self._exit_reason: str | None = None
        self._started_at = 0.0
        self._next_start_at = 0.0

    @property
    def ready(self) -> EngineReady:
        """The engine's `EngineReady` message of its last start."""
        assert self._ready is not None, "the engine was never started"
        return self._ready

    @property
    def silence_s(self) -> float:
        """Seconds since the engine that takes requests last sent something; 0 without one."""
        return self._silence_s if self.engine is not None else 0.0

    @property
    def drafter(self) -> tuple[str | None, str]:
        """The settings draft_model and draft_revision with which the next process starts."""
        return self._config.draft_model, self._config.draft_revision

    def start(self) -> None:
        """Start the first process. `wait_until_ready` comes next. Raises `EngineError`."""
        self._started_at = self._clock()
        self._process = self._new_process()

    def wait_until_ready(self) -> None:
        """Wait until the first process has loaded the models. Raises `EngineError`; nothing is running then."""
        assert self._process is not None, "start comes first"
        self._ready = self._process.wait_until_ready(self._log_progress, LOAD_TIMEOUT_S)
        self._take_over(self._process)

    def send(self, message: EngineInput) -> None:
        """Queue a message for the engine; without an engine the message is lost, as are all requests."""
        if isinstance(message, AbortRequests) and message.num_output_tokens:
            # A stop string ended them: no delta with a finish reason follows.
            self._served = True
        if (engine := self.engine) is not None:
            if isinstance(message, SwapDrafter):
                self._asked[message.swap_id] = message
            engine.send(message)

    def receive(self, timeout_ms: int) -> list[EngineCoreOutputs]:
        """The engine's outputs, waiting at most `timeout_ms` for something to happen, or until `wake`.

        Raises `EngineLost` once for each engine that took requests and has died or hangs.
        """
        if self.engine is not None:
            return self._poll(self.engine, timeout_ms)
        if self._dead:
            self._reap()
        elif self._process is not None:
            self._follow_loading(self._process, timeout_ms)
        else:
            self._wait_or_restart(timeout_ms)
        return []

    def wake(self) -> None:
        """Make a `receive` in another thread return."""
        self._woken.set()
        process = self._process
        if process is not None:
            process.wake()

    def close(self) -> None:
        """End the process, if there is one. No call of `receive` may follow."""
        self.engine = None
        if self._process is not None:
            self._process.close()
            self._process = None

    def _new_process(self) -> EngineClient:
        return EngineClient(self._config, self._command, self._server_pid, self._environ)

    def _poll(self, engine: EngineClient, timeout_ms: int) -> list[EngineCoreOutputs]:
        outputs: list[EngineCoreOutputs] = []
        try:
            if self._exit_reason is not None:
                raise EngineError(self._exit_reason)
            messages = engine.receive(timeout_ms)
            self._check_silence(bool(messages))
            for message in messages:
                if isinstance(message, EngineFailed):
                    # The next poll raises it: the outputs before it are still good.
                    self._exit_reason = message.message
                elif isinstance(message, EngineCoreOutputs):
                    outputs.append(message)
                    for said in message.drafter_swaps:
                        self._follow_swap(said)
        except EngineError as error:
            # First refuse new requests, then answer those that run; the next poll waits for the process to end.
            self.lost = lost = EngineLost(str(error), engine, self._exit_reason is not None)
            self.engine = self._exit_reason = None
            self._dead = True
            self._drop_swaps()
            self._plan_restart(str(error), self._served, setup_error=False)
            raise lost from error
        self._served = self._served or any(delta.finish_reason for output in outputs for delta in output.deltas)
        return outputs

    def _follow_swap(self, said: DrafterSwapped) -> None:
        """Follow which drafter drafts: the next process starts with it. The thread that starts processes must know it,
        so it does not wait for the one that answers requests."""
        asked = self._asked.pop(said.swap_id, None)
        if said.outcome == "swapped" and asked is not None:
            self._drafter_before = self.drafter if asked.window else None
            self._use_drafter((asked.draft_model, asked.draft_revision), said.drafting)
        elif said.outcome == "kept":
            self._drafter_before = None
        elif said.outcome == "reverted":
            self._use_drafter(self._drafter_before or self.drafter, said.drafting)
            self._drafter_before = None

    def _drop_swaps(self) -> None:
        """The engine is gone. It may have died of a drafter that it compared: the one before is back."""
        self._asked.clear()
        if self._drafter_before is not None:
            self._use_drafter(self._drafter_before)
            self._drafter_before = None

    def _use_drafter(self, drafter: tuple[str | None, str], drafting: str = "") -> None:
        """Start the next process with this drafter. drafting: as of `EngineReady`, where it drafts in this process."""
        self._config = replace(self._config, draft_model=drafter[0], draft_revision=drafter[1])
        if drafting:
            text = self.ready.description.replace(self.ready.drafting or drafting, drafting)
            self._ready = msgspec.structs.replace(self.ready, description=text, drafting=drafting)

    def _check_silence(self, has_messages: bool) -> None:
        """Measure the engine's silence. Raises `EngineError` when it exceeds the limit."""
        now = self._clock()
        since, self._polled_at = now - self._polled_at, now
        self._silence_s = 0.0 if has_messages else self._silence_s + min(since, LONGEST_POLL_S)
        limit = self._config.engine_hang_timeout_s
        if limit and self._silence_s > limit:
            self._hung = True
            raise EngineError(
                f"the engine hangs: it has said nothing for {limit:g} s (engine_hang_timeout_s), and is killed"
            )

    def _take_over(self, process: EngineClient) -> None:
        self._silence_s, self._polled_at = 0.0, self._clock()
        self.engine = process

    def _reap(self) -> None:
        assert self._process is not None
        self._dead = False
        process, self._process = self._process, None
        hung, self._hung = self._hung, False
        if not process.close(hung):
            self._log.error(
                f"{self._name}the engine process {process.pid} cannot be ended: it waits in the kernel, such as for "
                "the GPU's driver; what it holds is free when it ends"
            )

    def _wait_or_restart(self, timeout_ms: int) -> None:
        remaining = self._next_start_at - self._clock()
        if remaining > 0:
            self._woken.wait(min(remaining, timeout_ms / 1000))
            self._woken.clear()
            return
        self.num_restarts += 1
        self._served = False
        self._started_at = self._clock()
        try:
            self._process = self._new_process()
        except EngineError as error:
            self._plan_restart(str(error), served=False, setup_error=False)

    def _follow_loading(self, process: EngineClient, timeout_ms: int) -> None:
        try:
            if self._clock() - self._started_at > LOAD_TIMEOUT_S:
                raise EngineError(f"the engine was not ready within {LOAD_TIMEOUT_S:g} s")
            ready = process.poll_ready(self._log_progress, timeout_ms)
        except EngineError as error:
            self._dead = True
            self._plan_restart(str(error), served=False, setup_error=error.setup_error)
            return
        if ready is not None:
            self._ready = ready
            self._take_over(process)
            took = self._clock() - self._started_at
            self._log.info(f"{self._name}the engine is ready again after {took:.1f} s (restart {self.num_restarts})")

    def _plan_restart(self, reason: str, served: bool, setup_error: bool) -> None:
        delay = self._backoff.delay_s(served, setup_error)
        self._next_start_at = self._clock() + delay
        when = f"in {delay:g} s" if delay else "at once"
        advice = "; correct the settings or the files that it names, or unload the model" if setup_error else ""
        self._log.error(f"{self._name}{reason}; the engine is started again {when}{advice}")

    def _log_progress(self, message: str, fraction: float) -> None:
        self._log.info(f"loading {fraction:.0%}: {self._name}{message}")

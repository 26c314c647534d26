"""Keeps a server running: starts it, watches it, and starts it anew when it is dead or hangs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from typing import NoReturn

from dflash_cli.launcher.server import LauncherError, TritonServer
from dflash_cli.launcher.watch import Watch

LOOK_S = 0.5
MAX_RESTARTS = 5
WINDOW_S = 600.0
FIRST_DELAY_S = 1.0


class RestartBudget:
    """How many new starts are allowed, and how long to wait before each."""

    def __init__(self, limit: int = MAX_RESTARTS, window_s: float = WINDOW_S) -> None:
        self.limit, self.window_s = limit, window_s
        self._starts: deque[float] = deque()

    def delay_s(self, now: float) -> float | None:
        """The delay before the next start, which is counted: none before the first within the window, then 1 second and
        twice as long each time. None when there were `limit` within the window."""
        while self._starts and now - self._starts[0] >= self.window_s:
            self._starts.popleft()
        if len(self._starts) >= self.limit:
            return None
        delay = FIRST_DELAY_S * 2.0 ** (len(self._starts) - 1) if self._starts else 0.0
        self._starts.append(now)
        return delay


class StopAsked(Exception):
    """A signal asked for the end."""


@dataclass(eq=False)
class Keeper:
    """Runs one server for as long as it can be kept: `run`, then the server's `stop`. `signalled` is for a signal's
    handler. Without `restart` the first trouble ends it. `say` gets a line for the operator. `on_look` is called about
    twice a second, in the thread that runs `run`."""

    server: TritonServer
    _: KW_ONLY
    restart: bool
    hang_timeout_s: float
    say: Callable[[str], None]
    budget: RestartBudget = field(default_factory=RestartBudget)
    on_look: Callable[[], None] = lambda: None
    asked: bool = field(default=False, init=False)

    def signalled(self) -> None:
        """End `run` with `StopAsked`; once the server is being stopped, let that not wait for requests. In the thread
        that runs `run`."""
        self.asked = True
        if not self.server.stopping:
            raise StopAsked
        self.server.hurry()

    def run(self, on_ready: Callable[[], None]) -> NoReturn:
        """Start the server and keep it; there is no other end than an exception. `on_ready` is called after the first
        start. Raises `LauncherError` when that fails, and when the server is in trouble and must not, or can no longer,
        be started anew; `StopAsked` after a signal."""
        self.server.start()
        on_ready()
        while True:
            trouble: str | None = self._until_trouble()
            while trouble is not None:
                trouble = self._start_anew(trouble)

    def _until_trouble(self) -> str:
        with closing(Watch(self.server, self.hang_timeout_s)) as watch:
            while (trouble := watch.trouble()) is None:
                self.on_look()
                time.sleep(LOOK_S)
        words = self.server.failure() if self.server.poll() is not None else ""
        return f"{trouble}: {words}" if words else trouble

    def _start_anew(self, trouble: str) -> str | None:
        """Replace the server; what went wrong with the new one, if it could not be started."""
        self.server.stop(wait_for_requests=False)
        self._end_if_asked()
        if not self.restart:
            raise LauncherError(trouble)
        delay_s = self.budget.delay_s(time.monotonic())
        if delay_s is None:
            raise LauncherError(
                f"{trouble}; it was started anew {self.budget.limit} times within {self.budget.window_s / 60:.0f} "
                "minutes, which is not tried any further"
            )
        self.say(f"{trouble}; the server is started anew {f'in {delay_s:g} s' if delay_s else 'at once'}")
        time.sleep(delay_s)
        began = time.monotonic()
        try:
            self.server.start()
        except LauncherError as error:
            self._end_if_asked()
            return str(error)
        self.say(f"the server is ready again after {time.monotonic() - began:.1f} s")
        return None

    def _end_if_asked(self) -> None:
        """A signal that came while the server was being stopped."""
        if self.asked:
            raise StopAsked

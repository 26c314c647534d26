"""A pytest plugin that ends a run in which no test has reported anything for too long, and says what it waited for.

Each worker ends itself when one test takes too long (`faulthandler_timeout` in the Makefile). This plugin watches from
the process that hands out tests, and so notices as well a worker that is blocked outside tests, and one that has died
while a process that it forked keeps its connection open.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

EXIT_STATUS = 4
STACKS = 12
"""Processes of which the stacks are printed: those of workers and servers, not of each of their helpers."""


class StalledRun:
    """Ends the run once `limit_s` seconds have passed without a report, or a worker has died and nobody noticed.

    `end` gets the text that says why.
    """

    def __init__(self, limit_s: float, end: Callable[[str], None] | None = None) -> None:
        self.limit_s = limit_s
        self._end = end or self.print_and_end
        self._running: dict[str, None] = {}
        """Tests that have begun and not ended, in the order in which they began."""
        self._processes: dict[psutil.Process, None] = {}
        """All that the run has started: what outlives its parent is no longer found below this process."""
        self._dead: dict[psutil.Process, float] = {}
        """Children of this process that have died and that nobody has waited for, with the time when that was seen."""
        self._reported = time.monotonic()
        self._over = threading.Event()

    def pytest_sessionstart(self) -> None:
        self._reported = time.monotonic()
        threading.Thread(target=self._watch, name="stalled-run", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None
        self._reported = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._reported = time.monotonic()

    def pytest_unconfigure(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(self.limit_s / 10, 5.0)):
            if why := self.find_fault():
                self._end(self.describe(why))
                return

    def find_fault(self) -> str | None:
        now, this = time.monotonic(), psutil.Process()
        self._processes |= dict.fromkeys(this.children(recursive=True))
        self._dead = {child: self._dead.get(child, now) for child in this.children() if is_dead(child)}
        for child, since in self._dead.items():
            if now - since >= self.limit_s / 8 and (cause := cause_of_death(child.pid)):
                return f"Worker process {child.pid} died of {cause}."
        if now - self._reported >= self.limit_s:
            return f"No test has reported anything for {now - self._reported:.0f} s."
        return None

    def describe(self, why: str) -> str:
        """What is printed at the end: why, the tests that have not ended, processes and their Python stacks."""
        tests = [f"  {name}" for name in self._running] or ["  none: all that began have ended"]
        alive = [process for process in self._processes if process.is_running() and not is_dead(process)]
        lines = [f"\n{why} Begun and not ended:", *tests, "Processes:", *map(line_of, alive)]
        pythons = [process for process in alive if "python" in name_of(process)]
        return "\n".join(lines + [stacks_of(process.pid) for process in pythons[:STACKS]])

    def print_and_end(self, text: str) -> None:
        """Print, end what the run has started, and leave: nothing less ends a main thread that waits for a worker."""
        print(text, file=sys.__stderr__, flush=True)
        for process in self._processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        os._exit(EXIT_STATUS)


def is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def cause_of_death(pid: int) -> str | None:
    """The signal or exit status of a child that nobody has waited for; it is left for whoever does. None for a worker
    that ended because no test was left for it."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None or (result.si_code == os.CLD_EXITED and result.si_status == 0):
        return None
    return f"{'exit status' if result.si_code == os.CLD_EXITED else 'signal'} {result.si_status}"


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def line_of(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())[:160]
        return f"  {process.pid} of {process.ppid()}, {process.status()}, {command}"
    except psutil.Error as error:
        return f"  {process.pid}: {error}"


def stacks_of(pid: int) -> str:
    """The stacks of a process by py-spy, or why there are none."""
    py_spy = Path(sys.executable).with_name("py-spy")
    try:
        done = subprocess.run(
            [py_spy, "dump", "--pid", str(pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"No stacks of process {pid}: {error}"
    return done.stdout


def register(config: pytest.Config) -> None:
    """Watch this run, where it was asked for and this is the process that hands out tests."""
    limit_s: float | None = config.getoption("--stall-limit")
    if limit_s is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(StalledRun(limit_s), "stalled-run")

"""The server's processes as Linux's /proc shows them: who descends from whom, and how to end them all.

The launcher uses this so that neither a stub nor an engine outlives the server, also one that left its group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told from a later one of the same number by when it started (clock ticks since boot)."""

    pid: int
    parent: int
    session: int
    start_time: int


def _read(pid: int) -> Process | None:
    """The process, or None if it has ended; one that waits to be reaped has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may hold spaces and parentheses itself.
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if fields[0] in "ZX":
        return None
    return Process(pid, parent=int(fields[1]), session=int(fields[3]), start_time=int(fields[19]))


def family(leader: int, known: Iterable[Process] = ()) -> set[Process]:
    """Everything alive that belongs to `leader`: itself, its descendants, the members of its session, and those of
    `known` (found earlier, when their parents still lived) with their descendants."""
    everyone = [process for name in os.listdir("/proc") if name.isdigit() and (process := _read(int(name)))]
    # An orphan's parent has changed since it was found, so identity is number and start time.
    found = {(p.pid, p.start_time) for p in known}
    pids = {p.pid for p in everyone if leader in (p.pid, p.session) or (p.pid, p.start_time) in found}
    grown = True
    while grown:
        born = {p.pid for p in everyone if p.parent in pids} - pids
        pids |= born
        grown = bool(born)
    return {p for p in everyone if p.pid in pids}


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to each that still lives."""
    for process in processes:
        now = _read(process.pid)
        if now is not None and now.start_time == process.start_time:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def gone(processes: Iterable[Process], timeout_s: float) -> bool:
    """Wait until all have ended; False if some still live after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    waiting = set(processes)
    while True:
        waiting = {p for p in waiting if (now := _read(p.pid)) is not None and now.start_time == p.start_time}
        if not waiting:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)

"""The server's processes as Linux's /proc shows them: who descends from whom, and how to end them all.

So neither a stub nor an engine outlives the server, not even one that left its group. It imports nothing but the
standard library, so no psutil: the guardian runs this file by its path, without site-packages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told from a later one of the same number by when it started (clock ticks since boot). `name`: as far
    as Linux keeps it, 15 characters; a process that runs another program changes it."""

    pid: int
    parent: int
    session: int
    start_time: int
    name: str = field(compare=False)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """The process's name and what /proc says behind it; None if it has ended and was reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may hold spaces and parentheses itself.
            head, _, fields = file.read().rpartition(")")
    except OSError:
        return None
    return head.partition("(")[2], fields.split()


def _read(pid: int) -> Process | None:
    """The process, or None if it has ended; one that waits to be reaped has ended."""
    found = _stat(pid)
    if found is None or found[1][0] in "ZX":
        return None
    name, fields = found
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), name)


def _now(process: Process) -> Process | None:
    """The process as it is now, or None if it has ended."""
    now = _read(process.pid)
    return now if now is not None and now.start_time == process.start_time else None


def family(leader: int, known: Iterable[Process] = ()) -> set[Process]:
    """Everything alive that belongs to `leader`: itself, its descendants, the members of its session, and those of
    `known` (found earlier, when their parents still lived) with their descendants."""
    everyone = [process for pid in _pids() if (process := _read(pid))]
    # An orphan's parent has changed since it was found, so identity is number and start time.
    found = {(p.pid, p.start_time) for p in known}
    pids = {p.pid for p in everyone if leader in (p.pid, p.session) or (p.pid, p.start_time) in found}
    grown = True
    while grown:
        born = {p.pid for p in everyone if p.parent in pids} - pids
        pids |= born
        grown = bool(born)
    return {p for p in everyone if p.pid in pids}


def marked(mark: str) -> set[Process]:
    """Everything alive that was started with `mark` in its environment. It finds what `family` cannot: a process whose
    parents ended before `family` looked."""
    found = set()
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                fits = pid != os.getpid() and mark.encode() in file.read()
        except OSError:  # It has ended, or belongs to another user.
            continue
        if fits and (process := _read(pid)) is not None:
            found.add(process)
    return found


def named(processes: Iterable[Process], name: str) -> set[Process]:
    """Those that still live and whose name, of which Linux keeps 15 characters, is `name`."""
    return {process for process in processes if (now := _now(process)) is not None and now.name == name[:15]}


def unreaped_children(parent: int, name: str) -> set[int]:
    """Children of `parent` with this name that have ended and that it has not asked for."""
    stats = {pid: found for pid in _pids() if (found := _stat(pid)) is not None}
    wanted = name[:15], "Z", parent
    return {pid for pid, (own, fields) in stats.items() if (own, fields[0], int(fields[1])) == wanted}


def end(processes: set[Process], patience_s: float, kill_s: float) -> bool:
    """Tell all to end, and kill those that have not after `patience_s`. False if some live `kill_s` after that."""
    for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, kill_s)):
        send(processes, number)
        if gone(processes, patience):
            return True
    return False


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to each that still lives."""
    for process in processes:
        if _now(process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def gone(processes: Iterable[Process], timeout_s: float) -> bool:
    """Wait until all have ended; False if some still live after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    waiting = set(processes)
    while waiting := set(filter(_now, waiting)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

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


def marked(mark: str) -> set[Process]:
    """Everything alive that was started with `mark` in its environment. It finds what `family` cannot: a process whose
    parents ended before `family` looked."""
    wanted = mark.encode()
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                fits = wanted in file.read()
        except OSError:  # It has ended, or belongs to another user.
            continue
        if fits and (process := _read(int(name))) is not None:
            found.add(process)
    return found


def named(processes: Iterable[Process], name: str) -> set[Process]:
    """Those that still live and whose name, of which Linux keeps 15 characters, is `name`."""
    found = set()
    for process in processes:
        now = _read(process.pid)
        if now is None or now.start_time != process.start_time:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/comm", encoding="utf-8") as file:
            if file.read().rstrip("\n") == name[:15]:
                found.add(process)
    return found


def unreaped_children(parent: int, name: str) -> set[int]:
    """Children of `parent` with this name that have ended and that it has not asked for."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                head, _, rest = file.read().rpartition(")")
                fields = rest.split()
                if fields[0] == "Z" and int(fields[1]) == parent and head.partition("(")[2] == name[:15]:
                    found.add(int(entry))
    return found


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

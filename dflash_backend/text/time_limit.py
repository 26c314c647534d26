"""Ends work in Python that takes too long, such as a chat template whose loops have no end."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


# How often the blocks are looked at.
LOOK_S = 0.02


class OutOfTime(Exception):
    """Work has taken all of the time that it may take."""


@dataclass(eq=False, slots=True)
class _Watched:
    """A thread in a block, the clock of its processor time, and when that is over."""

    thread: int
    clock: int
    end: float


class _Watch:
    """One thread for all blocks, which looks at them now and then while there are some."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._blocks: set[_Watched] = set()
        self._any = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, block: _Watched) -> None:
        """Watch a block."""
        with self.lock:
            self._blocks.add(block)
            self._any.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="time-limit", daemon=True)
                self._thread.start()

    def remove(self, block: _Watched) -> None:
        """The block has ended: from here on its thread is sent no error."""
        with self.lock:
            self._blocks.discard(block)

    def _run(self) -> None:
        while self._any.wait():
            time.sleep(LOOK_S)
            with self.lock:
                for block in [each for each in self._blocks if time.clock_gettime(each.clock) >= each.end]:
                    self._blocks.discard(block)
                    _raise_in(block.thread, OutOfTime)
                if not self._blocks:
                    self._any.clear()


_WATCH = _Watch()
# A forked process has neither the thread nor who holds the lock.
os.register_at_fork(after_in_child=_WATCH.__init__)  # type: ignore[misc]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` where the calling thread has computed for `seconds` within the block, or a little longer.

    The thread's own processor time counts, so a busy machine ends nothing early. It is looked at between two
    instructions of Python: a single call of C runs to its end.
    """
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    block = _Watched(thread, clock, time.clock_gettime(clock) + seconds)
    _WATCH.add(block)
    try:
        yield
    finally:
        # One that was sent as the block ended arrives in here. To take it back instead, as `PyThreadState_SetAsyncExc`
        # can, leaves CPython 3.11 looking for one at every call and loop, for good, and never going on where a profile
        # function is set.
        _WATCH.remove(block)

"""Ends work in Python that takes too long, such as a chat template whose loops have no end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


class OutOfTime(Exception):
    """Work has taken all of the time that it may take."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` where the calling thread has computed for `seconds` within the block.

    The thread's own processor time counts, so a busy machine ends nothing early. It is looked at between two
    instructions of Python: a single call of C runs to its end.
    """
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end = time.clock_gettime(clock) + seconds
    lock = threading.Lock()
    left = threading.Event()

    def watch() -> None:
        wait_s = seconds
        while not left.wait(wait_s):
            with lock:
                if left.is_set():
                    return
                wait_s = end - time.clock_gettime(clock)
                if wait_s <= 0:
                    _raise_in(thread, OutOfTime)
                    return
                wait_s = max(wait_s, 0.001)

    threading.Thread(target=watch, name="time-limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            left.set()
        # One that was raised and has not arrived yet.
        _raise_in(thread, ctypes.py_object())

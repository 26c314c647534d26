"""Keeps Python's garbage collector away from what stays for as long as the process does, and memory that a step gives
back for the next one."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Allocations of containers that are left over before the youngest are looked at, and how many such looks go before one
# at the next older generation. Python's own 700, 10, 10 looks at everything after 70,000: one large request.
THRESHOLDS = (10_000, 20, 50)
# By default glibc returns a large buffer to the system after each step, or each layer, and asks for it again, page by
# page, in the next one. Buffers below these sizes, in bytes, are kept; those that loading large weights leaves are
# larger and are returned. 32 MiB is the largest mmap threshold that every glibc takes. By variable: its size, and its
# number in `mallopt` (malloc.h).
STEP_BUFFERS = {"MALLOC_MMAP_THRESHOLD_": (32 << 20, -3), "MALLOC_TRIM_THRESHOLD_": (256 << 20, -1)}


def keep_step_buffers() -> None:
    """Memory that a step gives back stays in this process, but for what the environment says. Does nothing where the C
    library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, (size, option) in STEP_BUFFERS.items():
        if mallopt is not None and name not in os.environ:
            mallopt(option, size)


def give_back_memory() -> None:
    """What was needed for loading alone goes back to the system, which `keep_step_buffers` else keeps: weights as files
    have them, some hundred megabytes. Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def freeze_heap() -> None:
    """After loading: what exists now (modules, tokenizer, weights' wrappers) is never looked at again.

    Without this a request with many small objects makes the collector walk the whole heap over and over, with the
    interpreter lock held, so that no other request gets on.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """For imports: the collector does not run meanwhile, and never looks at what is there afterwards.

    torch and triton leave hundreds of thousands of objects and next to no garbage; looking through them again and again
    takes a quarter of the time of importing them, and each look later on as long again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()

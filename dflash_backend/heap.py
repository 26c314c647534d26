"""Keeps Python's garbage collector away from what stays for as long as the process does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Allocations of containers that are left over before the youngest are looked at, and how many such looks go before one
# at the next older generation. Python's own 700, 10, 10 looks at everything after 70,000: one large request.
THRESHOLDS = (10_000, 20, 50)


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

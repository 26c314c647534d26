"""Keeps Python's garbage collector away from what stays for as long as the process does."""

from __future__ import annotations

import gc

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

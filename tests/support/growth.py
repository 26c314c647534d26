"""How the time of some work grows with its input."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_linear(work: Callable[[int], object], size: int) -> None:
    """Fail where eight times the input takes far more than eight times the time, of which caches make up to three."""
    short, long = _seconds(work, size), _seconds(work, 8 * size)
    assert long < 24 * short + 0.02, f"{size}: {short:.4f} s, {8 * size}: {long:.4f} s"


def _seconds(work: Callable[[int], object], size: int) -> float:
    """Processor time of the quickest of three runs."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        work(size)
        times.append(time.thread_time() - started)
    return min(times)

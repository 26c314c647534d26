"""The host's time for the kernels of a step: by Triton's own launches, and by those of `dflash_kernels.launcher`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflash_kernels.launcher import CachedRun

REPEATS, CALLS = 15, 10
Launches = list[tuple[CachedRun, tuple[Any, ...], dict[str, Any]]]


@contextmanager
def recorded() -> Iterator[Launches]:
    """The launches within the block."""
    launches: Launches = []
    run = CachedRun.__call__

    def recording(self: CachedRun, *args: Any, **kwargs: Any) -> Any:
        launches.append((self, args, kwargs))
        return run(self, *args, **kwargs)

    CachedRun.__call__ = recording  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        CachedRun.__call__ = run  # type: ignore[method-assign]


def launch_seconds(launches: Launches) -> tuple[float, float]:
    """The time of all `launches`, by Triton and by the launcher, without what a driver does: the shortest of a few runs
    of each, in turn."""
    totals = [0.0, 0.0]
    for run, args, kwargs in launches:
        ways: list[Callable[..., Any]] = [run.by_triton, run]
        shortest = [float("inf")] * 2
        for _ in range(REPEATS):
            for way, launch in enumerate(ways):
                begun = time.perf_counter()
                for _ in range(CALLS):
                    launch(*args, **kwargs)
                shortest[way] = min(shortest[way], (time.perf_counter() - begun) / CALLS)
        totals = [total + seconds for total, seconds in zip(totals, shortest, strict=True)]
    return totals[0], totals[1]

"""How much of the machine other processes take while something is timed. Times in seconds."""

from __future__ import annotations

import os
import time

import psutil

# Of all cores: from here on a timing says more about the others. A step's rows share the cores and meet at its end, so
# another process that takes one of two cores costs far more than half.
MOST_OTHERS = 0.1


class OthersWatch:
    """The processor time that others have had since this was made, the machine's host included (steal)."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._busy, self._own = _busy_s(), time.process_time()

    def share(self) -> float:
        """Of all cores, 0 to 1. The kernel counts in ticks of 10 ms, so it is exact to some hundredths in a second."""
        others = _busy_s() - self._busy - (time.process_time() - self._own)
        return max(0.0, others / ((time.perf_counter() - self._started) * (os.cpu_count() or 1)))


def _busy_s() -> float:
    times = psutil.cpu_times()
    steal = getattr(times, "steal", 0.0)  # Linux alone has it
    return float(
        times.user
        + times.system
        + getattr(times, "nice", 0.0)
        + getattr(times, "irq", 0.0)
        + getattr(times, "softirq", 0.0)
        + steal
    )

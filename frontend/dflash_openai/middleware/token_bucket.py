"""A rate limit that lets bursts through."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Holds the amount of one minute and refills evenly. What is taken may be more than it holds, as a long prompt is:
    then it is in debt, and what comes next waits for longer."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._per_s, self._clock = per_minute, per_minute / 60, clock
        self._level, self._updated = per_minute, clock()

    def wait_s(self, amount: float = 1) -> float:
        """Seconds until `amount` may be taken; 0: now. An amount above the capacity needs a full bucket."""
        self._refill()
        return max(0.0, (min(amount, self._capacity) - self._level) / self._per_s)

    def take(self, amount: float = 1) -> None:
        """Take `amount`."""
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._updated) * self._per_s)
        self._updated = now

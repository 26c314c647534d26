"""Says how far something is that takes long: how much is done, how fast, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 5.0


class Progress:
    """Says a line every `every_s` seconds while `step` is called, and one at the end. resumes: what the first call says
    is done was there before, and is not counted as fast."""

    def __init__(
        self,
        unit: str,
        say: Callable[[str], None],
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        resumes: bool = False,
    ) -> None:
        self._before: int | None = None if resumes else 0
        self._unit, self._say, self._every_s, self._clock = unit, say, every_s, clock
        self._began = self._said = clock()
        self._has_ended = False

    def step(self, done: int, total: int) -> None:
        """Take note that `done` of `total` are done."""
        now = self._clock()
        if self._before is None:
            self._before = done
        if self._has_ended or (done < total and now - self._said < self._every_s):
            return
        self._said, self._has_ended = now, done >= total
        if done == self._before:
            self._say(f"{done} of {total} {self._unit} after {_duration(now - self._began)}")
            return
        rate = (done - self._before) / max(now - self._began, 1e-9)
        shown = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
        left = "" if done >= total else f", about {_duration((total - done) / rate)} left"
        self._say(f"{done} of {total} {self._unit}, {shown}/s{left}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

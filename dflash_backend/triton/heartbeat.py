"""Shows a supervisor of the server that the output thread runs, by the age of a file, and how many requests it has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# The environment variable that names the file. `dflash-triton serve` sets it.
HEARTBEAT_FILE = "DFLASH_HEARTBEAT_FILE"
INTERVAL_S = 1.0


class Heartbeat:
    """Touches a file about once a second, and writes the number of requests into another. Owned by one thread."""

    def __init__(self, path: str | None, log: Callable[[str], None]) -> None:
        """Without a `path` nothing is done. `log` is called once if the file cannot be touched."""
        self._path = Path(path) if path else None
        self._log = log
        self._beat_at = float("-inf")
        self._has_failed = False

    def beat(self, now: float, num_requests: int = 0) -> None:
        """Touch the file if that is due at `now`, in seconds of a clock that never goes back."""
        if self._path is None or now - self._beat_at < INTERVAL_S:
            return
        self._beat_at = now
        try:
            self._path.touch()
            # Several processes may share a heartbeat.
            self._path.with_name(f"{self._path.name}-{os.getpid()}").write_text(str(num_requests), encoding="ascii")
        except OSError as error:
            if not self._has_failed:
                self._log(f"the heartbeat file {self._path} of {HEARTBEAT_FILE} cannot be touched: {error.strerror}")
            self._has_failed = True

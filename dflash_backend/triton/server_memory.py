"""Watches the memory of `tritonserver`, which keeps every response until its client has read it.

Triton does not report clients that do not read, nor how much waits for them, so only the total is known. While it is
above a limit and grows, the stream that was sent the most is ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 1.0
# The allocator reuses freed memory before it asks for more, so memory that only stays high is no reason to act.
STEP_BYTES = 32 << 20
# Ending a stream that was sent less would free next to nothing.
SMALLEST_STREAM_BYTES = 1 << 20


def private_memory(pid: int) -> int:
    """Resident bytes of a process that it does not share with others; 0 when it has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class ServerMemory:
    """Decides when a stream must end. Owned by one thread."""

    def __init__(self, limit_bytes: int, read: Callable[[], int]) -> None:
        """`read` gives the memory in bytes; a limit of 0 is none."""
        self._limit = limit_bytes
        self._read = read
        self._looked_at = float("-inf")
        self._ended_at_bytes = -STEP_BYTES
        self.num_bytes = 0

    def is_over(self, now: float) -> bool:
        """Whether memory is above the limit and has grown by a step since `note_ended`. Looks once a second; `now` is
        in seconds of a clock that never goes back."""
        if not self._limit or now - self._looked_at < INTERVAL_S:
            return False
        self._looked_at = now
        self.num_bytes = self._read()
        return self.num_bytes > max(self._limit, self._ended_at_bytes + STEP_BYTES)

    def note_ended(self) -> None:
        """A stream was ended because of the memory as it is now."""
        self._ended_at_bytes = self.num_bytes

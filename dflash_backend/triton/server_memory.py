"""Watches the memory of `tritonserver`, which keeps every response until its client has read it.

Triton does not report clients that do not read, nor how much waits for them, so only the total is known. While it is
above a limit and grows, the stream that was sent the most is ended; but not when it has grown by more than was sent, as
it does with large requests.
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
# What Triton holds of a response that is not read is at most this many times its outputs, and this for each response.
HELD_PER_BYTE, HELD_PER_RESPONSE = 2, 2048
# Growth that was not sent is that of requests from this size on.
SMALLEST_REQUESTS_BYTES = STEP_BYTES // 2


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
        self._acted_at_bytes = -STEP_BYTES
        # The most that responses since the last look may hold. And of the growth since the memory was last below the
        # limit or was acted on: what responses may hold, and the rest.
        self._held_by_new = 0
        self._sent = self._unsent = 0
        self._has_looked = False
        self.num_bytes = 0

    def note_sent(self, num_bytes: int) -> None:
        """A response of any request was sent; its outputs have `num_bytes`."""
        self._held_by_new += HELD_PER_BYTE * num_bytes + HELD_PER_RESPONSE

    def is_over(self, now: float) -> bool:
        """Whether memory is above the limit and has grown by a step since `note_acted`. Looks once a second; `now` is
        in seconds of a clock that never goes back."""
        if not self._limit or now - self._looked_at < INTERVAL_S:
            return False
        self._looked_at = now
        before, self.num_bytes = self.num_bytes, self._read()
        if before <= self._limit:
            self._sent = self._unsent = 0
        if self._has_looked:
            # What has grown counts as sent while responses may hold it; what shrinks is taken from the rest.
            growth = self.num_bytes - before
            sent = max(0, min(growth, self._held_by_new))
            self._sent += sent
            self._unsent = max(0, self._unsent + growth - sent)
        self._has_looked, self._held_by_new = True, 0
        return self.num_bytes > max(self._limit, self._acted_at_bytes + STEP_BYTES)

    @property
    def is_of_responses(self) -> bool:
        """Whether what was sent accounts for at least half of the growth."""
        return self._unsent <= self._sent

    @property
    def is_of_requests(self) -> bool:
        """Whether it does not, and the growth is large enough to tell: a large request may still be arriving."""
        return self._unsent > max(self._sent, SMALLEST_REQUESTS_BYTES)

    def note_acted(self) -> None:
        """Something was done about the memory as it is now."""
        self._acted_at_bytes = self.num_bytes
        self._sent = self._unsent = 0

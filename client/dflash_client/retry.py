"""When a request is sent again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dflash_client.errors import ClientError, ConnectionFailed, ConnectionLost, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `retries` more attempts, after waits that double from `first_wait_s` up to `longest_wait_s`.

    Each wait is drawn between half of that and all of it, so that clients that were refused together do not come back
    together.
    """

    retries: int = 0
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if self.retries < 0 or not 0 < self.first_wait_s <= self.longest_wait_s:
            raise ValueError(f"{self} makes no sense; allowed: retries >= 0, 0 < first_wait_s <= longest_wait_s")

    def wait_s(self, attempt: int, error: ClientError, answered: bool, remaining_s: float) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 0), or None when the error is to be raised.

        Only what the server never began is sent again: it refused the request as UNAVAILABLE, or was not there.
        `answered` says that a response has come; `remaining_s` is what is left of the time-out.
        """
        refused = isinstance(error, Unavailable | ConnectionFailed) and not isinstance(error, ConnectionLost)
        if answered or not refused or attempt >= self.retries:
            return None
        longest = min(self.longest_wait_s, self.first_wait_s * 2.0**attempt)
        wait_s = longest * random.uniform(0.5, 1.0)
        return wait_s if wait_s < remaining_s else None

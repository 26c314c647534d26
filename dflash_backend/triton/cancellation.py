"""Finds the requests whose client is gone, by asking Triton about each.

Triton does not report cancellations. Each question costs a round trip between the stub and the server, which
`checks/cancel_cost.py` measures. The numbers below follow from it: with up to 64 requests, each is asked about five
times a second; with more, less often, but at least twice.

gRPC reports to Triton at once that a client has left. Over HTTP, Triton reads nothing while a request runs
(server issue 7077) and notices when it writes. So an HTTP request that does not stream, or has no token yet, runs on
until then; `request_timeout_s` bounds that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from dflash_backend.triton.responder import Responder, SendFailed

# The interval between two rounds; all questions that are due are asked in one round, since waking up costs as well.
TICK_S = 0.05
NOTICE_S = 0.2
MAX_NOTICE_S = 0.5
CHECKS_PER_S = 320
# Clients often leave together: so long after one was found to be gone, all others are asked about.
ASK_ALL_S = 0.1
# A question takes about 0.1 ms; after this many, new outputs go first.
CHECKS_A_TURN = 16


class CancellationWatch:
    """Asks about requests in turn. `add` from any thread; `ask` from one."""

    def __init__(self) -> None:
        # The one whose last question is oldest comes first. Finished requests are dropped at their turn.
        self._watched: deque[tuple[str, Responder]] = deque()
        self._asked_at = 0.0
        self._due = 0.0
        self._ask_all_at = math.inf

    def add(self, request_id: str, responder: Responder) -> None:
        """Watch a request from now on."""
        self._watched.append((request_id, responder))

    def timeout_s(self) -> float:
        """How long the thread that asks may sleep before it asks again."""
        return 0.0 if self._due >= 1.0 else TICK_S

    def ask(self, now: float, in_flight: Collection[str]) -> tuple[list[str], list[tuple[str, SendFailed]]]:
        """Ask about the requests that are due at `now`, a few at a time.

        Returns the ids of those whose client is gone, and those that could not be asked about, with the reason; neither
        are watched any longer. Requests that are not `in_flight` were answered and are skipped.
        """
        self._become_due(now, len(in_flight))
        gone: list[str] = []
        failed: list[tuple[str, SendFailed]] = []
        asked = 0
        while self._watched:
            request_id, responder = self._watched[0]
            is_in_flight = request_id in in_flight
            # Those that have ended go also when no question is due, else requests that are all short would pile up.
            if is_in_flight and (self._due < 1.0 or asked == CHECKS_A_TURN):
                break
            self._watched.popleft()
            if not is_in_flight:
                continue
            asked += 1
            self._due -= 1.0
            try:
                cancelled = responder.is_cancelled()
            except SendFailed as error:
                failed.append((request_id, error))
                continue
            if cancelled:
                gone.append(request_id)
            else:
                self._watched.append((request_id, responder))
        if not self._watched:
            self._due = 0.0
        if gone and self._ask_all_at == math.inf:
            self._ask_all_at = now + ASK_ALL_S
        return gone, failed

    def _become_due(self, now: float, count: int) -> None:
        elapsed = now - self._asked_at
        if elapsed < TICK_S:
            return
        self._asked_at = now
        interval = min(max(NOTICE_S, count / CHECKS_PER_S), MAX_NOTICE_S)
        if now >= self._ask_all_at:
            self._ask_all_at = math.inf
            self._due = float(count)
        # Never more than one question about each.
        self._due = min(self._due + count * elapsed / interval, float(count))

"""The deadlines of requests in progress, in the order in which they pass."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from dflash_backend.core.request import Request


class Deadlines:
    """A heap of deadlines. An entry may outlive its request: the arrival number tells whether it still counts."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        """`requests`: those in progress, by id; the owner keeps it up to date."""
        self._requests = requests
        self._heap: list[tuple[float, int, str]] = []  # deadline in seconds, arrival, id

    def add(self, request: Request, deadline_s: float) -> None:
        """Keep a deadline. Now and then this drops those of ended requests, at O(1) for each that was added."""
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [entry for entry in self._heap if self._request_of(entry) is not None]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, request.arrival, request.request_id))

    def pop_expired(self, now: float) -> Iterator[Request]:
        """The requests in progress whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now:
            request = self._request_of(heapq.heappop(self._heap))
            if request is not None:
                yield request

    def _request_of(self, entry: tuple[float, int, str]) -> Request | None:
        _, arrival, request_id = entry
        request = self._requests.get(request_id)
        return request if request is not None and request.arrival == arrival else None

"""Takes speculation past a stop string out of the counts.

The text is made elsewhere, so the engine is told of its end some steps later. By then the request may have ended by its
own length or deadline, so what steps of ended requests yielded is remembered for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dflash_backend.spec_stats import SpecDecodingStats

# Steps of ended requests that are remembered, some megabytes.
MAX_STEPS = 50_000


@dataclass(slots=True)
class StepYields:
    """Of each step of a request that yielded tokens: the drafts that it verified, and how many tokens it yielded."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    def note(self, num_draft: int, num_tokens: int) -> None:
        """Add a step."""
        self.steps.append((num_draft, num_tokens))
        self.num_tokens += num_tokens

    def take_back(self, num_kept: int, counts: SpecDecodingStats) -> list[int]:
        """Correct `counts`, which have all steps, for an answer of the first `num_kept` tokens. Returns the drafts of
        each block that no longer counts at all."""
        removed: list[int] = []
        while self.num_tokens > num_kept and self.steps:
            num_draft, num_tokens = self.steps.pop()
            self.num_tokens -= num_tokens
            if num_draft:
                kept = max(0, num_kept - self.num_tokens)
                counts.take_back(num_draft, num_tokens, kept)
                if not kept:
                    removed.append(num_draft)
        return removed


class LateStops:
    """The yields of requests with stop strings that have ended lately."""

    def __init__(self) -> None:
        self._ended: deque[tuple[str, StepYields]] = deque()
        self._num_steps = 0

    def remember(self, request_id: str, yields: StepYields) -> None:
        """The request has ended; the oldest are forgotten when there are too many steps."""
        self._ended.append((request_id, yields))
        self._num_steps += len(yields.steps)
        while self._num_steps > MAX_STEPS:
            self._num_steps -= len(self._ended.popleft()[1].steps)

    def take(self, request_id: str) -> StepYields | None:
        """What the last request of this id yielded, if it is still known; it is forgotten."""
        for index in range(len(self._ended) - 1, -1, -1):
            known, yields = self._ended[index]
            if known == request_id:
                del self._ended[index]
                self._num_steps -= len(yields.steps)
                return yields
        return None

"""An engine's counts of speculation, and how tokens past a stop string leave them.

The text is made elsewhere, so the engine is told of its end some steps later. By then the request may have ended by its
own length or deadline, so what steps of ended requests yielded is remembered for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from dflash_backend.messages import AdaptiveSpeculationStats
from dflash_backend.spec_stats import SpecDecodingStats

# Steps of ended requests that are remembered, some megabytes.
MAX_STEPS = 50_000


@dataclass(slots=True)
class RequestYields:
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


class SpecDecodingCounts:
    """The counts of all requests, as metrics want them: a reported count never decreases."""

    def __init__(self, k: int) -> None:
        """k: the most drafts of a block."""
        self.delivered = SpecDecodingStats.zeros(k)
        """Every verified block so far, but for those that were taken back."""
        self.looked_up = SpecDecodingStats.zeros(k)
        """Those of them that prompt lookup had in place of the drafter's model, without what was taken back."""
        # The yields of requests with stop strings that have ended lately, and their steps.
        self._ended: deque[tuple[str, RequestYields]] = deque()
        self._num_ended_steps = 0
        # Verified drafts by position, of blocks past a stop string.
        self._removed_drafts_per_pos = [0] * k
        self._reported = SpecDecodingStats.zeros(k)
        self._reported_drafts_per_pos = [0] * k

    def remember(self, request_id: str, yields: RequestYields) -> None:
        """A request with stop strings has ended; the oldest are forgotten when there are too many steps. One without a
        step has nothing to take back, and would never be too many."""
        if not yields.steps:
            return
        self._ended.append((request_id, yields))
        self._num_ended_steps += len(yields.steps)
        while self._num_ended_steps > MAX_STEPS:
            self._num_ended_steps -= len(self._ended.popleft()[1].steps)

    def take_ended(self, request_id: str) -> RequestYields | None:
        """What the last request of this id yielded that has ended, if it is still known; it is forgotten."""
        for index in range(len(self._ended) - 1, -1, -1):
            known, yields = self._ended[index]
            if known == request_id:
                del self._ended[index]
                self._num_ended_steps -= len(yields.steps)
                return yields
        return None

    def take_back(self, request_id: str, yields: RequestYields | None, num_kept: int) -> None:
        """A stop string ended an answer after `num_kept` tokens. yields: of the request; None: it has ended by itself
        meanwhile."""
        if yields is None and (yields := self.take_ended(request_id)) is None:
            return
        for num_draft in yields.take_back(num_kept, self.delivered):
            for position in range(num_draft):
                self._removed_drafts_per_pos[position] += 1

    def report(self, policy: AdaptiveSpeculationStats | None) -> tuple[SpecDecodingStats, AdaptiveSpeculationStats]:
        """The counts for a metrics page, both without what was taken back. policy: the counts of the draft policy;
        None: there is none. A count that was taken back waits until others have come at its position; that is in the
        sums as well."""
        reported = self.delivered.maximum(self._reported)
        reported.num_accepted_tokens = sum(reported.num_accepted_tokens_per_pos)
        self._reported = reported
        if policy is None:
            return reported, AdaptiveSpeculationStats()
        now = zip(
            policy.num_draft_tokens_per_pos, self._removed_drafts_per_pos, self._reported_drafts_per_pos, strict=True
        )
        self._reported_drafts_per_pos = [max(count - removed, before) for count, removed, before in now]
        if self._reported_drafts_per_pos:
            reported.num_draft_tokens = sum(self._reported_drafts_per_pos)
        per_pos = list(self._reported_drafts_per_pos)
        return reported, msgspec.structs.replace(policy.copy(), num_draft_tokens_per_pos=per_pos)

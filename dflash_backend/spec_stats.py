"""Counts of speculative decoding, of one request or of many, and the figures that follow from them.

The names are vLLM's, as in the server's `spec_stats` and metrics.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec


class SpecDecodingStats(msgspec.Struct):
    """Verified draft blocks, their tokens, and the draft tokens that were accepted *and delivered*.

    A block adds the tokens that its step delivered, less one, to `num_accepted_tokens`, also where an answer ends
    within the block. `num_accepted_tokens_per_pos[i]` counts the blocks of which token i (0-based) is among them; it is
    as long as the longest block can be.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []

    @classmethod
    def zeros(cls, k: int) -> SpecDecodingStats:
        """No blocks yet, of at most `k` tokens."""
        return cls(num_accepted_tokens_per_pos=[0] * k)

    @classmethod
    def total(cls, stats: Iterable[SpecDecodingStats]) -> SpecDecodingStats:
        """The sum; all zero without any."""
        return sum(stats, cls())

    def observe_draft(self, num_draft: int, num_delivered: int) -> None:
        """Count a verified block of `num_draft` tokens whose step delivered `num_delivered` tokens, at least one."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_delivered - 1
        per_position = self.num_accepted_tokens_per_pos
        for position in range(num_delivered - 1):
            per_position[position] += 1

    def take_back(self, num_draft: int, num_delivered: int, num_kept: int) -> None:
        """Correct a counted block when only `num_kept` of its step's tokens belong to the answer; 0 removes it."""
        if num_kept == 0:
            self.num_drafts -= 1
            self.num_draft_tokens -= num_draft
        for position in range(max(num_kept - 1, 0), num_delivered - 1):
            self.num_accepted_tokens -= 1
            self.num_accepted_tokens_per_pos[position] -= 1

    def copy(self) -> SpecDecodingStats:
        """These counts as they are now."""
        return self + SpecDecodingStats()

    def maximum(self, other: SpecDecodingStats) -> SpecDecodingStats:
        """The larger of each count, here and in `other`."""
        return self._combined(other, max)

    def __add__(self, other: SpecDecodingStats) -> SpecDecodingStats:
        return self._combined(other, operator.add)

    def __sub__(self, earlier: SpecDecodingStats) -> SpecDecodingStats:
        return self._combined(earlier, operator.sub)

    def _combined(self, other: SpecDecodingStats, combine: Callable[[int, int], int]) -> SpecDecodingStats:
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        return SpecDecodingStats(
            combine(self.num_drafts, other.num_drafts),
            combine(self.num_draft_tokens, other.num_draft_tokens),
            combine(self.num_accepted_tokens, other.num_accepted_tokens),
            [combine(one, another) for one, another in itertools.zip_longest(mine, theirs, fillvalue=0)],
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a drafting step yields: 1 + accepted / drafts; 1 without drafts. Over several requests this
        is pooled: each weighs by its number of steps."""
        return acceptance_length(self.num_drafts, self.num_accepted_tokens) or 1.0

    @property
    def draft_tokens_per_step(self) -> float | None:
        """Mean tokens of a draft block; None without drafts."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of draft tokens that were accepted; None without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def per_position_rates(self) -> tuple[float, ...]:
        """For each position, the share of blocks whose token there was accepted; empty without drafts. Their sum is
        `acceptance_length - 1`."""
        if not self.num_drafts:
            return ()
        return tuple(count / self.num_drafts for count in self.num_accepted_tokens_per_pos)

    @property
    def accepted_histogram(self) -> tuple[int, ...]:
        """Entry n counts the blocks of which n tokens were accepted, from 0 on; empty without drafts.

        A token is accepted only with all before it, so the counts by position determine it.
        """
        if not self.num_drafts:
            return ()
        at_least = (self.num_drafts, *self.num_accepted_tokens_per_pos, 0)
        return tuple(more - fewer for more, fewer in itertools.pairwise(at_least))

    def as_dict(self) -> dict[str, int | float | Sequence[int] | Sequence[float] | None]:
        """Counts and derived figures by their names, for JSON."""
        return {
            **msgspec.structs.asdict(self),
            "acceptance_length": self.acceptance_length,
            "draft_tokens_per_step": self.draft_tokens_per_step,
            "acceptance_rate": self.acceptance_rate,
            "per_position_rates": list(self.per_position_rates),
            "accepted_histogram": list(self.accepted_histogram),
        }


class Acceptance:
    """Verified blocks of a drafter, by the length of the answer before them: more or fewer drafts are accepted at an
    answer's beginning, and what is seen soon after a swap are beginnings."""

    def __init__(self) -> None:
        self.total = 0
        """Blocks."""
        # By the number of binary digits of the answer's tokens, the verified drafts and the accepted ones.
        self._blocks: Counter[tuple[int, int, int]] = Counter()

    def note(self, num_output_tokens: int, num_verified: int, num_accepted: int) -> None:
        """Count a block behind that many tokens of an answer."""
        self.total += 1
        self._blocks[num_output_tokens.bit_length(), num_verified, num_accepted] += 1

    def by_position(self) -> dict[tuple[int, int], tuple[int, int]]:
        """By the length of the answer and the position in the block: the drafts that were verified behind accepted
        ones, and the accepted ones of them. Whatever the number of drafts of a block, they tell the same."""
        tried, accepted = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for (length, num_verified, num_accepted), count in self._blocks.items():
            for position in range(min(num_accepted + 1, num_verified)):
                tried[length, position] += count
                accepted[length, position] += count * (position < num_accepted)
        return {place: (count, accepted[place]) for place, count in tried.items()}


def acceptance_length(num_drafts: float, num_accepted_tokens: float) -> float | None:
    """Mean tokens that a drafting step yields, from counts that may be weighted; None without drafts."""
    return 1.0 + num_accepted_tokens / num_drafts if num_drafts > 0 else None

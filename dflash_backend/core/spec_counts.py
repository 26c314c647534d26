"""Counts of speculative decoding: of one request, or of all that the engine has run."""

from __future__ import annotations


class SpecCounts:
    """Verified draft blocks, their tokens, and the tokens of them that were accepted *and delivered*.

    A draft block adds the number of tokens that its step delivered, less one, to `num_accepted_tokens`: so
    `1 + num_accepted_tokens / num_drafts` is the mean number of tokens that a drafting step yielded, also where an
    answer ends within a block. `num_accepted_tokens_per_pos[i]` counts the blocks of which token i (0-based) is among
    them.
    """

    __slots__ = ("num_accepted_tokens", "num_accepted_tokens_per_pos", "num_draft_tokens", "num_drafts")

    def __init__(self, k: int) -> None:
        """`k`: the most tokens of a draft block."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_tokens_per_pos = [0] * k

    def add(self, num_draft: int, num_delivered: int) -> None:
        """Count a verified block of `num_draft` tokens whose step delivered `num_delivered`, at least one."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_delivered - 1
        for position in range(num_delivered - 1):
            self.num_accepted_tokens_per_pos[position] += 1

    def take_back(self, num_draft: int, num_delivered: int, num_kept: int) -> None:
        """Correct a block's count when only `num_kept` of its tokens belong to the answer; with 0 it counts no more."""
        if num_kept == 0:
            self.num_drafts -= 1
            self.num_draft_tokens -= num_draft
        for position in range(max(num_kept - 1, 0), num_delivered - 1):
            self.num_accepted_tokens -= 1
            self.num_accepted_tokens_per_pos[position] -= 1

    def largest(self, other: SpecCounts) -> SpecCounts:
        """The larger of each count, here and in `other`: for a counter, which must never fall."""
        both = SpecCounts(0)
        both.num_drafts = max(self.num_drafts, other.num_drafts)
        both.num_draft_tokens = max(self.num_draft_tokens, other.num_draft_tokens)
        both.num_accepted_tokens = max(self.num_accepted_tokens, other.num_accepted_tokens)
        positions = zip(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, strict=True)
        both.num_accepted_tokens_per_pos = [max(pair) for pair in positions]
        return both

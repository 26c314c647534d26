"""Where an answer ends: at a token that stops it, or at its length.

The core ends requests by this rule. A worker that has a step's tokens before it drafts asks as well, so that no drafts
are made for an answer that has just ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_backend.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class EndRule:
    """What ends one request's answer.

    stop_ids: tokens that end it, but for those among the first `min_tokens - 1`. max_tokens: its length at most.
    """

    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, sampling: SamplingParams, eos_token_ids: Sequence[int]) -> EndRule:
        """The rule of a request with these parameters.

        A grammar allows the end of an answer only when it is complete, or, with `ignore_eos` or `min_tokens`, when it
        cannot go on; so with one an end-of-sequence token always ends it.
        """
        has_grammar = sampling.structured_outputs is not None
        eos = () if sampling.ignore_eos and not has_grammar else eos_token_ids
        min_tokens = 0 if has_grammar else sampling.min_tokens
        return cls(frozenset(eos) | frozenset(sampling.stop_token_ids), min_tokens, sampling.max_tokens)

    def apply(
        self, token_ids: Sequence[int], num_before: int, max_tokens: int | None = None
    ) -> tuple[int, FinishReason | None]:
        """How many of a step's tokens, which follow `num_before` of the answer, belong to it, and why it ends there;
        None: it goes on. A stop token is kept: its text is the detokeniser's to leave out. max_tokens: a lower limit.
        """
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        if num_before + len(token_ids) < limit and self.stop_ids.isdisjoint(token_ids):
            return len(token_ids), None
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in self.stop_ids and num_before + count >= self.min_tokens:
                return count, "stop"
            if num_before + count >= limit:
                return count, "length"
        return len(token_ids), None

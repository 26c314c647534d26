"""Counts of a request: OpenAI's `usage`, and speculation as benchmarks read it."""

from __future__ import annotations

import itertools
from typing import Any

from dflash_client import Completion, Delta


class UsageCounter:
    """Adds up the deltas of a request's completions."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self._num_finished = 0
        # None for requests whose answers have no reasoning of their own.
        self.num_reasoning_tokens: int | None = None
        self._cached: list[tuple[int, dict[str, int]]] = []  # and those of them from tiers of KV
        self._drafts = self._draft_tokens = 0
        self._accepted: list[int] = []

    def add(self, more: Delta | Completion) -> None:
        """Count a delta, or a finished completion as a whole."""
        self.num_output_tokens += more.num_output_tokens
        if (stats := more.spec_stats) is None:
            return
        # What the end of a completion says of speculation and cached tokens.
        self._num_finished += 1
        if stats.get("num_cached_tokens") is not None:
            self._cached.append((stats["num_cached_tokens"], stats.get("num_loaded_tokens", {})))
        self._drafts += stats.get("num_drafts", 0)
        self._draft_tokens += stats.get("num_draft_tokens", 0)
        accepted = stats.get("num_accepted_tokens_per_pos", [])
        self._accepted = [sum(pair) for pair in itertools.zip_longest(self._accepted, accepted, fillvalue=0)]

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`. The cached tokens are null where the server does not tell them. Where some came from tiers
        of KV, `cached_tokens_by_tier` says how many."""
        details: dict[str, Any] | None = None
        if self._cached:
            num_cached, by_tier = max(self._cached, key=lambda each: each[0])
            details = {"cached_tokens": num_cached} | ({"cached_tokens_by_tier": by_tier} if by_tier else {})
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": details,
        }
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage

    def metrics(self) -> dict[str, Any] | None:
        """Speculation of a request with one completion, in the form that vLLM's pull request 48915 gives it and aiperf
        0.13 reads; None without a drafter. Entry n of the histogram counts the steps of which n drafts were accepted.
        """
        if not self._accepted or self._num_finished != 1:
            return None
        at_least = (self._drafts, *self._accepted, 0)
        num_accepted = sum(self._accepted)
        return {
            "speculative_decoding": {
                "num_spec_tokens": len(self._accepted),
                "num_spec_steps": self._drafts,
                "num_draft_tokens": self._draft_tokens,
                "num_accepted_draft_tokens": num_accepted,
                "acceptance_histogram": [more - fewer for more, fewer in itertools.pairwise(at_least)],
                "mean_acceptance_length": 1.0 + num_accepted / self._drafts if self._drafts else 1.0,
                "draft_acceptance_rate": num_accepted / self._draft_tokens if self._draft_tokens else 0.0,
            }
        }

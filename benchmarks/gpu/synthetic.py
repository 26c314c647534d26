"""Synthetic acceptance: how many drafts are accepted, drawn from a stated distribution instead of by the models.

Random weights agree on nothing, so a benchmark over them must say what acceptance it assumes. Here each draft is
accepted with the same probability p given that those before it are: the number accepted of k is geometric, cut off at
k. p is chosen so that the mean acceptance length, 1 + accepted, is the one asked for. Every output that rests on this
says "synthetic acceptance".
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MARK = "synthetic acceptance"
BISECTIONS = 80


@dataclass(frozen=True)
class SyntheticAcceptance:
    """Accepted drafts of k: geometric with success probability `probability`, cut off at k."""

    k: int
    probability: float

    @classmethod
    def with_mean_length(cls, k: int, length: float) -> SyntheticAcceptance:
        """The distribution with this mean acceptance length, `1 <= length <= k + 1`. Raises ValueError outside."""
        if not 1 <= length <= k + 1:
            raise ValueError(f"a mean acceptance length of {length} cannot be had with {k} drafts: 1 to {k + 1}")
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if cls(k, middle).mean_length < length:
                low = middle
            else:
                high = middle
        return cls(k, (low + high) / 2)

    @property
    def mean_length(self) -> float:
        """1 + the mean number of accepted drafts: the sum of the probabilities that at least 0, 1, ... k stand."""
        return sum(self.probability**count for count in range(self.k + 1))

    def weights(self) -> list[float]:
        """The probability of 0, 1, ... k accepted drafts."""
        p = self.probability
        return [p**count * (1 - p) for count in range(self.k)] + [p**self.k]

    def draw(self, count: int, seed: int) -> list[int]:
        """`count` independent numbers of accepted drafts."""
        return random.Random(seed).choices(range(self.k + 1), self.weights(), k=count)

    def describe(self) -> str:
        """For a report."""
        return (
            f"{MARK}: each of {self.k} drafts stands with probability {self.probability:.4f} given those before it, "
            f"mean acceptance length {self.mean_length:.2f}"
        )

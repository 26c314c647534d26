"""Where two greedy outputs part, and whether a tie explains it. Used by the tests that need a GPU.

In bf16 the same model gives slightly different logits at different batch shapes: a product of 16 rows is added up in
another order than one of a single row. So greedy outputs of two ways to run may part where the two best tokens are as
good as equal. LOSSLESS then means: where they part, the two tokens' logits lie within a few roundings of each other.
What follows is no comparison any more, since the two continue different texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# bf16 has 8 bits of mantissa, the first of them implied.
MANTISSA_BITS = 7
# The logits of either run are off by a few roundings of the numbers that they are made from.
TIE_ROUNDINGS = 4.0

Logits = Callable[[Sequence[int]], Sequence[float]]
"""The logits of the token that follows these, computed in float32 with the weights that both runs had."""


@dataclass(frozen=True)
class Parting:
    """The first difference of two outputs of a prompt: where, which tokens, and their distance in roundings of bf16."""

    prompt: int
    position: int
    tokens: tuple[int, int]
    roundings: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.roundings <= TIE_ROUNDINGS


def spacing(value: float) -> float:
    """The distance of two neighbouring bf16 numbers of this size."""
    return math.ldexp(1.0, math.frexp(abs(value))[1] - 1 - MANTISSA_BITS) if value else 0.0


def parting(
    prompt: int, ids: Sequence[int], first: Sequence[int], second: Sequence[int], logits: Logits
) -> Parting | None:
    """Where the outputs `first` and `second` to the prompt `ids` part; None when they are equal.

    An output that ended early parts from the other where it ended: at an infinite distance, since there is no token
    to compare with.
    """
    for position, tokens in enumerate(zip(first, second, strict=False)):
        if tokens[0] != tokens[1]:
            values = logits([*ids, *first[:position]])
            pair = values[tokens[0]], values[tokens[1]]
            highest = max(values)
            # Both must be as high as the highest.
            distance = max(highest - pair[0], highest - pair[1])
            return Parting(prompt, position, tokens, distance / spacing(highest))
    if len(first) != len(second):
        return Parting(prompt, min(len(first), len(second)), (-1, -1), math.inf)
    return None


def describe(partings: Sequence[Parting], num_prompts: int) -> str:
    """A line for the log: how many ties there were, and how far apart."""
    ties = [entry for entry in partings if entry.is_tie]
    farthest = max((entry.roundings for entry in ties), default=0.0)
    return (
        f"{num_prompts - len(partings)} of {num_prompts} outputs equal; {len(ties)} part at a tie, at most "
        f"{farthest:.2f} bf16 roundings apart; {len(partings) - len(ties)} part otherwise"
    )

"""The one record that every problem generator yields."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    `content` names what is asked without its phrasing; the training and held-out sets are split by its
    hash, so that no held-out content appears in training under another phrasing either.
    """

    category: str
    content: str
    question: str
    reference: str
    answer: str | None = None

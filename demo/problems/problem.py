"""The one record that every problem generator yields."""

import hashlib
from dataclasses import dataclass

HELD_OUT_SHARE = 10
"""One content in this many is held out."""


def is_held_out(content: str) -> bool:
    """Whether a problem's content belongs to the held-out sets: a fixed hash, the same on every machine."""
    return hashlib.sha256(content.encode()).digest()[0] % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    `content` names what is asked without its phrasing; the training and held-out sets are split by its
    hash, so that no held-out content appears in training under another phrasing either. `history` has the messages
    before the question, each its role and its content.
    """

    category: str
    content: str
    question: str
    reference: str
    answer: str | None = None
    history: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the question, as the chat template takes it."""
        said = (*self.history, ("user", self.question))
        return [{"role": role, "content": content} for role, content in said]

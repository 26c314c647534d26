"""How many tokens of an answer are reasoning."""

from __future__ import annotations

from collections.abc import Sequence


class ReasoningTokens:
    """Counts an answer's tokens up to the mark that ends the reasoning; all of them where it does not end."""

    def __init__(self, marker: Sequence[int]) -> None:
        """marker: the token ids of the mark; none where the model does not reason."""
        self._marker = list(marker)
        # Until the mark is there: the answer's tokens, of which those before `_looked` begin no mark.
        self._token_ids: list[int] = []
        self._looked = 0
        self._count: int | None = None if marker else 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the answer."""
        if self._count is not None:
            return
        self._token_ids += token_ids
        length = len(self._marker)
        for start in range(self._looked, len(self._token_ids) - length + 1):
            if self._token_ids[start : start + length] == self._marker:
                self._count = start + length
                return
        self._looked = max(0, len(self._token_ids) - length + 1)

    @property
    def count(self) -> int:
        """Tokens of the reasoning so far, its mark included."""
        return len(self._token_ids) if self._count is None else self._count

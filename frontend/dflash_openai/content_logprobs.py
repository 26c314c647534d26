"""Which tokens' log-probabilities belong to which piece of an answer's content."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dflash_client.results import TokenLogprobs
from dflash_openai.logprobs import chosen_of


class ContentLogprobs:
    """The log-probabilities of one answer's tokens in their order, until the text that they made is there.

    A token belongs to the first piece of content that has one of its characters. One without characters of its own,
    such as the first bytes of a character, goes with the token that follows it. What made no content, such as
    reasoning, tool calls, a stop string, and the end, is left out.
    """

    def __init__(self) -> None:
        # With the places in the answer's text where each begins and ends, in characters.
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._end = 0

    def add(self, entries: Iterable[TokenLogprobs]) -> None:
        """Add the next tokens of the answer."""
        for entry in entries:
            begin, self._end = self._end, self._end + len(chosen_of(entry)[1].decoded_token or "")
            self._waiting.append((begin, self._end, entry))

    def take(self, begin: int, end: int) -> list[TokenLogprobs]:
        """Those of the content between two places in the answer's text. Pieces are asked for in their order; what came
        before them is dropped."""
        while self._waiting and self._waiting[0][0] < begin and self._waiting[0][1] <= begin:
            self._waiting.popleft()
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            taken.append(self._waiting.popleft()[2])
        return taken

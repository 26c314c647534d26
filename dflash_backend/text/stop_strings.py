"""Finds stop strings in a text that comes in pieces, in time that does not depend on them. Used by the detokenizer.

Aho and Corasick's automaton (Efficient string matching, CACM 18, 1975): one step a character, however many stop strings
there are and however long. Its state is the longest end of the text that a stop string begins with, which is what must
be held back.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """The stop strings of a request; holds no text, so all its completions share it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        # By state; state 0 is the empty text.
        self._next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        # The longest stop string that ends in this state, and the longest that ends in any shorter end of it too.
        self._length: list[int] = [0]
        self._fallback: list[int] = [0]
        for stop in stops:
            self._add(stop)
        self._connect()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            found = self._next[state].get(character)
            if found is not None:
                return found
            if state == 0:
                return 0
            state = self._fallback[state]

    def match(self, state: int) -> int:
        """The length of the longest stop string that ends in this state, or 0."""
        return self._length[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            found = self._next[state].get(character)
            if found is None:
                found = len(self._next)
                self._next[state][character] = found
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self._length.append(0)
                self._fallback.append(0)
            state = found
        self._length[state] = len(stop)

    def _connect(self) -> None:
        """Link each state to the longest shorter end of it that is a state, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                # A stop string that ends here as a whole is longer than any that ends in the fallback.
                self._length[child] = self._length[child] or self._length[self._fallback[child]]
                queue.append(child)

    def extendable(self, state: int) -> int:
        """The longest end of this state that more text could make a stop string of."""
        while state and not self._next[state]:
            state = self._fallback[state]
        return state


@lru_cache(maxsize=32)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings; the completions of a request, and requests that are alike, share one."""
    return StopAutomaton(stops)


class StopStrings:
    """Cuts a text that comes in pieces at the stop string that is complete first.

    The result does not depend on where the pieces were cut: text that may be the beginning of a stop string is held
    back until it is clear, and of stop strings that end at the same character the longest counts.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        """`include` says that the stop string itself belongs to the text."""
        self._automaton = automaton(stops)
        self._include = include
        self._state = 0
        # As long as the state is deep.
        self._held = ""

    def append(self, text: str, finished: bool, search: bool = True) -> tuple[str, bool]:
        """What may leave of the text so far, and whether a stop string was found. Without `search` none that ends in
        this piece counts."""
        machine, state = self._automaton, self._state
        for index, character in enumerate(text):
            state = machine.step(state, character)
            if search and (length := machine.match(state)):
                end = len(self._held) + index + 1
                whole = self._held + text[: index + 1]
                return whole[: end if self._include else end - length], True
        state = machine.extendable(state)
        whole = self._held + text
        held = 0 if finished else machine.depth[state]
        self._state = state
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held], False

"""Finds stop strings in a text that arrives in pieces.

Aho and Corasick's automaton (Efficient string matching, CACM 18, 1975): one step a character, whatever the number and
length of the stop strings. Its state is the longest end of the text that a stop string begins with. That end is held
back.
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
        # The length of the longest stop string that ends in this state, or in any shorter end of it; 0 for none.
        self.length: list[int] = [0]
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

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.length.append(0)
                self._fallback.append(0)
            state = self._next[state][character]
        self.length[state] = len(stop)

    def _connect(self) -> None:
        """Link each state to its longest proper suffix that is a state, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                # A stop string that ends here as a whole is longer than any that ends in the fallback.
                self.length[child] = self.length[child] or self.length[self._fallback[child]]
                queue.append(child)

    def extendable(self, state: int) -> int:
        """The longest suffix of this state that more text could complete to a stop string."""
        while state and not self._next[state]:
            state = self._fallback[state]
        return state


automaton = lru_cache(maxsize=32)(StopAutomaton)
"""That of stop strings, shared by completions and requests."""


class StopStrings:
    """Ends a text that arrives in pieces at the first complete stop string.

    The result does not depend on the pieces: text that may begin a stop string is held back, and of stop strings that
    end at the same character the longest counts.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        """`include`: the stop string itself belongs to the text."""
        self._automaton = automaton(stops)
        self._include = include
        self._state = 0
        # As long as the state is deep.
        self._held = ""
        # The stop string that was found.
        self.found: str | None = None

    def append(self, text: str, finished: bool, search: bool = True) -> tuple[str, bool]:
        """The text that may leave now, and whether a stop string was found. Without `search`, stop strings that end in
        this piece do not count."""
        machine, state = self._automaton, self._state
        for index, character in enumerate(text):
            state = machine.step(state, character)
            if search and (length := machine.length[state]):
                end = len(self._held) + index + 1
                whole = self._held + text[: index + 1]
                self.found = whole[end - length :]
                return whole[: end if self._include else end - length], True
        state = machine.extendable(state)
        whole = self._held + text
        held = 0 if finished else machine.depth[state]
        self._state = state
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held], False

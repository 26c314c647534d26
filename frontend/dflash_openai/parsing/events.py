"""What the text of an answer is made of, in the order in which it came: reasoning, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's content: a part of the answer's text without gaps, which ends `end` characters from the
    text's beginning."""

    text: str
    end: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a tool call, the `index`-th of the answer (0-based): more of the JSON text of its arguments, as the model
    writes it. `first` and `last`: whether it begins and ends the call, both where it is the whole of it. Without
    `complete` the arguments, with the last delta, are only the beginning of an object, since the answer broke off."""

    index: int
    id: str
    name: str
    arguments: str
    complete: bool = True
    first: bool = True
    last: bool = True


Event = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Splits one answer into events as its text comes in."""

    def feed(self, text: str) -> list[Event]:
        """The events that this part of the text completes. However an answer is split into parts, the same events come
        of it, but for where the text of a delta ends."""

    def finish(self) -> list[Event]:
        """The events of what was held back, at the end of the answer."""

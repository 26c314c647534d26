"""Calls that a model writes into its reasoning, which it may not end: they count where nothing ends the reasoning."""

from __future__ import annotations

from dflash_openai.parsing.tool_formats import ToolFormat, held_back

# How calls begin behind their mark, without white space, and how far that is looked for.
_BEGINNINGS = ('{"name"', "<function=")
_MAX_CHARS = 48


class ThoughtCalls:
    """Holds the reasoning back from the first text on that begins as a call does."""

    def __init__(self, tools: ToolFormat | None) -> None:
        """tools: how the model writes calls; None where the request offers none."""
        self._mark = tools.open if tools is not None and tools.close else ""
        # What is held back: since it begins a call, or may begin one.
        self._is_call = False
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        """The text that is no call, of what was held back and of more text."""
        if not self._mark:
            return text
        if self._is_call:
            self._held.append(text)
            return ""
        text, self._held = "".join([*self._held, text]), []
        at = 0
        while (begin := text.find(self._mark, at)) >= 0:
            at = begin + len(self._mark)
            behind = "".join(text[at : at + _MAX_CHARS].split())
            self._is_call = behind.startswith(_BEGINNINGS)
            if self._is_call or (len(text) - at < _MAX_CHARS and any(each.startswith(behind) for each in _BEGINNINGS)):
                break
        else:
            begin = len(text) - held_back(text[at:], (self._mark,))
        self._held = [text[begin:]]
        return text[:begin]

    def finish(self) -> str:
        """What was held back, at the reasoning's end."""
        held, self._held = "".join(self._held), []
        return held

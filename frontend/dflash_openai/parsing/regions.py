"""The regions of an answer, found by transformers' `ResponseParser`: reasoning, calls between their marks, and calls
whose open mark the model has left out. A region of calls goes on where its close mark is text of a call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from dflash_openai.parsing.call_streams import CallStream, call_stream
from dflash_openai.parsing.reasoning_formats import ReasoningFormat
from dflash_openai.parsing.tool_formats import QWEN3_CODER, Schemas, ToolFormat

CONTENT, REASONING, TOOL_CALLS = "content", "reasoning", "tool_calls"
# A call of Qwen3-Coder's without the mark before it, which the model may leave out.
BARE_CALL, BARE_CLOSE = "bare_call", "</function>"
_BARE_OPEN = re.compile(r"<function=[^>]*>")
_SPACES = re.compile(r"\s*")
# White space within such a call's open and close marks.
_MAX_SPACES = 16
_BARE_CLOSE_PATTERN = rf"{BARE_CLOSE}(?:\s{{0,{_MAX_SPACES}}}{re.escape(QWEN3_CODER.close)})?"
_BARE_CLOSE = re.compile(_BARE_CLOSE_PATTERN)
# Text is taken as it is: what the parser makes of a region at its end is not used.
_VERBATIM = {"content": "text", "content_args": {"strip": False}}
# Text that the regions have told of is let go when it is longer than this.
MAX_TOLD_CHARS = 4096


class Regions(ResponseParser):  # type: ignore[misc]  # transformers has no types
    """The regions of one answer, as its text comes in. `prefix`: the open mark of the reasoning, where the prompt has
    it."""

    # Of the base class: text that came, and up to where the regions have told of it.
    _buffer: str
    _pos: int

    def __init__(
        self, reasoning: ReasoningFormat | None, tools: ToolFormat | None, schemas: Schemas, prefix: str
    ) -> None:
        self._tools, self._schemas = tools, schemas
        # What reads the calls of the region that is open, when a close mark has come: text that it has not read, and
        # how much of what comes next it has.
        self._reader: CallStream | None = None
        self._unread: list[str] = []
        self._ahead = 0
        super().__init__(_response_template(reasoning, tools, schemas), prefix=prefix)

    def let_go(self) -> None:
        """Let go of text that the regions have told of: they would copy it with each piece that comes. One character
        stays, since an answer's beginning is where their text begins."""
        if self._pos > MAX_TOLD_CHARS:
            self._buffer, self._pos = self._buffer[self._pos - 1 :], 1
        self._body = ""

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._reader, self._ahead = None, 0
        self._unread = [m[0]] if field.name == BARE_CALL else []

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        super()._accumulate(events, text)
        if self._current in (TOOL_CALLS, BARE_CALL):
            self._unread.append(text[self._ahead :])
            self._ahead = max(0, self._ahead - len(text))

    def _scan(self, watch: Any, eos: bool) -> Any:
        """As of the base class, but for close marks that are text of a call."""
        begin = self._pos
        try:
            while True:
                found, hold_start = super()._scan(watch, eos)
                if found is None or found[0] != "close":
                    return found, hold_start
                mark = found[2]
                if not self._is_text(begin, mark.start()):
                    goes_on = not eos and self._current == BARE_CALL and _may_go_on(mark, self._buffer)
                    return (None, mark.start()) if goes_on else (found, hold_start)
                self._pos = mark.end()
        finally:
            self._pos = begin

    def _is_text(self, begin: int, at: int) -> bool:
        """Whether a close mark `at` a place of the buffer is text of a call; the region is told of up to `begin`."""
        if self._tools is None or self._current not in (TOOL_CALLS, BARE_CALL):
            return False
        is_json = self._tools is not QWEN3_CODER
        if not is_json and self._current == TOOL_CALLS:
            # A value without its end would go on to the answer's end.
            return False
        self._reader = self._reader or call_stream(self._tools, self._schemas)
        self._unread.append(self._buffer[begin + self._ahead : at])
        self._ahead = at - begin
        self._reader.feed("".join(self._unread))
        self._unread = []
        return self._reader.in_text


def _may_go_on(mark: re.Match[str], text: str) -> bool:
    """Whether what follows a call without its open mark may become a close mark."""
    rest = text[mark.end() : mark.end() + _MAX_SPACES + len(QWEN3_CODER.close)]
    begun = rest.lstrip()
    return mark[0] == BARE_CLOSE and len(rest) - len(begun) <= _MAX_SPACES and QWEN3_CODER.close.startswith(begun)


def mark_at(
    text: str, at: int, region: Mapping[str, Any], reasoning: ReasoningFormat | None, tools: ToolFormat | None
) -> tuple[int, str]:
    """Where in the text a region's open or close mark begins, and the mark; empty where none is there, since the
    answer's end closes a region without one."""
    is_open, field = region["type"] == "region_open", region["field"]
    if field == BARE_CALL:
        found = (_BARE_OPEN if is_open else _BARE_CLOSE).match(text, at)
        return at, found[0] if found else ""
    marks = tools if field == TOOL_CALLS else reasoning
    if field == CONTENT or marks is None:
        return at, ""
    spaces = _SPACES.match(text, at) if is_open else None
    begin = at if spaces is None else spaces.end()
    mark = marks.open if is_open else marks.close
    return begin, mark if text.startswith(mark, begin) else ""


def _response_template(reasoning: ReasoningFormat | None, tools: ToolFormat | None, schemas: Schemas) -> dict[str, Any]:
    """The regions, as transformers writes a model's `response_template`. Reasoning is only at an answer's beginning."""
    fields: dict[str, Any] = {CONTENT: _VERBATIM}
    if reasoning is not None:
        opening = rf"\A\s*{re.escape(reasoning.open)}"
        fields[REASONING] = {"open_pattern": opening, "close": reasoning.close, **_VERBATIM}
    if tools is not None:
        marks: dict[str, Any] = {"open": tools.open} if tools.open else {"open_pattern": tools.opening}
        if tools.close:
            marks["close"] = tools.close
        fields[TOOL_CALLS] = {**marks, "repeats": True, **_VERBATIM}
    # Only functions of the request, with what follows their names: an answer may write of others.
    if tools is QWEN3_CODER and (names := [re.escape(name) for name in schemas if not re.search(r"[>\s]", name)]):
        opening = rf"<function=(?:{'|'.join(names)})>(?=\s{{0,{_MAX_SPACES}}}(?:<parameter=|{BARE_CLOSE}))"
        fields[BARE_CALL] = {
            "open_pattern": opening, "close_pattern": _BARE_CLOSE_PATTERN, "repeats": True, **_VERBATIM,
        }  # fmt: skip
    # The prefix that the parser is given is the message's beginning alone, so there is no anchor in it to look for.
    return {"start_anchor": "\0", "fields": fields}

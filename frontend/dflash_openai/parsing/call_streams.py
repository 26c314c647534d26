"""Tool calls between their marks, as they come in: a call begins as soon as its name is whole and its arguments have
begun, so that a client sees long arguments grow."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from dflash_openai.parsing.tool_formats import (
    BARE_NAME,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHON_TAG,
    QWEN3_CODER,
    TEXT,
    Schemas,
    ToolFormat,
    allowed_types,
    begun_calls,
    held_back,
    typed_value,
)


class Piece(NamedTuple):
    """More of a call: its name with the first piece, more text of its arguments, and with the last one whether it is
    complete."""

    name: str | None
    arguments: str
    complete: bool | None = None


_MARK = re.compile(r'["\\{}\[\]]')
_HEAD = r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
# How a call begins up to its arguments: the first one between the marks, and others after it.
_HEADS = {
    HERMES.name: (re.compile(rf"\s*{_HEAD}", re.DOTALL), None),
    LLAMA3_JSON.name: (
        re.compile(rf"\s*(?:{re.escape(PYTHON_TAG)}\s*)?{_HEAD}", re.DOTALL),
        re.compile(rf"\s*;\s*{_HEAD}", re.DOTALL),
    ),
    MISTRAL.name: (re.compile(rf"\s*\[\s*{_HEAD}", re.DOTALL), re.compile(rf"\s*,\s*{_HEAD}", re.DOTALL)),
}
_BARE_HEADS = re.compile(rf"\s*+{BARE_NAME}"), re.compile(rf"\s*+{re.escape(MISTRAL.open)}\s*+{BARE_NAME}")
# A head is shorter: a longer text has none.
MAX_HEAD_CHARS = 4096


class JsonText:
    """Follows the brackets of JSON from its first one on, however it is split."""

    def __init__(self, depth: int = 0) -> None:
        """depth: of the brackets that are open already."""
        self._depth, self._in_string, self._escaped = depth, False, False

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a string."""
        return self._in_string

    def end(self, text: str, begin: int = 0) -> int | None:
        """Where in more text, which begins there, the last bracket closes; None where it does not."""
        at = begin + int(self._escaped and begin < len(text))
        self._escaped = self._escaped and begin == len(text)
        while found := _MARK.search(text, at):
            at, sign = found.end(), found[0]
            if self._in_string:
                if sign == "\\":
                    if at == len(text):
                        self._escaped = True
                        return None
                    at += 1
                self._in_string = sign != '"'
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


class JsonCalls:
    """Calls between two marks whose arguments are JSON as the model wrote it, in objects with a `name`, or behind the
    name. `begun`: whether a piece has come; until then the text may be no call."""

    def __init__(self, format: ToolFormat, names: Collection[str] | None) -> None:
        """names: of the functions that may be called; None: any."""
        self.begun = False
        self._format, self._names = format, names
        self._text = ""
        self._is_bare = False
        # What is read: a call's head, its arguments, what its object has after them, or nothing more, which is kept.
        self._state = "head"
        self._unread: list[str] = []
        self._json = JsonText()

    @property
    def in_text(self) -> bool:
        """Whether the text so far ends within a string of a call."""
        return self._state in ("arguments", "rest") and self._json.in_string

    def feed(self, text: str) -> list[Piece]:
        """The pieces of more text."""
        if self._state == "none":
            self._unread.append(text)
            return []
        self._text += text
        pieces: list[Piece] = []
        name: str | None = None
        at = 0
        while True:
            if self._state == "head":
                found = self._head(at)
                if found is None:
                    break
                name, at = found
                self.begun, self._state, self._json = True, "arguments", JsonText()
            end = self._json.end(self._text, at)
            more, at = self._text[at:end], len(self._text) if end is None else end
            if self._state == "arguments" and (more or name is not None):
                pieces.append(Piece(name, more, None if end is None else True))
                name = None
            if end is None:
                break
            if self._state == "arguments" and not self._is_bare:
                self._state, self._json = "rest", JsonText(1)
            else:
                self._state = "head"
        self._text = self._text[at:]
        return pieces

    def finish(self) -> list[Piece]:
        """The pieces of what was held back, where the region ends. Nothing where no call has begun."""
        if self._state == "arguments":
            return [Piece(None, "", False)]
        if not self.begun or self._state == "rest":
            return []
        calls = begun_calls(self._format, "".join([self._text, *self._unread]), self._is_bare)
        allowed = (each for each in calls if self._names is None or each[0].name in self._names)
        return [Piece(call.name, call.arguments, complete) for call, complete in allowed]

    def _head(self, at: int) -> tuple[str, int] | None:
        """The name of the call that begins there, and where its arguments begin; None where there is none yet."""
        if not self.begun and self._format is MISTRAL:
            self._is_bare = not self._text[:MAX_HEAD_CHARS].lstrip().startswith("[")
        first, others = _BARE_HEADS if self._is_bare else _HEADS[self._format.name]
        pattern = others if self.begun else first
        found = None if pattern is None else pattern.match(self._text, at, at + MAX_HEAD_CHARS)
        if found is not None:
            name = found[1] if self._is_bare else _decoded(found[1])
            if name and (self._names is None or name in self._names):
                return name, found.end()
        if pattern is None or found is not None or len(self._text) - at >= MAX_HEAD_CHARS:
            self._state = "none"
        return None


def _decoded(text: str) -> str:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return ""


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*(?=<parameter=|</function>)")
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(?:\n|(?=[^\n]))")
_SPACES = re.compile(r"\s*")
_CLOSE, _END = "</parameter>", "</function>"


class TaggedCalls:
    """A call as Qwen3-Coder writes it, with a tag for each parameter; the arguments become JSON. Values that are text
    grow with what comes in, others come when they are whole. `begun` as of `JsonCalls`."""

    def __init__(self, schemas: Schemas) -> None:
        self.begun = False
        self._schemas = schemas
        # Text that came, and up to where it is read.
        self._text, self._at = "", 0
        self._properties: Any = None
        # What is read: the call's head, a parameter's, its value, or nothing more.
        self._state = "head"
        self._schema: Any = None
        self._is_text = False
        self._num_parameters = 0
        # A value that is no text, as far as it came.
        self._value_parts: list[str] = []

    @property
    def in_text(self) -> bool:
        """Whether the text so far ends within a parameter's value."""
        return self._state == "value"

    def feed(self, text: str) -> list[Piece]:
        """The pieces of more text."""
        if self._state not in ("head", "parameter", "value"):
            return []
        self._text, self._at = self._text[self._at :] + text, 0
        name: str | None = None
        parts: list[str] = []
        ended: bool | None = None
        if self._state == "head":
            if found := _FUNCTION.match(self._text, 0, MAX_HEAD_CHARS):
                name, self._at = found[1], found.end()
                self.begun, self._state = True, "parameter"
                self._properties = self._schemas.get(name, {}).get("properties")
                parts.append("{")
            elif len(self._text) >= MAX_HEAD_CHARS:
                self._state = "none"
        while self._state in ("parameter", "value"):
            more = self._parameter() if self._state == "parameter" else self._value()
            if more is None:
                break
            parts.append(more)
            if self._state == "done":
                ended = True
        arguments = "".join(parts)
        return [Piece(name, arguments, ended)] if arguments or ended else []

    def finish(self) -> list[Piece]:
        """As of `JsonCalls`. The mark that ends the function may be missing."""
        if not self.begun or self._state == "done":
            return []
        is_whole = self._state == "parameter" and not self._text[self._at :].strip()
        self._state = "done"
        return [Piece(None, "}" if is_whole else "", is_whole)]

    def _parameter(self) -> str | None:
        """The JSON of what comes next: a parameter's name, or the end; None where it is not whole."""
        spaces = _SPACES.match(self._text, self._at)
        assert spaces is not None
        self._at = spaces.end()
        if found := _PARAMETER.match(self._text, self._at, self._at + MAX_HEAD_CHARS):
            name, self._at = found[1], found.end()
            self._state = "value"
            self._schema = self._properties.get(name) if isinstance(self._properties, dict) else None
            self._is_text = allowed_types(self._schema) == TEXT
            comma = "," if self._num_parameters else ""
            self._num_parameters += 1
            return f"{comma}{json.dumps(name, ensure_ascii=False)}:" + '"' * self._is_text
        rest = self._text[self._at : self._at + MAX_HEAD_CHARS]
        if rest.startswith(_END):
            self._state = "done"
            return "}"
        may_follow = any(mark.startswith(rest) or rest.startswith(mark) for mark in (_END, "<parameter="))
        if not may_follow or len(rest) == MAX_HEAD_CHARS:
            self._state = "broken"
        return None

    def _value(self) -> str | None:
        """The JSON of more of a value; None where there is nothing yet."""
        at = self._text.find(_CLOSE, self._at)
        if at >= 0:
            value, self._at = self._text[self._at : at], at + len(_CLOSE)
            self._state = "parameter"
            if self._is_text:
                return _escaped(value.removesuffix("\n")) + '"'
            value, self._value_parts = "".join([*self._value_parts, value]), []
            return msgspec.json.encode(typed_value(value.removesuffix("\n"), self._schema)).decode()
        held = held_back(self._text, (f"\n{_CLOSE}", _CLOSE)) if self._is_text else len(_CLOSE)
        end = max(self._at, len(self._text) - held)
        value, self._at = self._text[self._at : end], end
        if not self._is_text:
            self._value_parts.append(value)
        return _escaped(value) if self._is_text and value else None


def _escaped(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


CallStream = JsonCalls | TaggedCalls


def call_stream(format: ToolFormat, schemas: Schemas) -> CallStream:
    """What reads the calls of a region."""
    if format is QWEN3_CODER:
        return TaggedCalls(schemas)
    # No mark tells a call of Llama's from an answer in JSON, so only calls of functions that the request offers count.
    return JsonCalls(format, schemas.keys() if format is LLAMA3_JSON else None)

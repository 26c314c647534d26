"""How families of models write tool calls: the marks around them, and what is between the marks."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

PYTHON_TAG = "<|python_tag|>"
# Mistral's chat templates refuse a history with ids of another form.
_MISTRAL_ID_CHARS, _MISTRAL_ID_LENGTH = string.ascii_letters + string.digits, 9
_FUNCTION = re.compile(r"\s*+<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*+", re.DOTALL)
# A call as JSON up to its arguments, and a call of Mistral's newer form, as far as they came.
_BEGUN_CALL = re.compile(
    r'\s*(\{)\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*))?', re.DOTALL
)
# What goes between Llama's calls, or ends them.
_DIVIDER = re.compile(r"\s*(?:;\s*|\Z)")
# What goes before calls as JSON, between them, and behind the arguments of one that is whole.
_BEFORE_CALLS, _BETWEEN_CALLS = re.compile(r"[} \n,;\[]*"), re.compile(r"[} \n,;]*")
_GOES_ON = re.compile(r'\s*(?:\}|,\s*")')
_BEGUN_MISTRAL = re.compile(r"\s*([^\s\[{]+)\s*(?=[\[{])(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)?", re.DOTALL)
# Nothing is given back: white space that two parts of a pattern may take would be tried both ways.
BARE_NAME = r"([^\s\[{]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)"
_MISTRAL_NAME = re.compile(rf"\s*+{BARE_NAME}")


class ToolCall(NamedTuple):
    """A function's name and the JSON text of its arguments, an object."""

    name: str
    arguments: str


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by the function's name."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls; `name` is vLLM's for it (`--tool-call-parser`).

    open, close: the marks around a call, or around several. Without `close` calls go on until the answer ends; without
    `open` an answer is calls or content as a whole, and `opening` is the pattern with which calls begin. read: the
    calls between the marks, in order; None where the text is no call. new_id: makes the id of a call.
    """

    name: str
    open: str
    close: str
    read: Callable[[str, Schemas], list[ToolCall] | None]
    opening: str = ""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


class _JsonCall(msgspec.Struct):
    """A call as JSON, with its arguments as they were written; Llama says `parameters`."""

    name: str
    arguments: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def call(self) -> ToolCall | None:
        """The call; None where it has no name or its arguments are no object."""
        raw = bytes(self.arguments) or bytes(self.parameters) or b"{}"
        if raw.startswith(b'"'):
            raw = msgspec.json.decode(raw, type=str).strip().encode()
            msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return ToolCall(self.name, raw.decode()) if self.name and raw.startswith(b"{") else None


_CALL = msgspec.json.Decoder(_JsonCall)
_CALLS = msgspec.json.Decoder(list[_JsonCall])
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECODER = json.JSONDecoder()
# What a malformed or deeply nested text raises.
_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)


def _all_or_none(calls: Sequence[ToolCall | None]) -> list[ToolCall] | None:
    complete = [call for call in calls if call is not None]
    return complete if complete and len(complete) == len(calls) else None


def _read_hermes(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """One JSON object with `name` and `arguments`."""
    try:
        return _all_or_none([_CALL.decode(text.strip().encode()).call()])
    except _ERRORS:
        return None


def _read_llama(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """JSON objects with `name` and `parameters`, divided by `;`. No mark tells such a call from an answer in JSON, so
    only calls of functions that the request offers count."""
    text = text.strip().removeprefix(PYTHON_TAG).strip()
    calls, at = [], 0
    try:
        while at < len(text):
            _, end = _DECODER.raw_decode(text, at)
            calls.append(_CALL.decode(text[at:end].encode()).call())
            if (divider := _DIVIDER.match(text, end)) is None:
                return None
            at = divider.end()
    except (ValueError, *_ERRORS):
        return None
    found = _all_or_none(calls)
    return found if found and all(call.name in schemas for call in found) else None


def _read_mistral(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """A JSON list of calls, or `name[ARGS]{...}` for each call, with the open mark between calls."""
    try:
        if text.lstrip().startswith("["):
            return _all_or_none([call.call() for call in _CALLS.decode(text.strip().encode())])
        calls: list[ToolCall] = []
        for part in text.split(MISTRAL.open):
            head = _MISTRAL_NAME.match(part)
            if head is None or not is_object(arguments := part[head.end() :].strip()):
                return None
            calls.append(ToolCall(head[1], arguments))
        return calls or None
    except _ERRORS:
        return None


def _read_qwen3_coder(text: str, schemas: Schemas) -> list[ToolCall] | None:
    """`<function=name>` around `<parameter=name>value</parameter>`; the schema says which values are text."""
    function = _FUNCTION.match(text)
    if function is None:
        return None
    name, body = function[1], text[function.end() :].rstrip().removesuffix("</function>")
    properties = schemas.get(name, {}).get("properties")
    arguments: dict[str, Any] = {}
    end = 0
    while parameter := _PARAMETER.match(body, end):
        end = parameter.end()
        schema = properties.get(parameter[1]) if isinstance(properties, Mapping) else None
        arguments[parameter[1]] = typed_value(parameter[2], schema)
    if body[end:].strip():
        return None
    try:
        return [ToolCall(name, msgspec.json.encode(arguments).decode())]
    except _ERRORS:
        return None


def typed_value(value: str, schema: Any) -> Any:
    """A parameter's value: text where the schema allows nothing else or the value is no JSON, else the value that it
    spells. Where the schema allows text too, one that it spells in another type that is allowed."""
    types = allowed_types(schema)
    if types == TEXT:
        return value
    takes_text = types is not None and "string" in types
    if types is not None and "boolean" in types and not takes_text and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    try:
        found = msgspec.json.decode(value.strip().encode())
    except _ERRORS:
        return value
    if types is not None and takes_text and not _is_of(found, types):
        return value
    return found if isinstance(found, bool | int | float | str | None) else msgspec.Raw(value.strip().encode())


TEXT = frozenset(["string"])
# JSON schema's types, of Python's that are read from JSON.
_TYPES: dict[type, frozenset[str]] = {
    bool: frozenset(["boolean"]), int: frozenset(["integer", "number"]), float: frozenset(["number"]),
    str: TEXT, dict: frozenset(["object"]), list: frozenset(["array"]),
    type(None): frozenset(["null"]),
}  # fmt: skip
# Schemas that are nested deeper say nothing here.
_MAX_DEPTH = 16


def allowed_types(schema: Any, depth: int = 0) -> frozenset[str] | None:
    """The types that a parameter's schema allows, also by its alternatives and values; None where it does not say. A
    parameter without a schema is text."""
    if not isinstance(schema, Mapping):
        return TEXT if depth == 0 else None
    if depth > _MAX_DEPTH:
        return None
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else None
    found = [None if names is None else frozenset(str(name) for name in names)]
    if isinstance(values := schema.get("enum"), list):
        found.append(_union([_TYPES.get(type(value)) for value in values]))
    if "const" in schema:
        found.append(_TYPES.get(type(schema["const"])))
    for name in ("anyOf", "oneOf"):
        if isinstance(each := schema.get(name), list):
            found.append(_union([allowed_types(one, depth + 1) for one in each]))
    if isinstance(each := schema.get("allOf"), list):
        found += [allowed_types(one, depth + 1) for one in each]
    said = [types for types in found if types is not None]
    return frozenset.intersection(*(_with_integer(types) for types in said)) if said else None


def _union(found: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    said = [types for types in found if types is not None]
    return frozenset[str]().union(*said) if said and len(said) == len(found) else None


def _with_integer(types: frozenset[str]) -> frozenset[str]:
    """An integer is a number."""
    return types | {"integer"} if "number" in types else types


def _is_of(value: Any, types: frozenset[str]) -> bool:
    """Whether a value has one of JSON schema's types, text apart."""
    return not isinstance(value, str) and not types.isdisjoint(_TYPES[type(value)])


def truncated_calls(format: ToolFormat, text: str) -> list[tuple[ToolCall, bool]]:
    """The calls of an answer that can only be calls and broke off, from the first mark that was not closed on: each
    with whether it is complete, the last one with its arguments as far as they came. None of a call whose name is not
    whole."""
    if format.open and format.open not in text:
        return []
    text = text.partition(format.open)[2] if format.open else text.strip().removeprefix(PYTHON_TAG)
    is_bare = format is MISTRAL and not text.lstrip().startswith("[")
    return begun_calls(format, text, is_bare)


def begun_calls(format: ToolFormat, text: str, is_bare: bool = False) -> list[tuple[ToolCall, bool]]:
    """Calls one after the other, the last of which may have no end: as JSON, or where it `is_bare` as Mistral's newer
    models write them."""
    if is_bare:
        found = [_BEGUN_MISTRAL.match(part) for part in text.split(format.open)]
        return [(ToolCall(part[1], part[2] or ""), is_object(part[2] or "")) for part in found if part]
    calls: list[tuple[ToolCall, bool]] = []
    at = _end_of(_BEFORE_CALLS, text, 0)
    while begun := _BEGUN_CALL.match(text, at):
        try:
            name = json.loads(begun[2])
        except ValueError:
            return calls
        begin = end = begun.start(3)
        if begin >= 0:
            try:
                end = _DECODER.raw_decode(text, begin)[1]
            except (ValueError, RecursionError):
                return [*calls, (ToolCall(name, begun[3]), False)]
        # An error costs as much as all the text before it, so one is not looked for in vain.
        may_be_whole = begin < 0 or _GOES_ON.match(text, end) is not None
        whole, end_of_call = _whole_call(text, begun.start(1)) if may_be_whole else (None, 0)
        if whole is not None:
            end = end_of_call
        elif begin < 0:
            return [*calls, (ToolCall(name, ""), False)]
        calls.append((whole or ToolCall(name, text[begin:end]), True))
        at = _end_of(_BETWEEN_CALLS, text, end)
    return calls


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a pattern that may be empty ends."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def _whole_call(text: str, at: int) -> tuple[ToolCall | None, int]:
    """The call that begins there, and where it ends; None for one that is not whole."""
    try:
        _, end = _DECODER.raw_decode(text, at)
        return _CALL.decode(text[at:end].encode()).call(), end
    except (ValueError, *_ERRORS):
        return None, 0


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        _OBJECT.decode(text.encode())
    except _ERRORS:
        return False
    return True


def held_back(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def _mistral_id() -> str:
    return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(_MISTRAL_ID_LENGTH))


# Hermes 2 Pro and Qwen2.5, Qwen3.
HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", _read_hermes)
# Llama 3.1 and later.
LLAMA3_JSON = ToolFormat("llama3_json", "", "", _read_llama, opening=rf"\A(?=\s*(?:{re.escape(PYTHON_TAG)}\s*)?\{{)")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", _read_mistral, new_id=_mistral_id)
# Qwen3-Coder.
QWEN3_CODER = ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", _read_qwen3_coder)

TOOL_FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER)} | {"qwen3_xml": QWEN3_CODER}

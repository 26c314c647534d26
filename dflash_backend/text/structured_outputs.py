"""Reads the sampling parameters `structured_outputs`, vLLM's, and `response_format`, OpenAI's: form and size.

Whether a grammar can be followed shows when the engine compiles it. A schema may be longer and deeper than all other
parameters together, so its text is taken out of theirs and read by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from dflash_backend.messages import StructuredOutputs
from dflash_backend.text.client_json import JsonError, is_text, quoted, read_json
from dflash_backend.text.json_schema import SchemaError, normalise

# Of a schema, a regular expression, a grammar, or all choices together.
MAX_GRAMMAR_CHARS = 262_144
MAX_GRAMMAR_BRACKETS = 50_000
MAX_GRAMMAR_COMMAS = 50_000
MAX_SCHEMA_DEPTH = 64
# Of one parameter: JSON may write a schema that is itself a text with a backslash before each quote.
MAX_FORMAT_CHARS = 2 * MAX_GRAMMAR_CHARS
FORMAT_NAMES = ("structured_outputs", "response_format")
MAX_CHOICES = 16_384
MAX_MARKER_TOKENS = 16
# As vLLM's clients write a parameter that they leave at its default.
NO_GRAMMAR = ("null", "None")
ANY_OBJECT = '{"type":"object"}'

# Other fields of vLLM's `StructuredOutputsParams`, which may have these values besides null.
NEUTRAL = {
    "disable_fallback": (False, True),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}
# Fields of that class which vLLM's engine fills in for itself, and ignores where a client sends them.
_VLLMS_OWN = ("_backend", "_backend_was_auto")


class FormatError(ValueError):
    """A parameter does not name a grammar. The message is for the client and completes a sentence."""


class _Formats(msgspec.Struct):
    """The two parameters. No objects are made of the others."""

    structured_outputs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    response_format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


def names_format(text: str | bytes) -> bool:
    """Whether a text, or its bytes, has the name of one of the two parameters in it."""
    if isinstance(text, str):
        return any(name in text for name in FORMAT_NAMES)
    return any(name.encode() in text for name in FORMAT_NAMES)


def take_formats(text: str) -> tuple[dict[str, Any], str]:
    """The values of the two parameters in the JSON text of a request's parameters, by name, and that text with null in
    their places. Text that is no JSON is returned as it is. The caller measures the text. Raises `JsonError`."""
    if not names_format(text):
        return {}, text
    data = text.encode("utf-8", "replace")
    try:
        formats = msgspec.json.decode(data, type=_Formats)
    except (msgspec.MsgspecError, RecursionError):
        return {}, text
    found: dict[str, Any] = {}
    spans: list[tuple[int, int]] = []
    for name in FORMAT_NAMES:
        raw = getattr(formats, name)
        value = bytes(raw)
        if value not in (b"", b"null"):
            found[name] = _read_format(value.decode())
            begin = _address(raw) - _address(data)
            spans.append((begin, begin + len(value)))
    for begin, end in sorted(spans, reverse=True):
        data = data[:begin] + b"null" + data[end:]
    return found, data.decode() if found else text


def _address(buffer: Any) -> int:
    """Where bytes lie in memory: a `msgspec.Raw` is a view of the bytes that it was decoded from."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _read_format(text: str, max_depth: int = MAX_SCHEMA_DEPTH + 3) -> Any:
    return read_json(
        text,
        max_chars=MAX_FORMAT_CHARS,
        max_brackets=MAX_GRAMMAR_BRACKETS,
        max_commas=MAX_GRAMMAR_COMMAS,
        max_depth=max_depth,
    )


def read_structured_outputs(value: Any) -> StructuredOutputs | None:
    """`value`: an object with one of the keys json, regex, choice, grammar and json_object, or its JSON text; and
    perhaps `after_reasoning`, the token ids that end the reasoning. None for the text null. Raises `FormatError`."""
    if isinstance(value, StructuredOutputs) or value in NO_GRAMMAR:
        return value if isinstance(value, StructuredOutputs) else None
    if isinstance(value, str):
        value = _read(value, "")
    if not isinstance(value, Mapping):
        raise FormatError(f'has the value {quoted(value)}; allowed: an object such as {{"json": {{...}}}}')
    given = {name: field for name, field in value.items() if field is not None and name not in _VLLMS_OWN}
    marker = _marker(given.pop("after_reasoning", None))
    for name, neutral in NEUTRAL.items():
        if name in given and given.pop(name) not in neutral:
            raise FormatError(f"has the field {name!r}, which this server does not support; leave it out")
    if given.get("json_object") is False:
        del given["json_object"]
    for name in given:
        if name not in _KINDS:
            raise FormatError(
                f"has the unknown field {quoted(name)}; allowed: {', '.join((*_KINDS, 'after_reasoning'))}"
            )
    if len(given) != 1:
        named = " and ".join(given) or "none"
        raise FormatError(f"must have exactly one of the fields {', '.join(_KINDS)}, and has {named}")
    ((name, field),) = given.items()
    grammar = _KINDS[name](field)
    return StructuredOutputs(grammar.kind, grammar.text, marker)


def read_response_format(value: Any) -> StructuredOutputs | None:
    """`value`: OpenAI's object of the type text, json_object or json_schema, or its JSON text; and perhaps
    `after_reasoning`, as of `read_structured_outputs`. None for text. Raises `FormatError`."""
    if value in NO_GRAMMAR:
        return None
    if isinstance(value, str):
        value = _read(value, "")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs("json", ANY_OBJECT, _marker(value.get("after_reasoning")))
    if kind != "json_schema":
        raise FormatError(
            f"has the value {quoted(value)}; allowed: an object whose 'type' is text, json_object or json_schema"
        )
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if schema is None:
        raise FormatError('of the type json_schema needs {"json_schema": {"name": ..., "schema": {...}}}')
    grammar = _json(schema)
    return StructuredOutputs(grammar.kind, grammar.text, _marker(value.get("after_reasoning")))


def _json(value: Any) -> StructuredOutputs:
    """A JSON schema, as a value or as its text. Its keys keep their order, which an answer follows."""
    if isinstance(value, str):
        _check_size(value, "json")
        value = _read(value, "has the field 'json', which ")
    if not isinstance(value, Mapping | bool):
        raise FormatError(f"has a JSON schema that is no object: {quoted(value)}")
    try:
        value = normalise(value)
    except SchemaError as error:
        raise FormatError(f"has a JSON schema that {error}") from None
    except RecursionError:
        raise FormatError(f"has a JSON schema that is nested more than {MAX_SCHEMA_DEPTH} levels deep") from None
    if value is False:
        raise FormatError("has a JSON schema that no answer follows")
    try:
        # Any JSON follows true.
        text = json.dumps({} if value is True else value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        raise FormatError("has a JSON schema that is no JSON") from None
    return StructuredOutputs("json", _check_size(text, "json"))


def _expression(kind: Literal["regex", "grammar"], value: Any) -> StructuredOutputs:
    if not isinstance(value, str) or not value:
        raise FormatError(f"has the field {kind!r} {quoted(value)}; allowed: text of at least one character")
    return StructuredOutputs(kind, _check_size(value, kind))


def _choice(value: Any) -> StructuredOutputs:
    if not isinstance(value, list | tuple) or not all(isinstance(choice, str) for choice in value):
        raise FormatError(f"has the field 'choice' {quoted(value)}; allowed: a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise FormatError(f"has {len(value)} choices; allowed: 1 to {MAX_CHOICES}")
    return StructuredOutputs("choice", _check_size(json.dumps(list(dict.fromkeys(value))), "choice"))


def _json_object(value: Any) -> StructuredOutputs:
    if value is not True:
        raise FormatError(f"has the field 'json_object' {quoted(value)}; allowed: true")
    return StructuredOutputs("json", ANY_OBJECT)


_KINDS: dict[str, Callable[[Any], StructuredOutputs]] = {
    "json": _json,
    "regex": partial(_expression, "regex"),
    "choice": _choice,
    "grammar": partial(_expression, "grammar"),
    "json_object": _json_object,
}


def _check_size(text: str, field: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise FormatError(f"has {len(text)} characters in its field {field!r}; allowed: at most {MAX_GRAMMAR_CHARS}")
    if not is_text(text):
        raise FormatError(f"has half a surrogate pair in its field {field!r}, which is no character")
    return text


def _marker(value: Any) -> tuple[int, ...]:
    """The token ids that end the reasoning."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else ()
    if not 1 <= len(ids) <= MAX_MARKER_TOKENS or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
        raise FormatError(
            f"has the field 'after_reasoning' {quoted(value)}; allowed: a list of 1 to {MAX_MARKER_TOKENS} token ids"
        )
    return tuple(ids)


def _read(text: str, where: str) -> Any:
    try:
        return _read_format(text, max_depth=MAX_SCHEMA_DEPTH)
    except JsonError as error:
        raise FormatError(f"{where}{error}") from None

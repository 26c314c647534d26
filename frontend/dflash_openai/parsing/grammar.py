"""The grammar, in llguidance's form of Lark, of an answer that must call functions in the model's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_backend.error_text import ABOUT_NEXT_LINE
from dflash_backend.text.json_schema import SchemaError, normalise
from dflash_openai.parsing import harmony
from dflash_openai.parsing.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, ToolFormat

# A function without `parameters` has none.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# Beside one of these a schema says itself which values it allows.
_SAYS_TYPE = {"type", "$ref", "allOf", "anyOf", "const", "enum", "oneOf"}
# As models write JSON. White space of any length would let a weak one write nothing else.
_JSON_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ARGS = "[ARGS]"


class NoGrammar(ValueError):
    """Calls in this format cannot be forced. The message is for the client."""


def forced_calls(
    format: ToolFormat,
    functions: Sequence[Mapping[str, Any]],
    parallel: bool,
    special_token_ids: Mapping[str, int],
) -> str:
    """A Lark grammar of an answer that calls at least one of `functions`, each with `name` and `parameters`, a JSON
    schema; exactly one without `parallel`. `special_token_ids` are the ids of tokens that text cannot spell. Raises
    `NoGrammar`."""
    marks = _Marks(special_token_ids)
    if format is HERMES:
        start = _repeated(f'{marks.of(HERMES.open)} "\\n" call "\\n" {marks.of(HERMES.close)}', '"\\n"', parallel)
    elif format is LLAMA3_JSON:
        # Llama's templates take one call at a time.
        start = "start: call"
    elif format is MISTRAL and _ARGS in special_token_ids:
        start = _repeated(f"{marks.of(MISTRAL.open)} call", "", parallel)
    elif format is MISTRAL:
        more = ' (", " call)*' if parallel else ""
        start = f'start: {marks.of(MISTRAL.open)} "[" call{more} "]"'
    elif format is harmony.TOOLS and all(mark in special_token_ids for mark in harmony.MARKS):
        start = _after_analysis(marks)
    else:
        raise NoGrammar(
            f"a tool call cannot be forced where the model writes calls as '{format.name}'; set tool_choice to auto"
        )
    lines = [start, "call: " + " | ".join(f"f{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        lines.append(f"f{index}: {_call(format, function['name'], f'arguments{index}', marks)}")
        schema = json.dumps({**_parameters(function), **_JSON_STYLE}, ensure_ascii=False)
        lines.append(f"{ABOUT_NEXT_LINE}the parameters of the function '{function['name']}'")
        lines.append(f"arguments{index}: %json {schema}")
    return "\n".join(lines) + "\n"


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. Raises `NoGrammar`."""
    given = function.get("parameters")
    try:
        schema = normalise(_NO_PARAMETERS if given is None else given)
    except SchemaError as error:
        raise NoGrammar(f"the function '{function['name']}' has a schema of its parameters that {error}") from None
    if schema is False:
        raise NoGrammar(f"the function '{function['name']}' has parameters that no arguments fit")
    return schema if _SAYS_TYPE & schema.keys() else {**schema, "type": "object"}


def _repeated(one: str, separator: str, parallel: bool) -> str:
    """The start rule: one, or one or more with separators between them."""
    return f"start: one ({separator} one)*\none: {one}" if parallel else f"start: {one}"


def _after_analysis(marks: _Marks) -> str:
    """The start rule of harmony's answers: one call, which ends an answer, behind any messages of reasoning."""
    head = f'{marks.of(harmony.CHANNEL)} "analysis" {marks.of(harmony.MESSAGE)}'
    after = f'{marks.of("<|end|>")} {marks.of(harmony.START)} "assistant"'
    return f"start: reasoning* call\nreasoning: {head} TEXT {after}\nTEXT: /(?s:.*)/"


def _call(format: ToolFormat, name: str, arguments: str, marks: _Marks) -> str:
    """One function's call around the rule of its arguments."""
    if format is MISTRAL and _ARGS in marks.special_token_ids:
        return f"{_text(name)} {marks.of(_ARGS)} {arguments}"
    if format is harmony.TOOLS:
        recipient = _text(f"commentary to={harmony.FUNCTIONS}{name} ")
        kind = f'{marks.of("<|constrain|>")} "json" {marks.of(harmony.MESSAGE)}'
        return f"{marks.of(harmony.CHANNEL)} {recipient} {kind} {arguments}"
    field = "parameters" if format is LLAMA3_JSON else "arguments"
    begin = _text(f'{{"name": "{name}", "{field}": ')
    return f'{begin} {arguments} "}}"'


class _Marks:
    """Writes marks: the token where a mark is a special one, else its text."""

    def __init__(self, special_token_ids: Mapping[str, int]) -> None:
        self.special_token_ids = special_token_ids

    def of(self, mark: str) -> str:
        """The mark as a terminal."""
        known = self.special_token_ids
        return f"<[{known[mark]}]>" if mark in known else _text(mark)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

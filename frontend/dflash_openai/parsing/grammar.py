"""Grammars, in llguidance's form of Lark, of answers that call functions in the model's own format: of one that must do
so, and of one that else has the format that the request asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_backend.error_text import ABOUT_NEXT_LINE
from dflash_backend.messages import JSON_WHITESPACE, StructuredOutputs
from dflash_backend.text.json_schema import SchemaError, normalise
from dflash_openai.notices import log_once_of_client
from dflash_openai.parsing import harmony
from dflash_openai.parsing.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER, ToolFormat

# A function without `parameters` has none.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# Beside one of these a schema says itself which values it allows.
_SAYS_TYPE = {"type", "$ref", "allOf", "anyOf", "const", "enum", "oneOf"}
# As models write JSON. White space of any length would let a weak one write nothing else.
_JSON_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ARGS = "[ARGS]"
# Values of parameters that are JSON where calls are written as `QWEN3_CODER`; all others are text.
_JSON_TYPES = {"integer", "number", "boolean", "object", "array", "null"}
_RULE = re.compile(r"^[a-z]\w*(?=[\[:])", re.MULTILINE)
# A name of Lark outside of strings, comments and expressions.
# What does not end is taken whole, so that no character is looked at twice.
_LARK_NAME = re.compile(r'"(?:\\.|[^"\\\n])*+"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])++/?|(?P<name>(?<![\w-])[A-Za-z_][\w-]*)')


class NoGrammar(ValueError):
    """Calls in this format cannot be forced. The message is for the client."""


def grammar_of_calls(
    format: ToolFormat,
    functions: Sequence[Mapping[str, Any]],
    parallel: bool,
    special_token_ids: Mapping[str, int],
    wanted: StructuredOutputs | None = None,
) -> str:
    """A Lark grammar of an answer that calls at least one of `functions`, each with `name` and `parameters`, a JSON
    schema; exactly one without `parallel`. `special_token_ids` are the ids of tokens that text cannot spell.

    With `wanted` the answer either calls functions or is as that says. Then the arguments of a function follow its
    schema where it has `strict`; else they are any object, as where nothing is forced. Raises `NoGrammar`."""
    if wanted is None:
        return "\n".join(_calls("start", format, functions, parallel, special_token_ids)) + "\n"
    functions = [each if each.get("strict") else {**each, "parameters": {}} for each in functions]
    calls = "\n".join(_calls("calls", format, functions, parallel, special_token_ids))
    own = _of_format(wanted)
    taken = {found["name"] for found in _LARK_NAME.finditer(own)}
    names = {name: _new_name(name, taken) for name in (*_RULE.findall(calls), "TEXT")}
    format_rule = _new_name("format", taken | set(names.values()))
    return "\n".join(
        (f"start: {names['calls']} | {format_rule}", _renamed(calls, names), _renamed(own, {"start": format_rule}), "")
    )


def _of_format(wanted: StructuredOutputs) -> str:
    """A format that a request asks for, as a grammar of its own."""
    if wanted.kind == "grammar":
        return wanted.text
    if wanted.kind == "regex":
        return "start: /" + re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", wanted.text) + "/"
    if wanted.kind == "choice":
        return "start: " + " | ".join(_text(choice) for choice in json.loads(wanted.text))
    schema: dict[str, Any] = json.loads(wanted.text)
    schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return f"{ABOUT_NEXT_LINE}the format of the answer\nstart: %json {json.dumps(schema, ensure_ascii=False)}"


def _new_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _renamed(grammar: str, names: Mapping[str, str]) -> str:
    return _LARK_NAME.sub(lambda found: names.get(found["name"] or "", found[0]), grammar)


def _calls(
    root: str,
    format: ToolFormat,
    functions: Sequence[Mapping[str, Any]],
    parallel: bool,
    special: Mapping[str, int],
) -> list[str]:
    """The rules of calls; `root` is the name of the first. special: ids of special tokens."""
    if format in (HERMES, QWEN3_CODER):
        one = f'{_mark(HERMES.open, special)} "\\n" call "\\n" {_mark(HERMES.close, special)}'
        start = _repeated(root, one, '"\\n"', parallel)
    elif format is LLAMA3_JSON:
        # Llama's templates take one call at a time.
        start = f"{root}: call"
    elif format is MISTRAL and _ARGS in special:
        start = _repeated(root, f"{_mark(MISTRAL.open, special)} call", "", parallel)
    elif format is MISTRAL:
        more = ' (", " call)*' if parallel else ""
        start = f'{root}: {_mark(MISTRAL.open, special)} "[" call{more} "]"'
    elif format is harmony.TOOLS and all(mark in special for mark in harmony.MARKS):
        start = _after_analysis(root, special)
    else:
        raise NoGrammar(
            f"a tool call cannot be forced where the model writes calls as '{format.name}'; set tool_choice to auto"
        )
    lines = [start, "call: " + " | ".join(f"f{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        about = f"{ABOUT_NEXT_LINE}the parameters of the function '{function['name']}'"
        schema = _parameters(function)
        if format is QWEN3_CODER:
            lines += _tagged_call(f"f{index}", function["name"], schema, about)
            continue
        if format is LLAMA3_JSON and root != "start":
            lines += [
                about,
                f"f{index}: %json {json.dumps(_call_object(function['name'], schema), ensure_ascii=False)}",
            ]
            continue
        lines.append(f"f{index}: {_call(format, function['name'], f'arguments{index}', special)}")
        lines += [about, f"arguments{index}: %json {json.dumps({**schema, **_JSON_STYLE}, ensure_ascii=False)}"]
    if format is QWEN3_CODER:
        lines.append('text[suffix="\\n</parameter>\\n"]: /(?s:.*)/')
    return lines


def _call_object(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call of Llama's, for a grammar in which other JSON may stand in its place: both must be made of
    the same words, since what begins like one word is not read as another."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        **shared,
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": JSON_WHITESPACE},
    }


def _tagged_call(rule: str, name: str, schema: Mapping[str, Any], about: str) -> list[str]:
    """The rules of a function's call with a tag for each parameter, in the order of its schema. Values that are JSON
    follow their schemas; those that are text are any text."""
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, lines = [], []
    if not properties and schema.get("additionalProperties") is not False:
        # Any parameters, of which nothing is known.
        parts, lines = [f"{rule}any*"], [f"{rule}any: /<parameter=[A-Za-z0-9_.-]{{1,128}}>\\n/ text"]
    for index, (parameter, of_one) in enumerate(properties.items()):
        if of_one is False:
            continue
        is_required = isinstance(required, list) and parameter in required
        parts.append(f"{rule}p{index}{'' if is_required else '?'}")
        begin = _text(f"<parameter={parameter}>\n")
        if not _is_json(of_one):
            lines.append(f"{rule}p{index}: {begin} text")
            continue
        lines += [
            f'{rule}p{index}: {begin} {rule}v{index} "\\n</parameter>\\n"',
            about,
            f"{rule}v{index}: %json {json.dumps({**shared, **of_one, **_JSON_STYLE}, ensure_ascii=False)}",
        ]
    return [f'{rule}: {_text(f"<function={name}>" + chr(10))} {" ".join(parts)} "</function>"', *lines]


def _is_json(schema: Any) -> bool:
    """Whether the values of a parameter are surely JSON and no text, where a parameter has a tag."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [declared] if isinstance(declared, str) else declared
    return isinstance(kinds, list) and bool(kinds) and _JSON_TYPES.issuperset(kinds)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. What no grammar can say is left out, which the log
    tells, unless the function has `strict`. Raises `NoGrammar`."""
    given = function.get("parameters")
    left_out: list[str] | None = None if function.get("strict") else []
    try:
        schema = normalise(_NO_PARAMETERS if given is None else given, left_out=left_out)
    except SchemaError as error:
        raise NoGrammar(f"the function '{function['name']}' has a schema of its parameters that {error}") from None
    if left_out:
        held = f"calls of the function '{function['name']}' need not follow {', '.join(left_out)[:500]}"
        log_once_of_client(
            held, lambda: f"{held}: no grammar can say that; with 'strict' of true such a schema is refused"
        )
    if schema is False:
        raise NoGrammar(f"the function '{function['name']}' has parameters that no arguments fit")
    kinds = schema.get("type", "object")
    if kinds != "object" and "object" not in (kinds if isinstance(kinds, list) else ()):
        raise NoGrammar(f"the parameters of the function '{function['name']}' are of the type {kinds!r}, and no object")
    return schema if _SAYS_TYPE & schema.keys() else {**schema, "type": "object"}


def _repeated(root: str, one: str, separator: str, parallel: bool) -> str:
    """The first rule: one, or one or more with separators between them."""
    return f"{root}: one ({separator} one)*\none: {one}" if parallel else f"{root}: {one}"


def _after_analysis(root: str, special: Mapping[str, int]) -> str:
    """The first rule of harmony's answers: one call, which ends an answer, behind any messages of reasoning."""
    head = f'{_mark(harmony.CHANNEL, special)} "analysis" {_mark(harmony.MESSAGE, special)}'
    after = f'{_mark("<|end|>", special)} {_mark(harmony.START, special)} "assistant"'
    return f"{root}: reasoning* call\nreasoning: {head} TEXT {after}\nTEXT: /(?s:.*)/"


def _call(format: ToolFormat, name: str, arguments: str, special: Mapping[str, int]) -> str:
    """One function's call around the rule of its arguments."""
    if format is MISTRAL and _ARGS in special:
        return f"{_text(name)} {_mark(_ARGS, special)} {arguments}"
    if format is harmony.TOOLS:
        recipient = _text(f"commentary to={harmony.FUNCTIONS}{name} ")
        kind = f'{_mark("<|constrain|>", special)} "json" {_mark(harmony.MESSAGE, special)}'
        return f"{_mark(harmony.CHANNEL, special)} {recipient} {kind} {arguments}"
    field = "parameters" if format is LLAMA3_JSON else "arguments"
    begin = _text(f'{{"name": "{name}", "{field}": ')
    return f'{begin} {arguments} "}}"'


def _mark(mark: str, special: Mapping[str, int]) -> str:
    """A mark as a terminal: the token where it is a special one, by its id, else its text."""
    return f"<[{special[mark]}]>" if mark in special else _text(mark)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

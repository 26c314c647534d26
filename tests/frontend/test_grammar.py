"""Forced tool calls: what the grammar takes is what the parser reads as calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.compiler import GrammarError, _matcher
from dflash_openai import notices
from dflash_openai.parsing import OutputFormat, ToolCallDelta, harmony
from dflash_openai.parsing.grammar import NoGrammar, grammar_of_calls
from dflash_openai.parsing.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER, ToolFormat

llguidance = pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: list[dict[str, Any]] = [{"name": "get_weather", "parameters": CITY}, {"name": "now"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
MISTRAL_CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


def takes(grammar: str, text: str) -> bool:
    """Whether the text is a whole answer of the grammar."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("format", "text", "parallel", "num_calls"),
    [
        (HERMES, HERMES_CALL, False, 1),
        (HERMES, f"{HERMES_CALL}\n{HERMES_NOW}", True, 2),
        (LLAMA3_JSON, LLAMA_CALL, True, 1),
        (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL}]", False, 1),
        (MISTRAL, f"[TOOL_CALLS][{MISTRAL_CALL}, {MISTRAL_CALL}]", True, 2),
    ],
)
def test_a_forced_answer_is_calls_that_the_parser_reads(
    format: ToolFormat, text: str, parallel: bool, num_calls: int
) -> None:
    assert takes(grammar_of_calls(format, FUNCTIONS, parallel, {}), text)
    parser = OutputFormat(format).parser("", TOOLS)
    events = [*parser.feed(text), *parser.finish()]
    assert [type(event) for event in events] == [ToolCallDelta] * num_calls


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        f"{HERMES_CALL}\n{HERMES_NOW}",
        HERMES_CALL.replace("get_weather", "other"),
        HERMES_CALL.replace("city", "town"),
        f"Look: {HERMES_CALL}",
        HERMES_CALL.replace('{"city', '{ "city'),
        HERMES_CALL.replace('"city": ', '"city":\n'),
    ],
)
def test_no_other_answer_is_taken(text: str) -> None:
    assert not takes(grammar_of_calls(HERMES, FUNCTIONS, False, {}), text)


def test_marks_that_are_special_tokens_are_those_tokens() -> None:
    grammar = grammar_of_calls(MISTRAL, FUNCTIONS, True, {"[TOOL_CALLS]": 5, "[ARGS]": 6})
    assert grammar.splitlines()[1:4] == ["one: <[5]> call", "call: f0 | f1", 'f0: "get_weather" <[6]> arguments0']


def test_a_format_without_a_grammar_says_so() -> None:
    with pytest.raises(NoGrammar, match="writes calls as 'openai'; set tool_choice to auto"):
        grammar_of_calls(harmony.TOOLS, FUNCTIONS, True, {})


FILE: dict[str, Any] = {
    "name": "write_file",
    "parameters": {
        "type": "object",
        "$defs": {"mode": {"type": "string", "enum": ["a", "w"]}},
        "properties": {
            "path": {"type": "string"},
            "size": {"type": ["integer", "null"]},
            "how": {"type": "object", "properties": {"mode": {"$ref": "#/$defs/mode"}}, "required": ["mode"]},
        },
        "required": ["path"],
    },
}


def tagged(*parameters: tuple[str, str]) -> str:
    """A call in the form of Qwen3-Coder."""
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function=write_file>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (tagged(("path", "a\n</b>\n\n")), {"path": "a\n</b>\n\n"}),
        (tagged(("path", "1"), ("size", "12")), {"path": "1", "size": 12}),
        (tagged(("path", ""), ("how", '{"mode": "w"}')), {"path": "", "how": {"mode": "w"}}),
    ],
)
def test_a_forced_call_with_tags_is_one_that_the_parser_reads(text: str, arguments: dict[str, Any]) -> None:
    assert takes(grammar_of_calls(QWEN3_CODER, [FILE], True, {}), text)
    parser = OutputFormat(QWEN3_CODER).parser("", [{"type": "function", "function": FILE}], forced=True)
    (event,) = [*parser.feed(text), *parser.finish()]
    assert isinstance(event, ToolCallDelta)
    assert (event.name, json.loads(event.arguments)) == ("write_file", arguments)


@pytest.mark.parametrize(
    "text",
    [
        tagged(),
        tagged(("size", "1"), ("path", "a")),
        tagged(("path", "a"), ("size", "many")),
        tagged(("path", "a"), ("how", '{"mode": "x"}')),
        tagged(("path", "a"), ("other", "b")),
    ],
)
def test_no_other_call_with_tags_is_taken(text: str) -> None:
    assert not takes(grammar_of_calls(QWEN3_CODER, [FILE], True, {}), text)


ANY_CITY = HERMES_CALL.replace('"city"', '"town"')


@pytest.mark.parametrize(
    ("wanted", "answers", "others"),
    [
        (
            StructuredOutputs("json", json.dumps(CITY)),
            ['{"city": "Oslo"}', '{\n  "city": "Oslo"\n}'],
            ['{"town": "Oslo"}', '{"city":' + " " * 50 + '"Oslo"}'],
        ),
        (StructuredOutputs("json", '{"type":"object"}'), ["{}", '{"a": 1}'], ["[]"]),
        (StructuredOutputs("json", "{}"), ["[1]"], ["[1"]),
        (StructuredOutputs("regex", r"a/b\/[/c]\d"), ["a/b/c1"], ["a/b/c"]),
        (StructuredOutputs("choice", '["yes", "a \\"no\\"\\n"]'), ["yes", 'a "no"\n'], ["no"]),
        (
            StructuredOutputs("grammar", 'start: calls one // start\none: "start" /x\\/start/\ncalls: "one"\n'),
            ["onestartx/start"],
            ["startx/startone"],
        ),
    ],
)
def test_an_answer_calls_a_tool_or_has_its_format(
    wanted: StructuredOutputs, answers: list[str], others: list[str]
) -> None:
    grammar = grammar_of_calls(HERMES, FUNCTIONS, True, {}, wanted)
    for text in (HERMES_CALL, f"{HERMES_CALL}\n{HERMES_NOW}", ANY_CITY, *answers):
        assert takes(grammar, text), text
    for text in ("Hello", HERMES_CALL + answers[0], HERMES_CALL.replace("get_weather", "other"), *others):
        assert not takes(grammar, text), text


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"name": "get_weather"}', True),
        ('{"name":"Ada", "parameters": 3}', True),
        ('{"city": "Oslo", "name": "now"}', True),
        (LLAMA_CALL, True),
        ('{"name": "now", "parameters": {"a": 1}}', True),
        ('{"name": "other", "parameters": {}}', False),
        ('{"name": "get_weather", "parameters": {"city": 1}}', False),
    ],
)
def test_json_that_begins_like_a_call_of_llamas_may_be_the_answer(text: str, taken: bool) -> None:
    properties = {"city": {"type": "string"}, "name": {"type": "string"}, "parameters": {"type": "integer"}}
    wanted = StructuredOutputs("json", json.dumps({"type": "object", "properties": properties, "required": ["name"]}))
    functions = [{**FUNCTIONS[0], "strict": True}, {"name": "now"}]
    assert takes(grammar_of_calls(LLAMA3_JSON, functions, True, {}, wanted), text) == taken


def test_a_list_is_not_taken_for_the_mark_of_mistrals_calls() -> None:
    wanted = StructuredOutputs("json", '{"type":"array","items":{"type":"integer"}}')
    grammar = grammar_of_calls(MISTRAL, FUNCTIONS, True, {}, wanted)
    for text in ("[1, 2]", "[]", f"[TOOL_CALLS][{MISTRAL_CALL}]"):
        assert takes(grammar, text), text
    assert not takes(grammar, "[TOOL]")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (tagged(("path", "a"), ("what", "1")), True),
        (tagged(), True),
        ('{"a": 1}', True),
        (tagged(("path", "a")).replace("write_file", "other"), False),
    ],
)
def test_a_call_with_tags_that_the_model_chooses_has_any_parameters(text: str, taken: bool) -> None:
    wanted = StructuredOutputs("json", '{"type":"object"}')
    assert takes(grammar_of_calls(QWEN3_CODER, [FILE], True, {}, wanted), text) == taken
    if text.startswith("<"):
        anything = [{**FILE, "parameters": {}}]
        assert takes(grammar_of_calls(QWEN3_CODER, anything, True, {}), text) == taken


@pytest.mark.parametrize(("strict", "takes_any"), [(None, True), (False, True), (True, False)])
def test_the_arguments_of_a_call_that_the_model_chooses_follow_a_strict_schema_alone(
    strict: bool | None, takes_any: bool
) -> None:
    wanted = StructuredOutputs("json", '{"type":"object"}')
    grammar = grammar_of_calls(HERMES, [{**FUNCTIONS[0], "strict": strict}], True, {}, wanted)
    assert takes(grammar, HERMES_CALL)
    assert takes(grammar, ANY_CITY) == takes_any


def test_a_schema_that_cannot_be_held_keeps_nobody_from_a_format() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    wanted = StructuredOutputs("json", '{"type":"object"}')
    grammar = grammar_of_calls(HERMES, [{"name": "f", "parameters": parameters}], True, {}, wanted)
    assert takes(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>')


@pytest.mark.parametrize("kind", ["string", ["string", "null"], "array"])
def test_parameters_that_are_no_object_are_refused_by_name(kind: str | list[str]) -> None:
    with pytest.raises(NoGrammar) as error:
        grammar_of_calls(HERMES, [{"name": "f", "parameters": {"type": kind}}], False, {})
    assert str(error.value) == f"the parameters of the function 'f' are of the type {kind!r}, and no object"
    assert takes(
        grammar_of_calls(
            HERMES, [{"name": "f", "parameters": {"type": ["object", "null"], "maxProperties": 0}}], False, {}
        ),
        HERMES_NOW.replace("now", "f"),
    )


@pytest.mark.parametrize(
    ("given", "takes_any"), [({}, False), ({"parameters": None}, False), ({"parameters": {}}, True)]
)
def test_a_function_without_parameters_is_called_without_arguments(given: dict[str, Any], takes_any: bool) -> None:
    """An empty schema is one that every object follows."""
    grammar = grammar_of_calls(HERMES, [{"name": "now", **given}], False, {})
    assert takes(grammar, HERMES_NOW)
    for arguments in ('{"text": "items"}', '{"a": 1}'):
        assert takes(grammar, HERMES_NOW.replace("{}", arguments)) == takes_any
    assert not takes(grammar, HERMES_NOW.replace("{}", "null"))


def test_parameters_are_read_as_clients_write_them() -> None:
    parameters = {
        "properties": {"city": {"type": "string", "minLength": 1.0, "enum": None}, "never": {"not": {}}},
        "required": None,
        "x-guidance": {"lenient": True, "item_separator": ",   "},
    }
    grammar = grammar_of_calls(HERMES, [{"name": "get_weather", "parameters": parameters}], False, {})
    assert takes(grammar, HERMES_CALL)
    assert takes(grammar, HERMES_CALL.replace('"Oslo"', '"Oslo", "b": 1'))
    for wrong in ('""', '"Oslo", "never": 1', '"Oslo",   "b": 1', "5"):
        assert not takes(grammar, HERMES_CALL.replace('"Oslo"', wrong))


def test_a_schema_that_cannot_be_held_is_named_with_its_function() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(NoGrammar) as error:
        grammar_of_calls(HERMES, [*FUNCTIONS, {"name": "f", "strict": True, "parameters": parameters}], False, {})
    assert str(error.value) == (
        "the function 'f' has a schema of its parameters that has the keyword 'uniqueItems' at properties.a, which "
        "this server cannot hold; leave it out"
    )


@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": False}])
def test_a_forced_call_follows_of_a_schema_without_strict_what_a_grammar_can_say(
    strict: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As Pydantic writes a set, and zod an e-mail address."""
    notices.clear()
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 1}
    email = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$"}
    parameters = {"type": "object", "properties": {"tags": tags, "email": email}, "required": ["tags", "email"]}
    function = {"name": "f", "parameters": parameters, **strict}
    for _ in range(2):
        grammar = grammar_of_calls(HERMES, [function], False, {})
    call = '<tool_call>\n{"name": "f", "arguments": {"tags": ["a", "a"], "email": "a@b.c"}}\n</tool_call>'
    assert takes(grammar, call)
    assert not takes(grammar, call.replace('["a", "a"]', "[]"))
    assert not takes(grammar, call.replace("a@b.c", "ab"))
    assert [record.getMessage() for record in caplog.records] == [
        "calls of the function 'f' need not follow 'uniqueItems' at properties.tags, 'pattern' at properties.email: no "
        "grammar can say that; with 'strict' of true such a schema is refused"
    ]


def test_an_error_of_a_schema_names_its_function() -> None:
    """The engine tells what the comment above the line says."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}}
    grammar = grammar_of_calls(HERMES, [{"name": "f", "parameters": {**parameters, "required": ["a"]}}], False, {})
    with pytest.raises(GrammarError) as error:
        _matcher(llguidance.LLTokenizer("byte"), grammar)
    assert str(error.value) == (
        "is wrong or too large: the parameters of the function 'f': failed to compile JSON schema: Unsatisfiable "
        "schema: required property 'a' is unsatisfiable"
    )

"""Answers split into reasoning, content and tool calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_openai.parsing import (
    ContentDelta,
    Event,
    OutputFormat,
    ReasoningDelta,
    ToolCallDelta,
    harmony,
    select_output_format,
)
from dflash_openai.parsing.reasoning_formats import DEEPSEEK_R1, QWEN3, REASONING_FORMATS
from dflash_openai.parsing.tool_formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    QWEN3_CODER,
    TOOL_FORMATS,
    ToolFormat,
    allowed_types,
    begun_calls,
)
from tests.support.growth import assert_linear

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "places": {"type": "array"}},
            },
        },
    }
]
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def parse(
    texts: list[str],
    output: OutputFormat,
    prompt: str = PROMPT,
    tools: list[dict[str, Any]] = TOOLS,
    parallel: bool = True,
) -> list[Event]:
    parser = output.parser(prompt, tools, parallel)
    events = [event for text in texts for event in parser.feed(text)] + parser.finish()
    for event in events:
        if isinstance(event, ContentDelta):
            assert "".join(texts)[event.end - len(event.text) : event.end] == event.text
    return joined(events)


def joined(events: list[Event]) -> list[Event]:
    """The events with text joined and ids left out."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, ToolCallDelta) and event.first:
            out.append(ToolCallDelta(event.index, "", event.name, event.arguments, event.complete, last=event.last))
        elif isinstance(event, ToolCallDelta):
            before = out[-1]
            assert isinstance(before, ToolCallDelta)
            assert (event.index, event.name, before.last) == (before.index, before.name, False)
            arguments = before.arguments + event.arguments
            out[-1] = ToolCallDelta(event.index, "", event.name, arguments, event.complete, last=event.last)
        elif out and type(out[-1]) is type(event):
            out[-1] = type(event)(out[-1].text + event.text)  # type: ignore[union-attr]
        else:
            out.append(event)
    return out


def call(index: int, arguments: str, name: str = "get_weather", complete: bool = True) -> ToolCallDelta:
    return ToolCallDelta(index, "", name, arguments, complete)


QWEN = OutputFormat(HERMES, QWEN3)
LLAMA = OutputFormat(LLAMA3_JSON)
CODER = OutputFormat(QWEN3_CODER)
R1 = OutputFormat(None, DEEPSEEK_R1)
OSLO = call(0, '{"city": "Oslo"}')
SECOND = call(1, '{"city": "Oslo"}')
BARE = "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
CODER_CALL = f"<tool_call>\n{BARE}\n</tool_call>"
EMPTY = "<function=get_weather></function>"
BARE_OSLO = call(0, '{"city":"Oslo"}')
MARKED = call(0, '{"city": "a </tool_call> \\" <tool_call></tool_call>"}')
MARKED_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {MARKED.arguments}}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
NO_CALL = "<tool_call>\n<function=f>\nx</function></tool_call>"
LIST_AS_ARGUMENTS = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'


@pytest.mark.parametrize(
    ("output", "text", "events"),
    [
        (QWEN, "Hello  \n", [ContentDelta("Hello  \n")]),
        (QWEN, "\n Hello", [ContentDelta("\n Hello")]),
        (QWEN, "", []),
        (QWEN, "<think>\nI see.\n</think>\n\nHello ", [ReasoningDelta("I see."), ContentDelta("Hello ")]),
        (QWEN, "<think>\n\n</think>\n\nHello", [ContentDelta("Hello")]),
        (QWEN, "<think>\nI see. Then\n", [ReasoningDelta("I see. Then")]),
        (QWEN, "Say <think> and </think>.", [ContentDelta("Say <think> and </think>.")]),
        (QWEN, CALL, [OSLO]),
        (QWEN, f"Look.\n{CALL}\n{CALL}\n", [ContentDelta("Look."), OSLO, call(1, '{"city": "Oslo"}')]),
        (QWEN, f"<think>{CALL}</think>{CALL}", [ReasoningDelta(CALL), OSLO]),
        (QWEN, f"{CALL}\nDone. ", [OSLO, ContentDelta("Done. ")]),
        (QWEN, 'A\n\n<tool_call>\n{"name": "f"', [ContentDelta('A\n\n<tool_call>\n{"name": "f"')]),
        (QWEN, "A\n<tool_call>nothing</tool_call>\n B", [ContentDelta("A\n<tool_call>nothing</tool_call>\n B")]),
        (QWEN, "a <tool_ca", [ContentDelta("a <tool_ca")]),
        (QWEN, '<tool_call>{"name": "now"}</tool_call>', [call(0, "{}", "now")]),
        (QWEN, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call(0, '{"a": 1}', "f")]),
        (QWEN, LIST_AS_ARGUMENTS, [ContentDelta(LIST_AS_ARGUMENTS)]),
        (R1, "I see.</think>Yes", [ReasoningDelta("I see."), ContentDelta("Yes")]),
        (R1, "<think>I see.</think>Yes", [ReasoningDelta("I see."), ContentDelta("Yes")]),
        (R1, "<thi", [ReasoningDelta("<thi")]),
        (LLAMA, f" {LLAMA_CALL}", [OSLO]),
        (
            LLAMA,
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "a;}"}}; {"name": "get_weather"}',
            [call(0, '{"city": "a;}"}'), call(1, "{}")],
        ),
        (LLAMA, '{"name": "Ada", "parameters": {}}', [ContentDelta('{"name": "Ada", "parameters": {}}')]),
        (LLAMA, "Set {1, 2}", [ContentDelta("Set {1, 2}")]),
        (
            OutputFormat(MISTRAL),
            'Look. [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "f"}]',
            [ContentDelta("Look."), OSLO, call(1, "{}", "f")],
        ),
        (
            OutputFormat(MISTRAL),
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]f{}',
            [OSLO, call(1, "{}", "f")],
        ),
        (OutputFormat(MISTRAL), '[TOOL_CALLS]f[ARGS]{"a', [call(0, '{"a', "f", complete=False)]),
        (OutputFormat(MISTRAL), "[TOOL_CALLS]f[ARGS]", [ContentDelta("[TOOL_CALLS]f[ARGS]")]),
        (
            CODER,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            '<parameter=places>\n["a", {"b": 1}]\n</parameter>\n</function>\n</tool_call>',
            [call(0, '{"city":"12","days":3,"places":["a", {"b": 1}]}')],
        ),
        (CODER, NO_CALL, [ContentDelta(NO_CALL)]),
        # Without the open mark, which models leave out.
        (CODER, f"Look.\n{BARE}\n</tool_call>\nDone", [ContentDelta("Look."), BARE_OSLO, ContentDelta("Done")]),
        (CODER, f"{BARE}\n{BARE}</tool_call>", [BARE_OSLO, call(1, '{"city":"Oslo"}')]),
        (CODER, f"{BARE}\n\n{CODER_CALL}", [BARE_OSLO, call(1, '{"city":"Oslo"}')]),
        (CODER, "<function=get_weather>\n</function>\n </tool", [call(0, "{}"), ContentDelta("</tool")]),
        (CODER, "<function=get_weather><parameter=city>Os", [call(0, '{"city":"Os', complete=False)]),
        (
            CODER,
            "<function=get_weather><parameter=city>a</function></tool_call></parameter></function>",
            [call(0, '{"city":"a</function></tool_call>"}')],
        ),
        (CODER, f"A <function=get_weather> is\n{CODER_CALL}", [ContentDelta("A <function=get_weather> is"), BARE_OSLO]),
        (CODER, BARE.replace("get_", "see_"), [ContentDelta(BARE.replace("get_", "see_"))]),
        (CODER, f"{EMPTY}</tool_call></tool_call>", [call(0, "{}"), ContentDelta("</tool_call>")]),
        # A call that the reasoning does not end before, which nothing ends.
        (QWEN, f"<think>I call.\n{CALL}", [ReasoningDelta("I call."), OSLO]),
        (QWEN, f"<think>I call.\n{CALL}\n{CALL} So", [ReasoningDelta("I call."), OSLO, SECOND, ContentDelta("So")]),
        (QWEN, f"<think>{CALL}\n</think>\n", [ReasoningDelta(CALL)]),
        (QWEN, f"<think>I <tool_call> or {CALL[:-16]}", [ReasoningDelta(f"I <tool_call> or {CALL[:-16]}")]),
        (QWEN, f"<think>I <tool_call> it\n{CALL}", [ReasoningDelta("I <tool_call> it"), OSLO]),
        (OutputFormat(QWEN3_CODER, QWEN3), f"<think>I call.{CODER_CALL}", [ReasoningDelta("I call."), BARE_OSLO]),
        # The close mark in a string.
        (QWEN, f"{MARKED_CALL}\nDone", [MARKED, ContentDelta("Done")]),
        (QWEN, MARKED_CALL[:-16], [call(0, MARKED.arguments[:-2], complete=False)]),
        (QWEN, f"{MARKED_CALL}{CALL}", [MARKED, SECOND]),
        (QWEN, '<tool_call>"</tool_call>"', [ContentDelta('<tool_call>"</tool_call>"')]),
    ],
)  # fmt: skip
def test_a_text_has_the_same_events_however_it_is_split(output: OutputFormat, text: str, events: list[Event]) -> None:
    assert parse([text], output) == events
    assert parse(list(text), output) == events
    for border in range(len(text)):
        assert parse([text[:border], text[border:]], output) == events


PIECES = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<function=f>",
            "</function>",
            "<function=get_weather>",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "',
        ),
        *('{"name": "get_weather", "arguments": {"city": "a"}}', "<parameter=city>", "</parameter>", "<|python_tag|>"),
        *(" ", "\n", "a", "<", "{", "}", "[", "]", ";", "é", "<tool", "</", '"', "f"),
    ]
)
FORMATS = st.builds(
    OutputFormat,
    st.sampled_from([None, *TOOL_FORMATS.values()]),
    st.sampled_from([None, *REASONING_FORMATS.values()]),
)


def test_an_open_mark_in_the_reasoning_that_the_prompt_opens_is_text() -> None:
    output = OutputFormat(None, REASONING_FORMATS["qwen3"])
    for texts in (["<think></think><think>"], list("<think></think><think>")):
        events = parse(texts, output, PROMPT + "<think>\n")
        assert events == [ReasoningDelta("<think>"), ContentDelta("<think>", 22)]


@given(FORMATS, st.lists(PIECES, max_size=12).map("".join), st.sampled_from([PROMPT, PROMPT + "<think>\n"]), st.data())
@settings(max_examples=300, deadline=None)
def test_no_text_depends_on_where_it_is_split(
    output: OutputFormat, text: str, prompt: str, data: st.DataObject
) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]
    whole = parse([text], output, prompt)
    assert parse(parts, output, prompt) == whole
    if not any(isinstance(event, ToolCallDelta) for event in whole) and (output.reasoning is None):
        assert "".join(event.text for event in whole if isinstance(event, ContentDelta)) == text


@given(st.lists(PIECES, max_size=12).map("".join))
@settings(max_examples=100, deadline=None)
def test_all_text_is_content_where_the_request_has_no_tools(text: str) -> None:
    assert parse(list(text), OutputFormat(HERMES), tools=[]) == ([ContentDelta(text)] if text else [])


def test_content_comes_at_once_where_it_begins_no_mark() -> None:
    parser = QWEN.parser(PROMPT, TOOLS)
    assert parser.feed("Hello") == [ContentDelta("Hello")]
    assert parser.feed(", you") == [ContentDelta(", you")]
    assert parser.feed("\n<") == []
    assert parser.feed("b>") == [ContentDelta("\n<b>")]


def test_a_call_comes_as_soon_as_it_is_complete_with_an_id_of_its_own() -> None:
    parser = QWEN.parser(PROMPT, TOOLS)
    events = parser.feed(CALL + CALL)
    assert [event.index for event in events if isinstance(event, ToolCallDelta)] == [0, 1]
    ids = {event.id for event in events if isinstance(event, ToolCallDelta)}
    assert len(ids) == 2
    assert all(each.startswith("call_") for each in ids)


STRING, NULL, NUMBER = {"type": "string"}, {"type": "null"}, {"type": "number"}
OBJECT, FLAG = {"type": "object"}, {"type": "boolean"}


@pytest.mark.parametrize(
    ("schema", "value", "argument"),
    [
        ({"anyOf": [STRING, NULL]}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"anyOf": [STRING, NULL]}, "12", '"12"'),
        ({"oneOf": [STRING, NULL]}, "true", '"true"'),
        ({"anyOf": [STRING, NULL]}, "null", "null"),
        ({"anyOf": [STRING, NULL]}, "Null", '"Null"'),
        ({"anyOf": [STRING, OBJECT]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [STRING, NUMBER]}, "12", "12"),
        ({"anyOf": [STRING, FLAG]}, "12", '"12"'),
        ({"anyOf": [FLAG, NULL]}, "True", "true"),
        ({"anyOf": [{"enum": ["1", "2"]}, NULL]}, "1", '"1"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"const": "1"}, "1", '"1"'),
        ({"allOf": [{"type": ["string", "number"]}, STRING]}, "1", '"1"'),
        ({"allOf": [{"minLength": 1}, {"anyOf": [STRING, NULL]}]}, "[1]", '"[1]"'),
        ({"type": ["string", "null"], "enum": ["1", None]}, "1", '"1"'),
        ({"type": "integer", "anyOf": [NUMBER, STRING]}, "1", "1"),
        ({"anyOf": [STRING, {"$ref": "#/x"}]}, "1", "1"),
        ({"description": "any"}, "1", "1"),
        (True, "1", '"1"'),
    ],
)
def test_a_value_has_a_type_that_its_schema_allows(schema: Any, value: str, argument: str) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    text = f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>"
    for texts in ([text], list(text)):
        found = parse(texts, CODER, tools=[{"type": "function", "function": function}])
        assert found == [call(0, f'{{"a":{argument}}}', "f")]
    assert QWEN3_CODER.read(text[11:-12], {"f": function["parameters"]}) == [("f", f'{{"a":{argument}}}')]


def test_a_schema_that_is_nested_deeply_says_nothing_of_a_value() -> None:
    schema: Any = STRING
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert allowed_types(schema) is None


LONG = '{"city": "a \\\\ \\" } ] é <b>\\n", "days": 3}'


@pytest.mark.parametrize(
    ("format", "text", "arguments"),
    [
        (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {LONG}}}\n</tool_call>', LONG),
        (LLAMA3_JSON, f'{{"name": "get_weather", "parameters": {LONG}}}', LONG),
        (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {LONG}, "id": "a"}}]', LONG),
        (MISTRAL, f"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{LONG}", LONG),
        (
            QWEN3_CODER,
            '<tool_call>\n<function=get_weather>\n<parameter=city>\na\n\\"}\n</b>\n</parameter>\n<parameter=days>\n3\n</parameter>'
            "\n</function>\n</tool_call>",
            '{"city":"a\\n\\\\\\"}\\n</b>","days":3}',
        ),
        (harmony.TOOLS, f"<|channel|>commentary to=functions.f <|constrain|>json<|message|> {LONG} <|call|>", LONG),
    ],
)
def test_arguments_come_as_they_are_written(format: ToolFormat, text: str, arguments: str) -> None:
    output = OutputFormat(format)
    parser = output.parser("<|start|>assistant", TOOLS)
    events = [event for letter in text for event in parser.feed(letter)] + parser.finish()
    assert all(isinstance(event, ToolCallDelta) for event in events)
    pieces = [event for event in events if isinstance(event, ToolCallDelta)]
    assert "".join(piece.arguments for piece in pieces) == arguments
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].complete
    # A letter at a time, but for what may be a mark, white space at the end, and a value that is no text.
    assert len(pieces) >= len(arguments) // 3
    assert len({piece.id for piece in pieces}) == 1


@pytest.mark.parametrize(
    ("format", "text", "arguments", "complete"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": Oslo}}</tool_call>', '{"a": Oslo}', True),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', '{"a": 1', False),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}', True),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "{}", True),
        (QWEN3_CODER, "<tool_call><function=f><parameter=a>1</parameter>x</function></tool_call>", '{"a":"1"', False),
        (QWEN3_CODER, "<tool_call><function=f><parameter=a>1</parameter>\n</tool_call>", '{"a":"1"}', True),
        (QWEN3_CODER, "<tool_call><function=f><parameter=a>1</par", '{"a":"1', False),
        (QWEN3_CODER, "<tool_call><function=f></function></tool_call>", "{}", True),
    ],
)
def test_a_call_that_has_begun_stays_one_however_it_ends(
    format: ToolFormat, text: str, arguments: str, complete: bool
) -> None:
    for texts in ([text], list(text)):
        assert parse(texts, OutputFormat(format)) == [call(0, arguments, "f", complete)]


def test_ids_for_mistral_are_those_that_its_templates_take() -> None:
    (event,) = _finished(OutputFormat(MISTRAL), "[TOOL_CALLS]f{}")
    assert isinstance(event, ToolCallDelta)
    assert len(event.id) == 9
    assert event.id.isalnum()


def _finished(output: OutputFormat, text: str) -> list[Event]:
    parser = output.parser(PROMPT, TOOLS)
    return [*parser.feed(text), *parser.finish()]


def test_only_the_first_of_parallel_calls_is_returned_where_one_is_wanted() -> None:
    assert parse([CALL + CALL], QWEN, parallel=False) == [OSLO]


def test_an_answer_continues_the_reasoning_that_its_prompt_began() -> None:
    assert parse(["I see.\n</think>\n\nYes"], QWEN, PROMPT + "<think>\n") == [
        ReasoningDelta("I see."),
        ContentDelta("Yes"),
    ]


def test_an_answer_has_no_reasoning_where_its_prompt_has_ended_it() -> None:
    closed = PROMPT + "<think>\n\n</think>\n\n"
    assert parse(["<think>a</think>"], QWEN, closed) == [ContentDelta("<think>a</think>")]
    assert parse(["a"], R1, closed) == [ContentDelta("a")]


@pytest.mark.parametrize(
    "body", ["[" * 5000, '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", '{"name": "\ud800"}', "\0"]
)
def test_text_that_a_json_reader_fails_at_is_content_or_a_call(body: str) -> None:
    for output in (OutputFormat(each) for each in TOOL_FORMATS.values()):
        assert output.tools is not None
        text = f"{output.tools.open}{body}{output.tools.close}"
        events = parse([text], output)
        assert events == [ContentDelta(text)] or [type(event) for event in events] == [ToolCallDelta]


HERMES_TEMPLATE = "{% if tools %}<tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ("<tool_call> in a template that takes none", None, None),
        (HERMES_TEMPLATE, HERMES, None),
        (HERMES_TEMPLATE + "</think>", HERMES, QWEN3),
        ("{{ tools }}<tool_call>\n<function=", QWEN3_CODER, None),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL, None),
        ("{{ tools }}<|python_tag|>", LLAMA3_JSON, None),
        ("", None, None),
    ],
)
def test_the_chat_template_says_how_a_model_writes(template: str, tools: Any, reasoning: Any) -> None:
    assert select_output_format(template) == OutputFormat(tools, reasoning)


def test_an_operator_may_name_the_formats_as_for_vllm() -> None:
    chosen = select_output_format(HERMES_TEMPLATE + "</think>", tool_call_parser="mistral", reasoning_parser="none")
    assert chosen == OutputFormat(MISTRAL, None)
    with pytest.raises(ValueError, match="--tool-call-parser has the value 'x'; allowed: auto, none, hermes"):
        select_output_format("", tool_call_parser="x")


def test_marks_that_are_special_tokens_must_be_detokenized() -> None:
    template = "{{ tools }}[TOOL_CALLS]"
    assert select_output_format(template, {"[TOOL_CALLS]", "</s>"}).shows_special_tokens
    assert not select_output_format(template, {"</s>"}).shows_special_tokens


def truncated(format: ToolFormat, text: str) -> list[tuple[str, str, bool]]:
    """The calls of a forced answer that broke off, fed a character at a time: name, arguments, complete."""
    parser = OutputFormat(format).parser(PROMPT, TOOLS, True, forced=True)
    events = joined([event for letter in text for event in parser.feed(letter)] + parser.finish())
    assert all(isinstance(event, ToolCallDelta) for event in events)
    assert [event.index for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    return [(event.name, event.arguments, event.complete) for event in events if isinstance(event, ToolCallDelta)]


TWO = '[{"name": "f", "arguments": {"a": [1, 2]}}, {"name": "g", "arguments": {"b": "x}'


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        (HERMES, "<tool_", []),
        (HERMES, '<tool_call>\n{"name": "get_wea', []),
        (HERMES, '<tool_call>\n{"name": "f"', [("f", "", False)]),
        (HERMES, '<tool_call>\n{"name": "f", "argu', [("f", "", False)]),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": ', [("f", "", False)]),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call> ', [("f", '{"a": "<tool_call> ', False)]),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "}', [("f", '{"a": "}', False)]),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {}}', [("f", "{}", True)]),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_', [("f", "{}", True)]),
        (LLAMA3_JSON, '{"name": "f', []),
        (LLAMA3_JSON, '{"name": "f", "parameters": {"a": 1', [("f", '{"a": 1', False)]),
        (LLAMA3_JSON, '{"name": "get_weather", "parameters": {"a": 1}}', [("get_weather", '{"a": 1}', True)]),
        (MISTRAL, "[TOOL_CALLS", []),
        (MISTRAL, '[TOOL_CALLS][{"name": "f"', [("f", "", False)]),
        (MISTRAL, f"[TOOL_CALLS]{TWO}", [("f", '{"a": [1, 2]}', True), ("g", '{"b": "x}', False)]),
        (MISTRAL, "[TOOL_CALLS]get_wea", []),
        (MISTRAL, "[TOOL_CALLS]f[ARG", [("f", "", False)]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"', [("f", '{"a": 1}', True), ("g", '{"', False)]),
    ],
)
def test_a_forced_answer_that_breaks_off_is_calls(
    format: ToolFormat, text: str, calls: list[tuple[str, str, bool]]
) -> None:
    assert truncated(format, text) == calls


def test_of_a_forced_answer_with_one_call_only_that_one_is_returned() -> None:
    parser = OutputFormat(MISTRAL).parser(PROMPT, TOOLS, False, forced=True)
    events = [*parser.feed(f"[TOOL_CALLS]{TWO}"), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallDelta)] == ["f"]


# The formats, the beginning of an answer, a piece that goes on and on, and how many pieces are few.
LONG_ANSWERS: dict[str, tuple[OutputFormat, str, str, int]] = {
    "white space before reasoning": (OutputFormat(HERMES, QWEN3), "", " " * 1000, 25),
    "white space before a call of Llama's": (OutputFormat(LLAMA3_JSON), "", " " * 1000, 25),
    "white space before reasoning without its mark": (OutputFormat(HERMES, DEEPSEEK_R1), "", " " * 1000, 125),
    "white space within content": (OutputFormat(HERMES), "x", " " * 1000, 125),
    "a parameter's name": (OutputFormat(QWEN3_CODER), "<tool_call><function=f><parameter=", "a" * 1000, 25),
    "white space before a parameter": (
        OutputFormat(QWEN3_CODER),
        "<tool_call><function=f><parameter=a></parameter>",
        " " * 1000,
        25,
    ),
    "a call within reasoning": (QWEN, f"<think>{CALL}", "</tool_call> <tool_call" * 50, 125),
    "close marks in a string": (QWEN, MARKED_CALL[:-16], "</tool_call> <tool_call" * 50, 125),
    "a value that is no text": (
        OutputFormat(QWEN3_CODER),
        "<tool_call><function=get_weather><parameter=places>",
        "[1, " * 250,
        125,
    ),
}


@pytest.mark.parametrize("name", LONG_ANSWERS)
def test_a_piece_of_a_long_answer_is_read_once(name: str) -> None:
    output, begin, piece, few = LONG_ANSWERS[name]

    def read(size: int) -> None:
        parser = output.parser("", TOOLS)
        for text in (begin, *[piece] * size):
            parser.feed(text)
        parser.finish()

    assert_linear(read, few)


@pytest.mark.parametrize(
    ("tools", "begin", "repeated", "end"),
    [
        (MISTRAL, "[TOOL_CALLS]a", " ", "x"),
        (QWEN3_CODER, "<tool_call><function=f>", " ", "x</tool_call>"),
        (QWEN3_CODER, "<tool_call><function=f>x", "<parameter=a>", "</tool_call>"),
        (QWEN3_CODER, "<function=get_weather><parameter=city>", "</function>", "</parameter></function>"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "', "</tool_call>", '"}}</tool_call>'),
    ],
)
def test_each_place_of_an_answer_is_looked_at_once(tools: ToolFormat, begin: str, repeated: str, end: str) -> None:
    def read(size: int) -> None:
        parser = OutputFormat(tools).parser("", TOOLS)
        parser.feed(begin + repeated * size + end)
        parser.finish()

    assert_linear(read, 500)


def test_calls_that_broke_off_behind_a_name_that_is_no_text_are_none() -> None:
    assert begun_calls(HERMES, '{"name": "\\q", "arguments": {') == []

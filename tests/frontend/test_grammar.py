"""Forced tool calls: what the grammar takes is what the parser reads as calls."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_openai.parsing import OutputFormat, ToolCallDelta
from dflash_openai.parsing.grammar import NoGrammar, forced_calls
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
    assert takes(forced_calls(format, FUNCTIONS, parallel, {}), text)
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
    assert not takes(forced_calls(HERMES, FUNCTIONS, False, {}), text)


def test_marks_that_are_special_tokens_are_those_tokens() -> None:
    grammar = forced_calls(MISTRAL, FUNCTIONS, True, {"[TOOL_CALLS]": 5, "[ARGS]": 6})
    assert grammar.splitlines()[1:4] == ["one: <[5]> call", "call: f0 | f1", 'f0: "get_weather" <[6]> arguments0']


def test_a_format_without_a_grammar_says_so() -> None:
    with pytest.raises(NoGrammar, match="writes calls as 'qwen3_coder'; set tool_choice to auto"):
        forced_calls(QWEN3_CODER, FUNCTIONS, True, {})

"""Answers of gpt-oss, in OpenAI's harmony format, split into reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from checks.byte_tokenizer import write_byte_tokenizer
from dflash_backend.text.tokenizer import Tokenizer
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.parsing import ContentDelta, Event, OutputFormat, ReasoningDelta, ToolCallDelta, select_output_format
from dflash_openai.parsing.grammar import NoGrammar, grammar_of_calls
from dflash_openai.parsing.harmony import REASONING, TOOLS, HarmonyParser, template_messages
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import Script, ScriptedPool
from tests.frontend.test_parsing import call, joined, parse
from tests.frontend.test_tools import HELLO, WEATHER, ask, forcing  # noqa: F401
from tests.support.growth import assert_linear

PROMPT = "<|start|>user<|message|>Hello<|end|><|start|>assistant"
HARMONY = OutputFormat(TOOLS, REASONING)
THOUGHT = "<|channel|>analysis<|message|>I see. <|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
OSLO = call(0, '{"city": "Oslo"}')
SEEN = ReasoningDelta("I see. ")


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("", []),
        (FINAL + "Hello <|x|> \n", [ContentDelta("Hello <|x|> \n")]),
        (FINAL + "Hello<|return|>", [ContentDelta("Hello")]),
        (THOUGHT + NEXT + FINAL + "Yes", [SEEN, ContentDelta("Yes")]),
        ("<|channel|>analysis<|message|>I see", [ReasoningDelta("I see")]),
        (THOUGHT + NEXT + THOUGHT + NEXT + FINAL + "Yes", [ReasoningDelta("I see. \nI see. "), ContentDelta("Yes")]),
        (THOUGHT + NEXT + CALL, [SEEN, OSLO]),
        (THOUGHT + NEXT + CALL + "<|call|>", [SEEN, OSLO]),
        # The recipient may stand before the channel, and in any channel.
        (' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}', [OSLO]),
        ('<|channel|>analysis to=functions.get_weather code<|message|>{"city": "Oslo"}', [OSLO]),
        ("<|channel|>commentary to=functions.now<|message|>", [call(0, "{}", "now")]),
        (
            "<|channel|>commentary<|message|>I look.<|end|>" + NEXT + CALL + "<|call|>" + NEXT + CALL,
            [ContentDelta("I look."), OSLO, call(1, '{"city": "Oslo"}')],
        ),
        # Cut short, and no object.
        (CALL[:-3], [call(0, '{"city": "Osl', complete=False)]),
        ("<|channel|>commentary to=functions.f<|message|>[1]", [ContentDelta("[1]")]),
        (FINAL + "a<|end|>" + NEXT + "<|chan", [ContentDelta("a")]),
        (FINAL + "a <|en", [ContentDelta("a <|en")]),
        # Of a model that does not know the format.
        ("Hello, you", [ContentDelta("Hello, you")]),
    ],
)
def test_an_answer_has_the_same_events_however_it_is_split(text: str, events: list[Event]) -> None:
    assert parse([text], HARMONY, PROMPT) == events
    assert parse(list(text), HARMONY, PROMPT) == events
    for border in range(len(text)):
        assert parse([text[:border], text[border:]], HARMONY, PROMPT) == events


MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
PIECES = st.sampled_from([*MARKS, "analysis", "final", " to=functions.f", "{}", "assistant", "<|", "a", " ", "\n", "é"])
FORMATS = st.sampled_from([HARMONY, OutputFormat(TOOLS), OutputFormat(None, REASONING)])


@given(FORMATS, st.lists(PIECES, max_size=14).map("".join), st.sampled_from([PROMPT, PROMPT + FINAL]), st.data())
@settings(max_examples=300, deadline=None)
def test_no_answer_depends_on_where_it_is_split(
    output: OutputFormat, text: str, prompt: str, data: st.DataObject
) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]
    assert parse(parts, output, prompt) == parse([text], output, prompt)


def test_an_answer_may_continue_a_message_that_its_prompt_began() -> None:
    assert parse(["Yes<|return|>"], HARMONY, PROMPT + FINAL) == [ContentDelta("Yes")]
    thinking = PROMPT + "<|channel|>analysis<|message|>"
    assert parse(["I see.<|end|>" + NEXT + FINAL + "Yes"], HARMONY, thinking) == [
        ReasoningDelta("I see."),
        ContentDelta("Yes"),
    ]


def test_without_tools_and_without_a_reasoning_format_all_messages_are_content() -> None:
    assert parse([CALL], HARMONY, PROMPT, tools=[]) == [ContentDelta('{"city": "Oslo"}')]
    assert parse([THOUGHT], OutputFormat(TOOLS), PROMPT) == [ContentDelta("I see. ")]


def test_only_the_first_call_is_returned_where_one_is_wanted() -> None:
    assert parse([CALL + "<|call|>" + NEXT + CALL], HARMONY, PROMPT, parallel=False) == [OSLO]


def test_text_comes_at_once_where_it_begins_no_mark() -> None:
    parser = HARMONY.parser(PROMPT)
    assert parser.feed(FINAL + "Hel") == [ContentDelta("Hel")]
    assert parser.feed("lo <") == [ContentDelta("lo ")]
    assert parser.feed("b>") == [ContentDelta("<b>")]


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if m.content %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_the_chat_template_says_that_a_model_writes_so() -> None:
    assert select_output_format(TEMPLATE) == OutputFormat(TOOLS, REASONING, shows_special_tokens=True)
    assert select_output_format(TEMPLATE.replace("tools", "x")).tools is None
    named = select_output_format("", tool_call_parser="openai", reasoning_parser="openai_gptoss")
    assert named == OutputFormat(TOOLS, REASONING, shows_special_tokens=True)


def test_reasoning_of_the_history_is_what_the_template_calls_thinking() -> None:
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    assert template_messages([message, HELLO[0]]) == [message | {"thinking": "Hm."}, HELLO[0]]
    # Beside a call the template takes one of the two.
    with_call = message | {"tool_calls": [{}]}
    assert template_messages([with_call]) == [with_call | {"thinking": "Hm.\nYes", "content": ""}]


def write_harmony_tokenizer(directory: Path) -> None:
    """A byte tokenizer with harmony's marks as special tokens, and such a template."""
    write_byte_tokenizer(directory, chat=False)
    fast = PreTrainedTokenizerFast.from_pretrained(directory)
    fast.add_special_tokens({"additional_special_tokens": [AddedToken(mark, special=True) for mark in MARKS]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(directory))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedPool, TestClient]]:
    directory = tmp_path_factory.mktemp("harmony")
    write_harmony_tokenizer(directory)
    pool = ScriptedPool(directory)
    with TestClient(create_app(FrontendConfig(), pool), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield pool, http


def tokenizer_of(pool: ScriptedPool) -> Tokenizer:
    return Tokenizer.load(Path(pool.description.tokenizer))


def prompt_of(pool: ScriptedPool) -> str:
    return tokenizer_of(pool).decode(pool.asked[-1].token_ids, skip_special_tokens=False)


def test_a_chat_has_reasoning_content_and_calls_apart(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((THOUGHT, NEXT, FINAL, "Yes"))
    message = ask(client).choices[0].message
    assert (message.reasoning, message.content) == ("I see. ", "Yes")
    assert pool.asked[-1].sampling["skip_special_tokens"] is False
    ask(client, extra_body={"skip_special_tokens": True})  # as vLLM's clients say it, whose default it is
    assert pool.asked[-1].sampling["skip_special_tokens"] is False
    pool.script = Script((THOUGHT + NEXT, CALL))
    (choice,) = ask(client).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (made,) = choice.message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", {"city": "Oslo"})
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I see. "
    assert [each.function.name for delta in deltas for each in delta.tool_calls or []] == ["get_weather"]


def test_a_history_goes_back_through_the_checkpoints_template(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((FINAL + "Cold",))
    made = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    history = [{"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [made]}]
    result = {"role": "tool", "tool_call_id": "a", "content": "-3"}
    ask(client, messages=[*HELLO, *history, result], tools=[WEATHER])
    assert prompt_of(pool) == (
        "get_weather;<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
        "<|start|>tool<|message|>-3<|end|><|start|>assistant"
    )


def test_a_grammar_begins_with_the_final_message(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((FINAL + "{}",))
    ask(client, tools=openai.NOT_GIVEN, response_format={"type": "json_object"})
    marker = tokenizer_of(pool).encode_part(FINAL)
    assert pool.asked[-1].sampling["response_format"] == {"type": "json_object", "after_reasoning": marker}


FUNCTIONS = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "now"},
]


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (CALL, True),
        (THOUGHT + NEXT + CALL, True),
        (THOUGHT + NEXT + THOUGHT + NEXT + CALL.replace("get_weather", "now").replace('{"city": "Oslo"}', "{}"), True),
        # Without parameters a function has no arguments.
        (CALL.replace("get_weather", "now"), False),
        (THOUGHT + NEXT + FINAL + "Hello", False),
        (CALL.replace("get_weather", "other"), False),
        (CALL.replace('"Oslo"', "1"), False),
        (CALL[:-1], False),
        (THOUGHT, False),
        ("Hello", False),
    ],
)
def test_a_forced_answer_thinks_and_then_calls(pool: ScriptedPool, text: str, is_taken: bool) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = tokenizer_of(pool)
    grammar = grammar_of_calls(TOOLS, FUNCTIONS, True, tokenizer.special_token_ids)
    vocabulary = Path(pool.description.tokenizer, "tokenizer.json").read_text(encoding="utf-8")
    made = llguidance.LLTokenizer(vocabulary, eos_token=tokenizer.special_token_ids["<|return|>"])
    matcher = llguidance.LLMatcher(made, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode_part(text)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_taken


@pytest.mark.usefixtures("forcing")
def test_a_forced_call_is_asked_for_by_a_grammar_from_the_answers_beginning_on(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    pool.script = Script((THOUGHT + NEXT + CALL,))
    ask(client, tool_choice="required")
    asked = pool.asked[-1].sampling["structured_outputs"]
    assert set(asked) == {"grammar"}
    assert "to=functions.get_weather " in asked["grammar"]


def test_a_call_cannot_be_forced_where_marks_are_no_tokens() -> None:
    with pytest.raises(NoGrammar, match="cannot be forced where the model writes calls as 'openai'"):
        grammar_of_calls(TOOLS, FUNCTIONS, True, {"<|start|>": 1})


def test_responses_count_the_reasoning_up_to_its_end(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((THOUGHT, NEXT + CALL), encode=tokenizer_of(pool).encode_part)
    answer = client.responses.create(model="dflash", input="Hi", tools=[{"type": "function", **WEATHER["function"]}])
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert answer.usage.output_tokens_details.reasoning_tokens == 3 + len("analysis") + len("I see. ")


def test_a_final_message_is_continued_as_content(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((" it is<|return|>",))
    begun = [*HELLO, {"role": "assistant", "content": "Yes," * 10}]
    answer = ask(client, messages=begun, extra_body={"continue_final_message": True})
    message = answer.choices[0].message
    assert (message.content, getattr(message, "reasoning", None)) == (" it is", None)
    assert prompt_of(pool).endswith("<|start|>assistant<|message|>" + "Yes," * 10)


CALL_HEAD = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>commentary to=functions."


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("get_wea", None),
        ("f ", ("f", "")),
        ("f <|constrain|>json", ("f", "")),
        ("f <|constrain|>json<|message|>", ("f", "")),
        ('f <|constrain|>json<|message|>{"a": "x ', ("f", '{"a": "x ')),
        ('f <|constrain|>json<|message|>{"a": 1}', ("f", '{"a": 1}')),
    ],
)
def test_a_forced_call_that_breaks_off_has_its_arguments_as_far_as_they_came(
    text: str, call: tuple[str, str] | None
) -> None:
    parser = HarmonyParser("<|start|>assistant", True, True, forced=True)
    events = joined([event for letter in CALL_HEAD + text for event in parser.feed(letter)] + parser.finish())
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [(each.name, each.arguments) for each in calls] == ([call] if call else [])
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "I see."
    assert not any(isinstance(event, ContentDelta) for event in events)
    assert all(each.complete is each.arguments.endswith("}") for each in calls)


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ("", "<|start|><|message|>"),
        ("", ">to=functions."),
        (CALL.partition("{")[0], " " * 100),
    ],
)
def test_each_place_of_an_answer_is_looked_at_once(begin: str, repeated: str) -> None:
    def read(size: int) -> None:
        parser = HarmonyParser("", reasoning=True, calls=True, forced=True)
        for piece in (begin, repeated * size) if not repeated.isspace() else (begin, *[repeated * 10] * (size // 4)):
            parser.feed(piece)
        parser.finish()

    assert_linear(read, 400)

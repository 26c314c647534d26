"""Tools and reasoning in chat completions, as OpenAI's client sees them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from dflash_client.errors import InvalidArgument
from dflash_client.results import Logprob
from dflash_openai import notices
from dflash_openai.errors import ApiError
from dflash_openai.parsing import OutputFormat
from dflash_openai.parsing.tool_formats import HERMES
from dflash_openai.tools import ToolUse
from tests.frontend.scripted_pool import Script, ScriptedPool
from tests.frontend.tool_model import CALL, CITY, forcing, prompt_text, running  # noqa: F401

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": "now"}}


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="dflash", **({"messages": HELLO, "tools": [WEATHER, NOW]} | more))


def test_a_call_is_a_message_without_content(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(tuple(CALL))
    (choice,) = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Oslo"},
    )
    assert bytes(pool.asked[0].token_ids[:16]) == b"get_weather;now;"


def test_a_stream_has_the_calls_after_the_content(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((*"Look. ", CALL[:30], CALL[30:] + "\n" + CALL))
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Look."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "get_weather"), (1, "get_weather")]
    assert calls[0].id != calls[1].id
    assert chunks[-1].finish_reason == "tool_calls"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_only_the_last_event_of_the_last_delta_ends_the_answer(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(("Look. " + CALL + CALL,), ends_with_text=True)
    reasons = [chunk.choices[0].finish_reason for chunk in ask(client, stream=True)]
    assert len(reasons) >= 4
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_an_answer_that_is_cut_short_says_so_and_a_call_without_arguments_is_content(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    begun = CALL.partition('{"city')[0]
    pool.script = Script((CALL, begun), "length")
    (choice,) = ask(client).choices
    assert choice.finish_reason == "length"
    assert len(choice.message.tool_calls) == 1
    assert choice.message.content == begun
    pool.script = Script((CALL, begun + '{"ci'), "length")
    (choice,) = ask(client).choices
    assert choice.finish_reason == "length"
    assert [each.function.arguments for each in choice.message.tool_calls] == ['{"city": "Oslo"}', '{"ci']
    assert choice.message.content is None


@pytest.mark.parametrize("size", [1, 7])
def test_the_arguments_of_a_call_come_as_they_are_written(client: openai.OpenAI, pool: ScriptedPool, size: int) -> None:
    text = CALL.replace("Oslo", r"a \"b\" {c} \n" * 20)
    pool.script = Script([text[at : at + size] for at in range(0, len(text), size)])
    calls = [call for chunk in ask(client, stream=True) for call in chunk.choices[0].delta.tool_calls or []]
    first, *others = calls
    assert (first.function.name, first.type, first.id[:5]) == ("get_weather", "function", "call_")
    assert {(each.index, each.id, each.type, each.function.name) for each in others} == {(0, None, None, None)}
    arguments = "".join(each.function.arguments for each in calls)
    assert json.loads(arguments) == {"city": 'a "b" {c} \n' * 20}
    # With each part of the answer's text, and no part is empty.
    assert len(calls) >= len(arguments) // size - 1
    assert all(each.function.arguments for each in calls)


def test_reasoning_is_apart_from_content(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(("<think>\nI", " see.", "</think>\n\nYes"))
    message = ask(client).choices[0].message
    assert (message.content, message.reasoning) == ("Yes", "I see.")
    deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I see."
    assert "".join(delta.content or "" for delta in deltas) == "Yes"
    silent = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert (silent.content, getattr(silent, "reasoning", None)) == ("Yes", None)


def test_an_answer_without_thinking_is_not_searched_for_it(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(("<think>x</think>y",))
    message = ask(client, reasoning_effort="none").choices[0].message
    assert message.content == "<think>x</think>y"
    assert bytes(pool.asked[0].token_ids[-15:]) == b"<think></think>"


def test_calls_results_and_reasoning_of_the_history_reach_the_template(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "a", "content": "Rain"},
    ]
    ask(client, messages=messages)
    text = prompt_text(pool.asked[0])
    assert "assistant:Hm.<tool_call>Oslo" in text
    assert "tool:Rain" in text


def test_without_a_choice_of_tools_the_model_sees_none(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((CALL,))
    (choice,) = ask(client, tool_choice="none").choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)
    assert "get_weather" not in prompt_text(pool.asked[0])


def test_only_one_call_where_several_at_once_are_not_wanted(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((CALL, CALL))
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_allowed_tools_are_those_that_the_model_sees(client: openai.OpenAI, pool: ScriptedPool) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}
    ask(client, tool_choice=choice)
    assert bytes(pool.asked[0].token_ids[:4]) == b"now;"


@pytest.mark.usefixtures("forcing")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_a_call_of_the_tool_that_the_request_names_ends_with_stop(
    client: openai.OpenAI, pool: ScriptedPool, choice: Any, reason: str, stream: bool
) -> None:
    pool.script = Script((CALL,))
    answer = ask(client, tool_choice=choice, stream=stream)
    last = list(answer)[-1] if stream else answer
    assert last.choices[0].finish_reason == reason


@pytest.mark.usefixtures("forcing")
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "now"]),
        ({"type": "function", "function": {"name": "now"}}, ["now"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}, ["now"]),
    ],
)
def test_a_forced_call_is_asked_for_by_a_grammar_that_begins_after_the_reasoning(
    client: openai.OpenAI, pool: ScriptedPool, choice: Any, names: list[str]
) -> None:
    ask(client, tool_choice=choice)
    asked = pool.asked[0].sampling["structured_outputs"]
    assert [name for name in ("get_weather", "now") if f'\\"{name}\\"' in asked["grammar"]] == names
    assert asked["after_reasoning"] == list(b"</think>")
    ask(client, tool_choice=choice, reasoning_effort="none")
    assert "after_reasoning" not in pool.asked[1].sampling["structured_outputs"]
    pool.script = Script(texts=(), error=InvalidArgument("the grammar in 'structured_outputs' is too large"))
    with pytest.raises(openai.BadRequestError, match="the grammar in 'tools' is too large") as caught:
        ask(client, tool_choice=choice)
    assert caught.value.param == "tools"


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
FORMATS: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_object"}),
    ("response_format", SCHEMA),
    ("structured_outputs", {"choice": ["a", "b"]}),
    ("guided_regex", "a+"),
    ("guided_json", CITY),
]


@pytest.mark.usefixtures("forcing")
@pytest.mark.parametrize(("name", "value"), FORMATS)
def test_a_forced_call_wins_over_a_format_and_the_log_says_so(
    client: openai.OpenAI, pool: ScriptedPool, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    notices.clear()
    ask(client, tool_choice="required")
    ask(client, tool_choice="required", extra_body={name: value})
    alone, both = (asked.sampling for asked in pool.asked)
    assert both == alone
    assert list(both["structured_outputs"]) == ["grammar", "after_reasoning"]
    assert f"where 'tool_choice' forces a tool call, '{name}' is ignored" in caplog.messages


@pytest.mark.parametrize(("name", "value"), FORMATS)
@pytest.mark.parametrize("choice", [None, "auto", {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER, NOW]}])
def test_a_model_that_may_call_tools_calls_them_or_answers_in_the_format(
    client: openai.OpenAI, pool: ScriptedPool, name: str, value: Any, choice: Any
) -> None:
    more = {} if choice is None else {"tool_choice": choice}
    pool.script = Script((CALL,))
    answer = ask(client, extra_body={name: value}, **more)
    asked = pool.asked[0].sampling
    assert "response_format" not in asked
    assert asked["structured_outputs"]["grammar"].startswith("start: calls | format\n")
    assert asked["structured_outputs"]["after_reasoning"] == list(b"</think>")
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]
    pool.script = Script(texts=(), error=InvalidArgument("the grammar in 'structured_outputs' is wrong"))
    with pytest.raises(openai.BadRequestError, match=f"the grammar in '{name}' is wrong"):
        ask(client, extra_body={name: value}, **more)


def test_a_format_that_is_none_is_refused_beside_tools_too(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="needs {.json_schema") as caught:
        ask(client, response_format={"type": "json_schema"})
    assert caught.value.param == "response_format"


def test_without_tools_to_call_a_format_stays_as_it_was_sent(client: openai.OpenAI, pool: ScriptedPool) -> None:
    ask(client, response_format=SCHEMA, tool_choice="none", reasoning_effort="none")
    ask(client, response_format=SCHEMA, tools=[], reasoning_effort="none")
    begun = [*HELLO, {"role": "assistant", "content": "{"}]
    ask(client, response_format=SCHEMA, messages=begun, extra_body={"continue_final_message": True})
    assert [asked.sampling["response_format"] for asked in pool.asked] == [SCHEMA] * 3


def test_a_response_format_begins_after_the_reasoning(client: openai.OpenAI, pool: ScriptedPool) -> None:
    ask(client, tools=[], response_format=SCHEMA)
    # In its own parameter: an error of the grammar names what the client sent.
    assert pool.asked[0].sampling["response_format"] == {**SCHEMA, "after_reasoning": list(b"</think>")}
    assert "structured_outputs" not in pool.asked[0].sampling


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "cannot force a tool call"),
        ({"tool_choice": "sometimes"}, "tool_choice", "is not one of none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "names the function 'f'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "'tool_choice' needs 'tools'"),
        ({"tools": [{"type": "function"}]}, "tools", r"tools\[0\].function is None"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools", r"tools\[1\].function is None"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
            "tools",
            r"tools\[0\] is of the type custom, which only /v1/responses takes; send a function",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            "chat_template_kwargs",
            "has the name 'tokenize'",
        ),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_it(
    client: openai.OpenAI, more: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        ask(client, **more)
    assert raised.value.param == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("texts", "n", "count"),
    [
        (("<think>\nI", " see.</th", "ink>", "\n\nYes"), 1, 22),
        (("<think>I", " s"), 1, 10),
        (("Yes</think>",), 1, 0),
        (("<think>I</think>Y",), 3, 48),
    ],
)
def test_tokens_of_reasoning_are_in_the_usage(
    client: openai.OpenAI, pool: ScriptedPool, texts: tuple[str, ...], n: int, count: int, stream: bool
) -> None:
    pool.script = Script(texts)
    more = {"stream_options": {"include_usage": True}} if stream else {}
    answer = ask(client, stream=stream, n=n, **more)
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.completion_tokens_details.reasoning_tokens == count
    if n == 1:
        of_response = client.responses.create(model="dflash", input="Hi", tools=[]).usage
        assert of_response.output_tokens_details.reasoning_tokens == count


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [WEATHER, NOW]},
        {"tools": [WEATHER, NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none", "tools": [WEATHER]},
    ],
)
@pytest.mark.usefixtures("forcing")
def test_tokens_of_messages_are_those_that_a_chat_of_them_has(
    http: TestClient, pool: ScriptedPool, more: dict[str, Any]
) -> None:
    tokens = http.post("/tokenize", json={"messages": HELLO, **more}).json()["tokens"]
    http.post("/v1/chat/completions", json={"messages": HELLO, **more})
    assert tokens == pool.asked[0].token_ids


def test_log_probabilities_come_once_for_each_token(client: openai.OpenAI, pool: ScriptedPool) -> None:
    texts = ("<think>a</think>b", CALL)
    entry = {1: Logprob(-1.0, 1, "x")}
    pool.script = Script(texts, logprobs=[[entry], [entry, entry]])
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, logprobs=True)]
    assert sum(len(chunk.logprobs.content) for chunk in chunks if chunk.logprobs) == 3


def test_what_continues_a_message_is_content_and_no_reasoning(client: openai.OpenAI, pool: ScriptedPool) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I think"}]
    fields = {"continue_final_message": True}
    pool.script = Script((" so. ", CALL))
    (choice,) = ask(client, messages=begun, extra_body=fields).choices
    assert (choice.message.content, len(choice.message.tool_calls)) == (" so.", 1)
    pool.script = Script(("{}",))
    answer = ask(client, messages=begun, tools=[], response_format={"type": "json_object"}, extra_body=fields)
    assert answer.choices[0].message.content == "{}"
    assert "after_reasoning" not in str(pool.asked[-1].sampling)


def test_reasoning_that_a_message_began_goes_on(client: openai.OpenAI, pool: ScriptedPool) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "<think>x</think>y<think>I"}]
    pool.script = Script((" see.</think>Yes",))
    message = ask(client, messages=begun, extra_body={"continue_final_message": True}).choices[0].message
    assert (message.reasoning, message.content) == ("see.", "Yes")


def test_a_forced_call_continues_no_message(client: openai.OpenAI) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I"}]
    with pytest.raises(openai.BadRequestError, match="which cannot continue a message"):
        ask(client, messages=begun, tool_choice="required", extra_body={"continue_final_message": True})


FORCED: Any = {"tool_choice": "required", "tools": [WEATHER]}
BEGUN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "O s'


def joined_message(chunks: Any) -> dict[str, Any]:
    """The message that a client makes of a stream's deltas, as OpenAI's own does: what is null is replaced."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for name, value in chunk.choices[0].delta.to_dict().items():
            if name == "tool_calls":
                calls = message.setdefault(name, [])
                for call in value:
                    if call["index"] == len(calls):
                        calls.append((call["function"]["name"], ""))
                    calls[-1] = (calls[-1][0], calls[-1][1] + call["function"]["arguments"])
            elif isinstance(value, str) and isinstance(message.get(name), str) and name != "role":
                message[name] += value
            elif value is not None or name not in message:
                message[name] = value
    return message


@pytest.mark.usefixtures("forcing")
def test_a_forced_call_that_is_cut_has_its_arguments_as_far_as_they_came(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    for num_chars in range(0, len(CALL), 3):
        text = CALL[:num_chars]
        pool.script = Script(tuple(text) or ("",), "length")
        (choice,) = ask(client, **FORCED).choices
        assert (choice.finish_reason, choice.message.content) == ("length", None)
        arguments = text.partition('"arguments": ')[2].partition("}")[0] + "}" * ("}" in text)
        expected = [("get_weather", arguments)] if '"get_weather"' in text else []
        assert [(each.function.name, each.function.arguments) for each in choice.message.tool_calls or []] == expected
        message = joined_message(ask(client, stream=True, **FORCED))
        assert (message.get("tool_calls", []), message["content"]) == (expected, None)


@pytest.mark.usefixtures("forcing")
def test_a_call_after_a_complete_one_may_be_cut(client: openai.OpenAI, pool: ScriptedPool) -> None:
    for reason in ("length", "stop"):
        pool.script = Script((CALL + "\n" + BEGUN,), reason)
        (choice,) = ask(client, **FORCED).choices
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Oslo"}', '{"city": "O s']
        # Where a stop string cut it as well: the last call is not one to carry out.
        assert (choice.finish_reason, choice.message.content) == (reason, None)


@pytest.mark.usefixtures("forcing")
def test_reasoning_before_a_forced_call_is_reasoning(client: openai.OpenAI, pool: ScriptedPool) -> None:
    for text, reasoning in (("<think>\nI se", "I se"), ("<think>\nI see.</think>\n<tool_c", "I see.")):
        pool.script = Script((text,), "length")
        message = ask(client, **FORCED).choices[0].message
        assert (message.content, message.tool_calls, message.reasoning) == (None, None, reasoning)


@pytest.mark.usefixtures("forcing")
def test_a_response_has_the_cut_call_as_an_incomplete_item(client: openai.OpenAI, pool: ScriptedPool) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": CITY}
    arguments: Any = {"model": "dflash", "input": "Hi", "tools": [tool], "tool_choice": "required"}
    pool.script = Script((BEGUN,), "length")
    answer = client.responses.create(**arguments)
    (call,) = answer.output
    assert (answer.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")
    assert call.arguments == '{"city": "O s'
    *_, last = client.responses.create(stream=True, **arguments)
    assert last.response.output[0].arguments == '{"city": "O s'
    assert last.response.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("text", "content"),
    [(CALL, None), ("<think>I see.</think>", None), ("", ""), ("Yes", "Yes"), ("<think>I see.</think>Yes", "Yes")],
)
def test_joined_deltas_have_the_content_of_the_whole_answer(
    text: str, content: str | None, client: openai.OpenAI, pool: ScriptedPool
) -> None:
    for texts in ((text,), tuple(text) or ("",)):
        pool.script = Script(texts)
        whole = ask(client).choices[0].message
        assert whole.content == content
        chunks = list(ask(client, stream=True))
        message = joined_message(chunks)
        assert (message["role"], message["content"]) == ("assistant", content)
        assert message.get("reasoning") == getattr(whole, "reasoning", None)
        assert chunks[0].choices[0].delta.to_dict()["role"] == "assistant"


def test_reasoning_has_the_names_that_clients_read(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(("<think>\nI", " see.", "</think>\n\nYes"))
    message = ask(client).choices[0].message
    assert (message.reasoning, message.reasoning_content) == ("I see.", "I see.")
    joined = joined_message(ask(client, stream=True))
    assert (joined["reasoning"], joined["reasoning_content"]) == ("I see.", "I see.")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_reasoning_of_the_history_may_have_any_of_its_names(path: str, http: TestClient, pool: ScriptedPool) -> None:
    prompts = []
    for name in ("reasoning", "reasoning_content", "thinking"):
        message = {"role": "assistant", "content": "ok", name: "Hm."}
        answer = http.post(path, json={"messages": [*HELLO, message, *HELLO]}).json()
        prompts.append(answer["tokens"] if path == "/tokenize" else pool.asked[-1].token_ids)
    assert prompts[0] == prompts[1] == prompts[2]
    assert b"assistant:Hm.ok" in bytes(token_id for token_id in prompts[0] if token_id < 256)


def test_parameters_that_are_nested_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"items": schema}
    use = ToolUse([{"type": "function", "function": {"name": "f", "parameters": schema}}], forced=True)
    with pytest.raises(ApiError, match="nested too deeply"):
        use.grammar(OutputFormat(HERMES), {})

"""POST /v1/responses, as OpenAI's client sees it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from dflash_client.errors import Internal
from dflash_client.results import Logprob
from tests.frontend.scripted_pool import MAX_MODEL_LEN, STATS, Script, ScriptedPool
from tests.frontend.tool_model import CALL, CITY, prompt_text, running  # noqa: F401

WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
LOGPROBS: Any = "message.output_text.logprobs"
ANSWER = ("<think>\nI", " see.", "</think>\n\nLook.\n", CALL)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(model="dflash", **({"input": "Hi"} | more))


def test_a_response_has_text_and_usage_and_is_not_stored(client: openai.OpenAI, pool: ScriptedPool) -> None:
    answer = ask(client, instructions="Be kind.", max_output_tokens=9, temperature=0.5, metadata={"a": "b"})
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "Hello!")
    assert answer.id.startswith("resp_")
    assert answer.usage.output_tokens == 6
    assert answer.usage.total_tokens == answer.usage.input_tokens + 6
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.instructions, answer.max_output_tokens, answer.metadata) == ("Be kind.", 9, {"a": "b"})
    assert answer.model_dump()["store"] is False
    assert (answer.temperature, answer.top_p, answer.tool_choice) == (0.5, 1.0, "auto")
    assert prompt_text(pool.asked[0]) == "system:Be kind.user:Hia:"
    assert pool.asked[0].sampling == {"temperature": 0.5, "max_tokens": 9}


def test_a_response_repeats_its_request_with_defaults_and_says_when_it_ended(client: openai.OpenAI) -> None:
    said: dict[str, Any] = {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"}
    begun, *_, last = list(ask(client, text={"verbosity": "low", "format": None}, stream=True, **said))
    for answer in (begun.response, last.response, ask(client, text={"verbosity": "low"}, **said)):
        assert answer.text.to_dict() == {"format": {"type": "text"}, "verbosity": "low"}
        assert {name: getattr(answer, name) for name in said} == said
    assert begun.response.completed_at is None
    assert last.response.completed_at >= last.response.created_at


def test_the_tokens_of_an_input_are_counted_as_a_response_has_them(client: openai.OpenAI, pool: ScriptedPool) -> None:
    said: Any = {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be kind.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(model="dflash", **said)
    assert not pool.asked
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", ask(client, **said).usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.input_tokens.count(model="dflash", input="Hi", previous_response_id="resp_1")


@pytest.mark.parametrize(("cached", "told"), [(5, 5), (None, 0)])
def test_cached_tokens_are_in_the_usage(
    client: openai.OpenAI, pool: ScriptedPool, cached: int | None, told: int
) -> None:
    pool.script = Script(stats=STATS | {"num_cached_tokens": cached})
    assert ask(client).usage.input_tokens_details.cached_tokens == told


def test_an_answer_is_as_long_as_fits_without_a_limit(client: openai.OpenAI, pool: ScriptedPool) -> None:
    ask(client)
    assert pool.asked[0].sampling == {"max_tokens": MAX_MODEL_LEN - len(pool.asked[0].token_ids)}


def test_parameters_that_openai_has_for_chats_reach_the_model_too(client: openai.OpenAI, pool: ScriptedPool) -> None:
    more = {"stop": ["x"], "seed": 3, "top_k": 5, "logit_bias": {"7": -5.0}}
    ask(client, max_output_tokens=9, extra_body=more)
    assert pool.asked[0].sampling == {**more, "max_tokens": 9}


def test_reasoning_text_and_calls_are_items(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(ANSWER)
    answer = ask(client, tools=[WEATHER])
    reasoning, message, call = answer.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "I see.", [])
    assert (message.type, message.content[0].text, message.status) == ("message", "Look.", "completed")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    assert call.call_id.startswith("call_")
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>\nI see.</think>")
    assert prompt_text(pool.asked[0]).startswith("get_weather;")


def test_a_stream_tells_how_the_same_items_come_about(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(tuple("".join(ANSWER)))
    events = list(ask(client, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [kind for kind in kinds if "delta" not in kind][2:] == [
        *("response.output_item.added", "response.content_part.added", "response.reasoning_text.done"),
        *("response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.content_part.added", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"),
        "response.completed",
    ]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Look."
    output = events[-1].response.output
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in output] == [item.id for item in done]
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2]
    deltas = [event for event in events if event.type.endswith(".delta")]
    assert {event.item_id for event in deltas} == {item.id for item in output}


def test_the_clients_own_stream_helper_follows_it(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(ANSWER)
    with client.responses.stream(model="dflash", input="Hi", tools=[WEATHER]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_short_is_incomplete(client: openai.OpenAI, pool: ScriptedPool, stream: bool) -> None:
    pool.script = Script(("Hel",), "length")
    answer = ask(client, stream=stream)
    if stream:
        events = list(answer)
        assert events[-1].type == "response.incomplete"
        answer = events[-1].response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("Hel", "incomplete")


def test_an_error_in_mid_stream_is_a_failed_response(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(("Hel",), error=Internal("the engine died"))
    events = list(ask(client, stream=True))
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "the engine died")


def test_the_items_of_a_conversation_are_its_messages(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(ANSWER)
    first = ask(client, tools=[WEATHER])
    output = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "Rain"}
    parts = [{"type": "input_text", "text": "Hi"}]
    ask(client, input=[{"role": "user", "content": parts}, *output, result, {"role": "user", "content": "So?"}])
    assert prompt_text(pool.asked[1]) == "user:Hiassistant:I see.Look.<tool_call>Oslotool:Rainuser:So?a:"


def test_a_schema_of_the_text_and_the_effort_go_to_the_model(client: openai.OpenAI, pool: ScriptedPool) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": CITY, "strict": True}}
    ask(client, text=text)
    assert pool.asked[0].sampling["response_format"]["json_schema"]["schema"] == CITY
    ask(client, text=text, reasoning={"effort": "none"})
    assert pool.asked[1].sampling["response_format"]["json_schema"]["schema"] == CITY
    assert prompt_text(pool.asked[1]).endswith("<think></think>")


def with_logprobs(*texts: str) -> Script:
    """An answer with a token for each text; "" is one without text of its own."""
    entries = [[{n: Logprob(-n / 10, 1, text), 99: Logprob(-5.0, 2, "?")}] for n, text in enumerate(texts)]
    return Script(texts, logprobs=entries)


@pytest.mark.parametrize("num_top", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_a_chat(
    client: openai.OpenAI, pool: ScriptedPool, stream: bool, num_top: int | None
) -> None:
    pool.script = with_logprobs("Hel", "lo", "\u00e9")
    more: dict[str, Any] = {} if num_top is None else {"top_logprobs": num_top}
    answer = ask(client, include=[LOGPROBS], stream=stream, **more)
    if stream:
        *events, last = answer
        answer = last.response
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [entry.token for event in deltas for entry in event.logprobs] == ["Hel", "lo", "\u00e9"]
        assert [[entry.token for entry in event.logprobs] for event in deltas] == [["Hel"], ["lo"], ["\u00e9"]]
        (done,) = (event for event in events if event.type == "response.output_text.done")
        (part_done,) = (event for event in events if event.type == "response.content_part.done")
        assert [entry.to_dict() for entry in done.logprobs] == [entry.to_dict() for entry in part_done.part.logprobs]
        assert done.logprobs[0].to_dict()["bytes"] == list(b"Hel")
    found = [entry.to_dict() for entry in answer.output[0].content[0].logprobs]
    asked: Any = {"model": "dflash", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    chat = client.chat.completions.create(**asked, **more).choices[0].logprobs
    assert found == [entry.to_dict() for entry in chat.content]
    assert [len(entry["top_logprobs"]) for entry in found] == [num_top or 0] * 3
    assert answer.top_logprobs == (num_top or 0)
    assert pool.asked[0].sampling["logprobs"] == pool.asked[1].sampling["logprobs"] == (num_top or 0)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_contents_alone(client: openai.OpenAI, pool: ScriptedPool, stream: bool) -> None:
    texts = ("<think>", "Look", "</think>", "\n\n", "Look", "", "!", "\n", *CALL, "")
    pool.script = with_logprobs(*texts)
    answer = ask(client, tools=[WEATHER], include=[LOGPROBS], stream=stream)
    if stream:
        answer = list(answer)[-1].response
    message, call = answer.output[1:]
    assert (message.content[0].text, call.type) == ("Look!", "function_call")
    assert [(entry.token, entry.logprob) for entry in message.content[0].logprobs] == [
        ("Look", -0.4),
        ("", -0.5),
        ("!", -0.6),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_stop_string_and_of_the_end_have_no_log_probabilities(
    client: openai.OpenAI, pool: ScriptedPool, stream: bool
) -> None:
    entries = [[{n: Logprob(-0.5, 1, text)} for n, text in enumerate(("", "a", "b.", "\n", "\n", ""))]]
    pool.script = Script(("ab",), logprobs=entries)
    answer = ask(client, include=[LOGPROBS], stream=stream)
    if stream:
        answer = list(answer)[-1].response
    assert [entry.token for entry in answer.output[0].content[0].logprobs] == ["", "a", "b."]


def test_log_probabilities_wait_for_their_text(client: openai.OpenAI, pool: ScriptedPool) -> None:
    entries = [[{1: Logprob(-0.1, 1, "a")}, {2: Logprob(-0.2, 1, "b")}], [{3: Logprob(-0.3, 1, "c")}]]
    pool.script = Script(("a", "bc"), logprobs=entries)
    events = [e for e in ask(client, include=[LOGPROBS], stream=True) if e.type == "response.output_text.delta"]
    assert [(e.delta, [entry.token for entry in e.logprobs]) for e in events] == [("a", ["a"]), ("bc", ["b", "c"])]


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_and_the_answer_come_as_the_model_has_them(
    stream: bool, client: openai.OpenAI, pool: ScriptedPool
) -> None:
    pool.script = Script((CALL[:20], CALL[20:]), logprobs=None)
    found = ask(client, extra_body={"enable_response_messages": True}, stream=stream)
    found = list(found) if stream else found
    answer = next(event.response for event in found if event.type == "response.completed") if stream else found
    ids = pool.asked[0].token_ids
    for begun in [event.response for event in found[:2]] if stream else []:
        assert begun.input_messages == answer.input_messages
        assert begun.output_messages == [{"type": "raw_message_tokens", "message": "", "tokens": []}]
    assert answer.input_messages == [{"type": "raw_message_tokens", "message": "<s>user:Hi<s>a:", "tokens": ids}]
    assert answer.output_messages == [
        {"type": "raw_message_tokens", "message": CALL, "tokens": list(CALL.encode())},
    ]


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_answer_of_nothing_is_a_message_without_text(
    reason: str, status: str, client: openai.OpenAI, pool: ScriptedPool
) -> None:
    pool.script = Script((), reason)
    whole = ask(client)
    (item,) = whole.output
    assert (whole.status, item.type, item.status, item.content[0].text) == (status, "message", status, "")
    kinds = [event.type.removeprefix("response.") for event in ask(client, stream=True)]
    text = ["content_part.added", "output_text.done", "content_part.done"]
    assert kinds[2:] == ["output_item.added", *text, "output_item.done", status]


def test_without_the_include_there_are_no_log_probabilities(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = with_logprobs("Hello")
    assert ask(client, top_logprobs=0).output[0].content[0].logprobs == []
    assert "logprobs" not in pool.asked[0].sampling


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_an_input_that_does_not_fit_is_refused_and_not_cut(
    client: openai.OpenAI, pool: ScriptedPool, truncation: Any
) -> None:
    pool.script = Script(["Hello"])
    assert ask(client, truncation=truncation).truncation == "disabled"
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, truncation=truncation, input="a" * 10_000)
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"store": True}, "store", "keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no conversations"),
        ({"background": True}, "background", "wait for the answer"),
        ({"include": ["something.else"]}, "include", "allowed: reasoning.encrypted_content"),
        ({"top_logprobs": 2}, "top_logprobs", "needs 'message.output_text.logprobs' in 'include'"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "is 21; allowed: an integer from 0 to 20"),
        ({"top_logprobs": -1, "include": [LOGPROBS]}, "top_logprobs", "is -1; allowed"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools", r"tools\[0\] is a namespace without a name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 5}]}, "tools", r"or whose 'tools' are no objects"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input[0]",
            "keeps no responses.*'store' set to false",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice",
            "names the function 'f'",
        ),
        ({"input": []}, "input", "'input' is an empty list"),
        ({"input": "a" * 10_000}, "input", "maximum context length"),
        ({"instructions": "x", "input": [{"content": "x"}]}, "input[0]", r"^.*input\[0\] has the role None; allowed"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0]", r"input\[0\] has the name None; allowed"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}]},
            "input[0]",
            r"input\[0\] has the arguments 5; allowed",
        ),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools", r"tools\[1\].name is None; allowed"),
        ({"tools": [WEATHER | {"parameters": 5}]}, "tools", r"tools\[0\].parameters is 5; allowed"),
        ({"tools": [{"type": "function", "function": 5}]}, "tools", r"tools\[0\].function is 5; allowed"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [WEATHER, {"name": "a b"}]}]},
            "tools",
            r"tools\[0\].tools\[1\].name is 'a b'",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format",
            "needs a 'schema' beside its 'name'",
        ),
        ({"input": [{"type": "odd", "id": "x"}]}, "input[0]", "allowed: message, function_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]", "a part of the type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "is not of the type text"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "'reasoning.effort' is wrong: 3 is no text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "'max_output_tokens' is 0"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_it(
    client: openai.OpenAI, more: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        ask(client, **more)
    assert raised.value.param == param

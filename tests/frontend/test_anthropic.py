"""POST /v1/messages, as Anthropic's clients and Claude Code send it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from dflash_client.errors import Internal, QueueFull
from dflash_openai.anthropic_request import MessagesRequest, as_chat
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.middleware.api_keys import parse_keys
from dflash_openai.security import SecurityConfig
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import MAX_MODEL_LEN, STATS, Script, ScriptedPool
from tests.frontend.tool_model import CALL, CITY, forcing, prompt_text, running  # noqa: F401
from tests.support.growth import assert_linear

PATH = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"name": "get_weather", "description": "Weather", "input_schema": CITY, "cache_control": {"type": "x"}}
BASE: dict[str, Any] = {"model": "dflash", "max_tokens": 50, "messages": HELLO}
ANSWER = ("<think>\nI", " see.", "</think>\n\nLook", ".\n", CALL)
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CALLED: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}
# As Claude Code sends it.
CLAUDE_CODE: dict[str, Any] = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=17;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
    "tools": [WEATHER, SEARCH],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


def ask(http: TestClient, **more: Any) -> Any:
    answer = http.post(PATH, json=BASE | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(http: TestClient, **more: Any) -> list[Any]:
    """The events of a stream; each is named by its type."""
    text = http.post(PATH, json=BASE | {"stream": True} | more, headers={"anthropic-version": "2023-06-01"}).text
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(events: list[Any]) -> Any:
    """The message that a client makes of a stream's events."""
    message = dict(events[0]["message"])
    blocks: list[Any] = []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            kind, block = event["delta"]["type"], blocks[event["index"]]
            field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(kind)
            if field is None:
                block["json"] = block.get("json", "") + event["delta"]["partial_json"]
            else:
                block[field] += event["delta"][field]
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for block in blocks:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    return message | {"content": blocks}


def without_ids(message: Any) -> Any:
    return {**message, "id": "", "content": [{**block, "id": ""} for block in message["content"]]}


def test_a_message_has_text_usage_and_a_reason(http: TestClient, pool: ScriptedPool) -> None:
    answer = ask(http, system="Be kind.", temperature=0.5, top_k=5, top_p=0.9, metadata={"user_id": "u"})
    assert answer.pop("id").startswith("msg_")
    num_prompt = len(pool.asked[0].token_ids)
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "dflash",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert prompt_text(pool.asked[0]) == "system:Be kind.user:Hia:"
    assert pool.asked[0].sampling == {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "max_tokens": 50}


def test_cached_tokens_are_counted_by_themselves(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(stats=STATS | {"num_cached_tokens": 5})
    usage = ask(http)["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(pool.asked[0].token_ids) - 5, 5)
    assert events_of(http)[-2]["usage"] == usage


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "content", "content": "a"}}, "a"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {
                    "type": "content",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
            },
            "T\nC\na\nb",
        ),
        ({"type": "document", "title": "T", "context": None, "source": {"type": "text", "data": "a"}}, "T\na"),
        (
            {"type": "search_result", "title": "T", "source": "https://a", "content": [{"type": "text", "text": "a"}]},
            "T\nhttps://a\na",
        ),
    ],
)
def test_a_document_is_its_text_below_what_is_said_of_it(
    http: TestClient, pool: ScriptedPool, block: dict[str, Any], text: str
) -> None:
    ask(http, messages=[{"role": "user", "content": [block]}])
    assert prompt_text(pool.asked[0]) == f"user:{text}a:"


def test_turns_of_one_side_that_follow_one_another_are_one(http: TestClient, pool: ScriptedPool) -> None:
    thinking = {"role": "assistant", "content": [{"type": "thinking", "thinking": "I see.", "signature": "x"}]}
    call = {"type": "tool_use", "id": "x", "name": "get_weather", "input": {"city": "Oslo"}}
    called = {"role": "assistant", "content": [{"type": "text", "text": "Look."}, call]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "Rain"}]}
    ask(
        http, messages=[*HELLO, {"role": "user", "content": "Oslo?"}, thinking, called, result, *HELLO], tools=[WEATHER]
    )
    assert prompt_text(pool.asked[0]) == (
        "get_weather;user:Hi\nOslo?assistant:I see.Look.<tool_call>Oslotool:Rainuser:Hia:"
    )


def test_tokens_of_thinking_are_in_the_usage(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(ANSWER)
    usage = ask(http)["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": len("<think>\nI see.</think>")}
    begun, *_, ended, _ = events_of(http)
    assert begun["message"]["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    assert ended["usage"] == usage


def test_thinking_text_and_calls_are_blocks(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(ANSWER)
    answer = ask(http, tools=[WEATHER])
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "I see.", "signature": "unsigned"}
    assert text == {"type": "text", "text": "Look."}
    assert {**call, "id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {"city": "Oslo"}}
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("texts", "reason", "stop"),
    [
        (ANSWER, "stop", None),
        (("Hi",), "stop", "END"),
        (("Hi",), "length", None),
        (("<think>a",), "length", None),
        ((), "stop", None),
        ((CALL, CALL), "stop", 7),
    ],
)
def test_a_stream_is_the_message_in_parts(
    http: TestClient, pool: ScriptedPool, texts: tuple[str, ...], reason: str, stop: Any
) -> None:
    pool.script = Script(texts, reason, stop_reason=stop)
    events = events_of(http, tools=[WEATHER])
    whole = ask(http, tools=[WEATHER])
    assert without_ids(joined(events)) == without_ids(whole)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole["content"])
    assert events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["output_tokens"] == 0


@pytest.mark.parametrize(
    ("script", "more", "reason", "sequence"),
    [
        (Script(), {}, "end_turn", None),
        (Script(stop_reason="END"), {"stop_sequences": ["END"]}, "stop_sequence", "END"),
        (Script(stop_reason=7), {}, "end_turn", None),
        (Script(finish_reason="length"), {}, "max_tokens", None),
        (Script(finish_reason="length"), {"max_tokens": MAX_MODEL_LEN}, "model_context_window_exceeded", None),
        (Script(finish_reason="abort"), {}, None, None),
        (Script((CALL,)), {"tools": [WEATHER]}, "tool_use", None),
        (Script((CALL,), stop_reason="x"), {"tools": [WEATHER]}, "tool_use", None),
        (Script((CALL[:-5],), "length"), {"tools": [WEATHER]}, "max_tokens", None),
    ],
)
def test_the_reason_of_the_end_has_anthropics_words(
    http: TestClient, pool: ScriptedPool, script: Script, more: dict[str, Any], reason: str | None, sequence: Any
) -> None:
    pool.script = script
    answer = ask(http, **more)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    if "stop_sequences" in more:
        assert pool.asked[0].sampling["stop"] == ["END"]


@pytest.mark.usefixtures("forcing")
@pytest.mark.parametrize(
    ("choice", "forced", "parallel"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}, True, False),
    ],
)
def test_a_choice_of_tools_is_openais(
    http: TestClient, pool: ScriptedPool, choice: Any, forced: bool, parallel: bool
) -> None:
    pool.script = Script((CALL, CALL))
    answer = ask(http, tools=[WEATHER], tool_choice=choice)
    assert ("structured_outputs" in pool.asked[0].sampling) == forced
    assert len(answer["content"]) == (2 if parallel else 1)
    assert answer["stop_reason"] == "tool_use"


def test_with_no_choice_of_tools_the_model_sees_none(http: TestClient, pool: ScriptedPool) -> None:
    ask(http, tools=[WEATHER], tool_choice={"type": "none"})
    assert prompt_text(pool.asked[0]) == "user:Hia:"


def test_the_history_reaches_the_template(http: TestClient, pool: ScriptedPool) -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "b", "name": "get_weather", "input": {"city": "Rome"}},
                {"type": "server_tool_use", "id": "c", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "c", "content": []},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "Rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": [{"type": "text", "text": "Sun"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And"},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "now?"}},
            ],
        },
    ]
    ask(http, messages=messages, tools=[WEATHER])
    assert prompt_text(pool.asked[0]) == (
        "get_weather;user:Hiassistant:Hm.Let me look.<tool_call>Oslo<tool_call>Rometool:Raintool:Sunuser:And\nnow?a:"
    )


@pytest.mark.parametrize("content", ["I th", [{"type": "text", "text": "I th"}]])
def test_a_message_of_the_assistant_at_the_end_is_the_beginning_of_the_answer(
    http: TestClient, pool: ScriptedPool, content: Any
) -> None:
    answer = ask(http, messages=[*HELLO, {"role": "assistant", "content": content}])
    assert prompt_text(pool.asked[0]).endswith("assistant:I th")
    assert answer["content"][0]["text"] == "Hello!"


@pytest.mark.parametrize("stream", [False, True])
def test_claude_code_gets_its_answer(http: TestClient, pool: ScriptedPool, stream: bool) -> None:
    answer = joined(events_of(http, **CLAUDE_CODE)) if stream else ask(http, **CLAUDE_CODE)
    assert answer["content"] == [{"type": "text", "text": "Hello!"}]
    assert prompt_text(pool.asked[0]) == "get_weather;system:You are Claude Code.user:Hia:"


@pytest.mark.parametrize(("kind", "closed"), [("enabled", False), ("adaptive", False), ("disabled", True)])
def test_thinking_is_switched_on_or_off(http: TestClient, pool: ScriptedPool, kind: str, closed: bool) -> None:
    ask(http, thinking={"type": kind})
    assert prompt_text(pool.asked[0]).endswith("<think></think>") == closed


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_format_of_the_answer_is_held(http: TestClient, pool: ScriptedPool, name: str) -> None:
    wanted = {"type": "json_schema", "schema": CITY}
    ask(http, **{name: {"format": wanted} if name == "output_config" else wanted}, thinking={"type": "disabled"})
    assert pool.asked[0].sampling["response_format"]["json_schema"]["schema"] == CITY


def test_the_tokens_of_messages_are_counted_as_they_would_be_sent(http: TestClient, pool: ScriptedPool) -> None:
    counted = http.post(f"{PATH}/count_tokens", json={"model": "dflash", **CLAUDE_CODE})
    assert not pool.asked
    ask(http, **CLAUDE_CODE)
    assert counted.json() == {"input_tokens": len(pool.asked[0].token_ids)}


@pytest.mark.parametrize(
    ("more", "status", "kind", "words"),
    [
        ({"model": "claude"}, 404, "not_found_error", "'claude' does not exist"),
        ({"max_tokens": None}, 400, "invalid_request_error", "'max_tokens'"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "'max_tokens' is 0; allowed: an integer of at least 1"),
        ({"messages": []}, 400, "invalid_request_error", "'messages' is an empty list"),
        (
            {"system": "x", "messages": [{"content": "x"}]},
            400,
            "invalid_request_error",
            "messages[0] has the role None",
        ),
        ({"messages": [*HELLO, CALLED]}, 400, "invalid_request_error", "needs text and has no tool_use"),
        ({"messages": [*HELLO, {"role": "assistant", "content": " "}]}, 400, "invalid_request_error", "needs text and"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_request_error", "messages[0] has no content"),
        ({"tool_choice": {"type": "x"}}, 400, "invalid_request_error", "allowed: an object of the type auto, any"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "'tool_choice' needs 'tools'"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "'tool_choice' needs 'tools'"),
        ({"tool_choice": {"type": []}}, 400, "invalid_request_error", "allowed: an object of the type auto, any"),
        ({"tools": [SEARCH, {"input_schema": {}}]}, 400, "invalid_request_error", "tools[1].name is None"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, 400, "invalid_request_error", "tools[0].input_schema is 5"),
        ({"thinking": {"type": "x"}}, 400, "invalid_request_error", "'thinking.type' is 'x'"),
        ({"output_config": {"format": {}}}, 400, "invalid_request_error", "'output_config.format' is not of the type"),
        ({"messages": [{"role": "user", "content": "a" * 999}]}, 400, "invalid_request_error", "prompt is too long: "),
        *(
            ({"messages": [{"role": "user", "content": content}]}, 400, "invalid_request_error", words)
            for content, words in (
                ([{"type": "text", "text": "a"}, {"type": "image"}], "messages[0].content[1] is an image"),
                ([{"type": "document", "source": {"type": "base64"}}], "is a document that is no text"),
                (
                    [{"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}],
                    "messages[0].content[0].source.content[0] is an image",
                ),
                ([{"type": "tool_result", "content": [{"type": "image"}]}], "content[0].content[0] is an image"),
                ([{"type": "tool_result", "content": 5}], "messages[0].content[0].content is 5; allowed: a text or a"),
                ([{"type": "odd"}], "is a block of the type 'odd'"),
                (["text"], "is a block of the type None"),
                ([{"type": "tool_use", "input": {}}], "messages[0].content[0].name is None; allowed: the name of"),
                ([{"type": "tool_use", "name": "f", "input": 5}], "messages[0].content[0].input is 5; allowed"),
            )
        ),
    ],
)
def test_an_error_has_anthropics_form(
    http: TestClient, pool: ScriptedPool, more: dict[str, Any], status: int, kind: str, words: str
) -> None:
    answer = http.post(PATH, json=BASE | more, headers={"x-request-id": "mine"})
    assert answer.status_code == status
    error = answer.json()
    assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", kind, "mine")
    assert words in error["error"]["message"]
    assert answer.headers["request-id"] == "mine"
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert not pool.asked


def test_an_error_of_the_server_has_anthropics_form_too(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(texts=(), error=QueueFull("8 wait"))
    answer = http.post(PATH, json=BASE)
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "1"
    assert http.get(PATH).json()["error"]["type"] == "invalid_request_error"
    pool.script = Script(texts=("He",), error=Internal("out of memory"))
    last = events_of(http)[-1]
    assert last == {"type": "error", "error": {"type": "api_error", "message": "out of memory"}}


@pytest.fixture
def guarded(model_dir: Path) -> Iterator[TestClient]:
    """A front end with a key."""
    security = SecurityConfig(api_keys=parse_keys("me the-key-of-me-and-mine", "test"))
    with TestClient(create_app(FrontendConfig(security=security), ScriptedPool(model_dir))) as http:
        wait_until_ready(http)
        yield http


def test_a_key_may_come_in_anthropics_header(guarded: TestClient) -> None:
    body = {**BASE, "max_tokens": 5}
    for headers, status in (
        ({"x-api-key": "the-key-of-me-and-mine"}, 200),
        ({"authorization": "Bearer the-key-of-me-and-mine"}, 200),
        ({"x-api-key": "another-key-of-nobody"}, 401),
        ({}, 401),
    ):
        answer = guarded.post(PATH, json=body, headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["type"] == "authentication_error"
            assert "key-of" not in answer.text


def test_the_models_have_anthropics_form_for_its_clients(http: TestClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = http.get("/v1/models", headers=headers).json()
    names = ["toys/target", "dflash"]
    assert [listed[name] for name in ("has_more", "first_id", "last_id")] == [False, *names]
    created = http.get("/v1/models/dflash").json()["created"]
    assert [model["id"] for model in listed["data"]] == names
    for model in listed["data"]:
        assert (model["type"], model["display_name"], model["max_input_tokens"]) == (
            "model",
            model["id"],
            MAX_MODEL_LEN,
        )
        assert datetime.fromisoformat(model["created_at"]).timestamp() == created
        assert (model["lifecycle"], model["max_tokens"], model["retires_at"]) == ("active", MAX_MODEL_LEN, None)
    assert http.get("/v1/models/dflash", headers=headers).json() == listed["data"][1]


@pytest.mark.parametrize("path", ["/v1/models/claude", "/v1/files"])
def test_errors_of_other_paths_have_the_form_of_the_client_that_asks(http: TestClient, path: str) -> None:
    headers = {"anthropic-version": "2023-06-01", "x-request-id": "mine"}
    answer = http.get(path, headers=headers)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
    assert (error["request_id"], answer.headers["request-id"]) == ("mine", "mine")
    assert http.get("/v1/models/dflash", headers=headers).headers["request-id"] == "mine"
    assert "type" not in http.get(path).json()


def test_blocks_that_are_nested_too_deeply_are_refused(http: TestClient) -> None:
    inner = '{"type":"search_result","content":[' * 480 + "]}" * 480
    body = f'{{"model":"dflash","max_tokens":1,"messages":[{{"role":"user","content":[{inner}]}}]}}'
    response = http.post(PATH, content=body.encode())
    assert response.status_code == 400
    assert "nested too deeply" in response.text


def test_thoughts_are_joined_once() -> None:
    def join(size: int) -> None:
        thoughts = [{"type": "thinking", "thinking": text} for text in ("x" * 1000 * size, *["y"] * size)]
        request = MessagesRequest(max_tokens=1, messages=[{"role": "assistant", "content": thoughts}, *HELLO])
        as_chat(request)

    assert_linear(join, 200)

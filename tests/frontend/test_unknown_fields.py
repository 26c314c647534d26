"""Fields that the front end does not know: ignored and told of in the log, or refused where the operator says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from dflash_openai import notices
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import ScriptedPool

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
GENERATING = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]


@pytest.fixture(autouse=True)
def nothing_was_logged() -> None:
    notices.clear()


@pytest.fixture(scope="module")
def strict(model_dir: Path) -> Iterator[TestClient]:
    """A front end that refuses fields that it does not know."""
    config = FrontendConfig(reject_unknown_fields=True)
    with TestClient(create_app(config, ScriptedPool(model_dir)), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield http


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("value", [1, "x", {"deep": [{"er": 1.5}]}, [], False])
def test_an_unknown_field_changes_nothing_and_is_logged_once(
    path: str, value: Any, http: TestClient, pool: ScriptedPool, caplog: pytest.LogCaptureFixture
) -> None:
    body = BODIES[path]
    for each in (body, {"client_metadata": value, **body}, {**body, "client_metadata": value}):
        assert http.post(path, json=each).status_code == 200
    assert all(asked.sampling == pool.asked[0].sampling for asked in pool.asked)
    logged = [message for message in caplog.messages if "client_metadata" in message]
    assert [message.partition(" is ignored")[0] for message in logged] == ["the field 'client_metadata'"]


def test_the_log_names_the_field_that_was_meant(http: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    http.post("/v1/completions", json={"prompt": "a", "temperatur": 1, "num_predict": 3})
    http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, "stream_options": {"include_usages": 1}})
    assert {message for message in caplog.messages if message.startswith("the field")} == {
        "the field 'temperatur' is ignored; did you mean 'temperature'?",
        "the field 'num_predict' is ignored; use 'max_tokens'",
        "the field 'include_usages' in stream_options is ignored",
    }


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "response_format", "text"),
        ("/v1/responses", "messages", "input"),
        ("/v1/chat/completions", "text", "response_format"),
        ("/v1/chat/completions", "max_output_tokens", "max_completion_tokens"),
        ("/v1/messages", "instructions", "system"),
        ("/v1/messages", "reasoning_effort", "output_config"),
    ],
)
def test_a_field_of_another_endpoint_is_told_by_the_name_that_it_has_here(
    path: str, name: str, meant: str, strict: TestClient
) -> None:
    body = BODIES.get(path, {"messages": HELLO, "max_tokens": 5})
    answer = strict.post(path, json={**body, name: 5})
    assert (answer.status_code, f"unknown field '{name}'; use '{meant}'" in answer.text) == (400, True)


def test_a_request_cannot_fill_the_log(http: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    http.post("/v1/completions", json={"prompt": "a", **{f"x{number}\n{'y' * 100}": 1 for number in range(50)}})
    logged = [message for message in caplog.messages if message.startswith("the field")]
    assert len(logged) == 8
    assert all("\n" not in message and len(message) < 200 for message in logged)


def test_what_clients_choose_does_not_silence_what_operators_must_know(
    http: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(number: int, begin: int = 0) -> int:
        caplog.clear()
        tools = [{"type": f"tool_{place}"} for place in range(begin, begin + number)]
        assert http.post("/v1/chat/completions", json={"messages": HELLO, "tools": tools}).status_code == 200
        return sum("this server runs no tools itself" in message for message in caplog.messages)

    # A request has a part of all notices, and what it did not tell another one tells.
    assert (told(50), told(50), told(50), told(50)) == (20, 20, 10, 0)
    monkeypatch.setattr(notices, "MAX_NOTICES", 60)
    assert (told(20, 100), told(20, 200)) == (10, 0)
    notices.log_once("the servers", lambda: "they are gone")
    notices.log_once("the servers", lambda: "they are gone")
    assert caplog.messages.count("they are gone") == 1


def test_a_wrong_type_beside_an_unknown_field_is_still_refused(http: TestClient) -> None:
    for value, words in (("warm", "'temperature' is wrong"), (None, "'prompt' is missing")):
        fields = {"temperature": value, "odd": 1} | ({"prompt": "a"} if value else {})
        answer = http.post("/v1/completions", json=fields)
        assert (answer.status_code, words in answer.text) == (400, True)
    answer = http.post("/v1/completions", json={"prompt": "a", "odd": 1, "max_tokens": 2.0})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("name", ["functions", "function_call", "thinking"])
def test_what_would_change_the_answer_is_refused_unless_it_is_null(path: str, name: str, http: TestClient) -> None:
    answer = http.post(path, json={**BODIES[path], name: [{"name": "f"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert http.post(path, json={**BODIES[path], name: None}).status_code == 200


NULLS = (
    *("functions", "function_call", "audio", "moderation", "web_search_options", "documents", "chat_template"),
    *("kv_transfer_params", "thinking_token_budget", "logprob_token_ids", "session_id", "vllm_xargs", "request_id"),
    *("include_reasoning", "include_stop_str_in_output", "anything_else"),
)


@pytest.mark.parametrize("path", list(BODIES))
def test_nulls_pass_everywhere(path: str, http: TestClient, strict: TestClient) -> None:
    body = {**BODIES[path], **dict.fromkeys(NULLS)}
    if path in GENERATING:
        body |= {"stream": True, "stream_options": {"include_usage": None, "anything": None}}
    assert [each.post(path, json=body).status_code for each in (http, strict)] == [200, 200]


@pytest.mark.parametrize("path", list(BODIES))
def test_the_strict_refuse_an_unknown_field_by_its_name(path: str, strict: TestClient) -> None:
    answer = strict.post(path, json={**BODIES[path], "client_metadata": {}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "client_metadata")
    assert "unknown field 'client_metadata'" in answer.json()["error"]["message"]


def test_the_strict_say_what_was_meant(strict: TestClient) -> None:
    for fields, words in (
        ({"temperatur": 1}, "did you mean 'temperature'?"),
        ({"stream": True, "stream_options": {"x": 1}}, "unknown field 'x' in stream_options"),
        ({"stop_sequences": []}, "use 'stop'"),
    ):
        answer = strict.post("/v1/completions", json={"prompt": "a", **fields})
        assert (answer.status_code, words in answer.text) == (400, True)


def test_responses_take_what_chats_take(http: TestClient, pool: ScriptedPool) -> None:
    fields = {"include_stop_str_in_output": True, "request_id": "r", "spaces_between_special_tokens": True}
    assert http.post("/v1/responses", json={"input": "a", **fields}).status_code == 200
    assert pool.asked[0].sampling["include_stop_str_in_output"] is True

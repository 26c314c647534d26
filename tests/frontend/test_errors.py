"""Errors have OpenAI's form and the status that its client makes the right exception of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from dflash_client.errors import (
    Cancelled,
    ClientError,
    ConnectionFailed,
    Internal,
    InvalidArgument,
    QueueFull,
    RequestTimeout,
    Unavailable,
)
from dflash_openai.schemas import MAX_BRACKETS
from dflash_openai.usage import UsageCounter
from tests.frontend.scripted_pool import Script, ScriptedPool

# More entries than the model has tokens.
BIASES = ", ".join(f'"{token_id}": 1' for token_id in range(259))


@pytest.mark.parametrize(
    ("behind", "status", "raised"),
    [
        (InvalidArgument("sampling parameter 'top_p' has the value 7"), 400, openai.BadRequestError),
        (InvalidArgument("the grammar in 'response_format' is wrong or too large"), 400, openai.BadRequestError),
        (QueueFull("2 requests wait already and max_queue_size is 2"), 429, openai.RateLimitError),
        (Unavailable("the engine restarts"), 503, openai.InternalServerError),
        (ConnectionFailed("no gRPC server answers"), 503, openai.InternalServerError),
        (Internal("out of memory"), 500, openai.InternalServerError),
        (RequestTimeout("too long"), 504, openai.InternalServerError),
        (Cancelled("by a proxy"), 503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_model_has_its_status(
    behind: ClientError,
    status: int,
    raised: type[openai.APIStatusError],
    stream: bool,
    client: openai.OpenAI,
    pool: ScriptedPool,
) -> None:
    pool.script = Script(texts=(), error=behind)
    with pytest.raises(raised) as caught:
        client.completions.create(model="dflash", prompt="a", stream=stream)
    assert caught.value.status_code == status
    if status in (429, 503):
        assert caught.value.response.headers["retry-after"] == "1"
    assert (caught.value.response.headers.get("x-should-retry") == "false") == (status == 500)
    if status == 400:
        assert caught.value.param in ("top_p", "response_format")
        assert f"'{caught.value.param}'" in str(behind)


def test_a_stream_that_another_than_its_client_cancels_does_not_look_whole(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    """As a proxy before the server does; the client is there and waits."""
    pool.script = Script(texts=("a",), error=Cancelled("by a proxy"))
    stream = client.completions.create(model="dflash", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="the server cancelled this request: by a proxy"):
        list(stream)


def test_an_error_names_a_parameter_as_its_client_does(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(texts=(), error=InvalidArgument("the grammar in 'structured_outputs' is too large"))
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    for fields, name in (
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": schema}, "structured_outputs"),
    ):
        error = http.post("/v1/completions", json={"prompt": "a", **fields}).json()["error"]
        assert (error["param"], error["message"]) == (name, f"the grammar in '{name}' is too large")
    pool.script = Script(texts=(), error=InvalidArgument("parameter \"response_format\" is wrong: 'type' is missing"))
    text = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    error = http.post("/v1/responses", json={"input": "a", "text": text}).json()["error"]
    assert (error["param"], error["message"]) == (
        "text.format",
        "parameter \"text.format\" is wrong: 'type' is missing",
    )


def test_a_failure_in_mid_stream_is_an_event(http: TestClient, client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(texts=("He",), error=Internal("out of memory"))
    with pytest.raises(openai.APIError, match="out of memory"):
        list(client.completions.create(model="dflash", prompt="a", stream=True))
    text = http.post("/v1/completions", json={"prompt": "a", "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", '{"prompt": "a", "stream_options": {}}', "stream_options", "only for streams"),
        ("/v1/completions", "{}", "prompt", "'prompt' is missing"),
        ("/v1/chat/completions", "{}", "messages", "'messages' is missing"),
        ("/v1/completions", "", None, "the body is empty"),
        ("/v1/chat/completions", " \n", None, "the body is empty"),
        ("/v1/completions", "[]", None, "Expected `object`"),
        ("/v1/completions", '{"prompt": "a"', None, "not JSON"),
        ("/v1/completions", '{"prompt": "a", "temperature": NaN}', None, "not JSON"),
        ("/v1/completions", '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}", None, "nested too deeply"),
        ("/v1/completions", '{"prompt": ' + "[" * (MAX_BRACKETS + 1), None, "brackets"),
        ("/v1/completions", '{"prompt": "\\ud800"}', None, "not JSON"),
        ("/v1/completions", b'{"prompt": "\xff"}', None, "at byte 12"),
        ("/v1/completions", f'{{"prompt": "a", "logit_bias": {{{BIASES}}}}}', "logit_bias", "allowed: at most 258"),
        (
            "/v1/completions",
            f'{{"prompt": "a", "stop_token_ids": {[1] * 259}}}',
            "stop_token_ids",
            "259",
        ),
        ("/tokenize", "{}", "prompt", "exactly one of"),
    ],
)
def test_a_body_that_is_wrong_is_explained(
    path: str, body: str | bytes, param: str | None, words: str, http: TestClient, pool: ScriptedPool
) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert not pool.asked


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_another_model_does_not_exist(path: str, http: TestClient) -> None:
    body = {"prompt": "a"} if "chat" not in path else {"messages": []}
    body = {"tokens": [1]} if path == "/detokenize" else body  # type: ignore[dict-item]
    answer = http.post(path, json={**body, "model": "gpt-4"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)])
def test_a_path_or_method_that_is_not_there_has_the_same_form(
    method: str, path: str, status: int, http: TestClient
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "did you mean" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/messages", "POST"), ("POST", "/v1/models", "GET, HEAD"), ("DELETE", "/ping", "GET, HEAD, POST")],
)
def test_a_method_that_is_not_allowed_is_told_which_are(method: str, path: str, allowed: str, http: TestClient) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == f"{method} {path}: Method Not Allowed; allowed: {allowed}"
    assert {*answer.headers["allow"].split(", ")} == {*allowed.split(", ")}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/responses", "/v1/responses"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1//completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health/ready", "/health/ready"),
    ],
)
def test_a_path_of_another_base_url_is_told_which_was_meant(path: str, meant: str, http: TestClient) -> None:
    """OpenAI's clients want a base URL with /v1, Anthropic's one without."""
    answer = http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"] == f"POST {path}: Not Found; did you mean {meant}?"


def test_a_body_may_begin_with_the_mark_of_utf_8(http: TestClient, pool: ScriptedPool) -> None:
    """As programs of Windows write it."""
    for path in ("/v1/completions", "/invocations"):
        assert http.post(path, content=b'\xef\xbb\xbf{"prompt": "a"}').status_code == 200
    chat = http.post("/invocations", content=b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "a"}]}')
    assert chat.json()["object"] == "chat.completion"
    assert len(pool.asked) == 3


def test_a_defect_of_the_front_end_is_a_500_without_details(
    http: TestClient, pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "request", lambda *given: 1 / 0)
    answer = http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert "division" not in answer.text


def test_a_defect_is_counted_named_and_in_the_form_of_the_api(
    http: TestClient, pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "request", lambda *given: 1 / 0)
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/messages", message)):
        before = http.get("/metrics").text
        answer = http.post(path, json=body, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
        assert ("type" in answer.json()) == (path == "/v1/messages")
        assert answer.json()["error"]["type"] == "api_error"
        _assert_counted(http, path, before)


def _assert_counted(http: TestClient, path: str, before: str) -> None:
    """One more request of this path has the status 500, and no other has one more."""
    name = f'dflash_openai:requests_total{{path="{path}",status='

    def counts(page: str) -> dict[str, float]:
        lines = [line.removeprefix(name) for line in page.splitlines() if line.startswith(name)]
        return {line.partition("}")[0]: float(line.split()[1]) for line in lines}

    old, new = counts(before), counts(http.get("/metrics").text)
    assert new == {**old, '"500"': old.get('"500"', 0.0) + 1}


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/completions", {"prompt": "a"}, "data: [DONE]"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "data: [DONE]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "data: [DONE]"),
        ("/v1/responses", {"input": "a"}, "response.failed"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}, "api_error"),
    ],
)
@pytest.mark.parametrize("place", ["the model's side", "the writer"])
def test_a_defect_in_mid_stream_is_an_event_and_is_counted(
    place: str,
    path: str,
    body: dict[str, Any],
    last: str,
    http: TestClient,
    pool: ScriptedPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool.script = Script(texts=("He",), error=ValueError("a secret"))  # type: ignore[arg-type]
    if place == "the writer":
        pool.script = Script()
        monkeypatch.setattr(UsageCounter, "add", lambda counter, more: {}["a secret"])
    before = http.get("/metrics").text
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    assert "the front end failed at this request" in answer.text
    assert last in answer.text.rstrip().rpartition("\n\n")[2]
    assert "secret" not in answer.text
    assert any(record.exc_info for record in caplog.records)
    _assert_counted(http, path, before)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_defect_before_the_first_text_has_its_status(
    prompt: Any, stream: bool, http: TestClient, pool: ScriptedPool
) -> None:
    """Of several prompts too: what read one of them went, and the answer waited for it without end."""
    pool.script = Script(texts=(), error=ValueError("x"))  # type: ignore[arg-type]
    assert http.post("/v1/completions", json={"prompt": prompt, "stream": stream}).status_code == 500


class PanicException(BaseException):
    """What a panic of Rust raises is no `Exception`."""


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/v1/completions", {"prompt": "a"}, "encode_batch_fast"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "encode_batch_fast"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "decode"),
        ("/v1/responses", {"input": "a"}, "encode_batch_fast"),
        ("/tokenize", {"prompt": "a"}, "encode_batch_fast"),
        ("/detokenize", {"tokens": [97]}, "decode"),
    ],
)
def test_a_tokenizer_that_panics_is_a_400_of_the_usual_form(
    path: str, body: dict[str, Any], method: str, http: TestClient, pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = http.app.state.frontend.model().tokenizer  # type: ignore[attr-defined]
    fast = tokenizer._fast

    def fail(*given: Any, **more: Any) -> None:
        raise PanicException("at /a/path.rs:1")

    monkeypatch.setattr(
        tokenizer,
        "_fast",
        SimpleNamespace(**{"encode_batch_fast": fast.encode_batch_fast, "decode": fast.decode, method: fail}),
    )
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert "it failed with PanicException" in answer.json()["error"]["message"]
    assert "path" not in answer.text
    assert not pool.asked

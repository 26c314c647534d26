"""Request ids, and the line about each request; and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from dflash_client.errors import ClientError, Internal, InvalidArgument, RequestTimeout
from dflash_openai.middleware import access_log
from dflash_openai.middleware.access_log import AccessLogMiddleware
from dflash_openai.middleware.api_keys import ApiKey
from dflash_openai.middleware.authentication import AuthenticationMiddleware
from dflash_openai.middleware.write_timeout import WriteTimeoutMiddleware
from tests.frontend.middleware.asgi import call, collecting, echo, http_scope, part, receiving
from tests.frontend.scripted_pool import Script, ScriptedPool

KEY = "alice-secret-key"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    caplog.set_level(logging.INFO, "dflash_openai.access")
    written: list[str] = []
    monkeypatch.setattr(caplog.handler, "emit", lambda record: written.append(record.getMessage()))
    return written


def test_a_line_tells_of_the_request_and_nothing_that_is_secret(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10.0
    monkeypatch.setattr(access_log, "time", SimpleNamespace(monotonic=lambda: now))

    async def quarter_of_a_second(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal now
        now += 0.25
        await echo(scope, receive, send)

    app = AccessLogMiddleware(AuthenticationMiddleware(quarter_of_a_second, [ApiKey.of("alice", KEY)]))
    response = call(
        app,
        path="/v1/completions?token=in-the-query",
        headers={"authorization": f"Bearer {KEY}", "x-request-id": "run-7"},
        content='{"prompt": "a private question"}',
    )
    assert response.headers["x-request-id"] == "run-7"
    (line,) = lines
    size = len(response.content)
    assert line.startswith(
        'request_id=run-7 client=127.0.0.1 key=alice POST "/v1/completions" status=200 ended=complete'
    )
    assert re.search(rf"bytes={size} ms=250\.0(?: |$)", line)
    assert not any(word in line for word in (KEY, "private", "query"))


def test_refusals_have_an_id_and_a_line_too(lines: list[str]) -> None:
    app = AccessLogMiddleware(AuthenticationMiddleware(echo, [ApiKey.of("alice", KEY)]))
    response = call(app, headers={"authorization": "Bearer not-the-key"})
    assert f"request_id={response.headers['x-request-id']} " in lines[0]
    assert "key=- " in lines[0]
    assert "status=401" in lines[0]
    assert "not-the-key" not in lines[0]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\nb", "{}", 'a"b'])
def test_an_id_that_is_not_sane_is_replaced(lines: list[str], given: str) -> None:
    sent: list[Message] = []
    scope = http_scope(headers=[("x-request-id", given)])
    asyncio.run(AccessLogMiddleware(echo)(scope, receiving(part(b"", False)), collecting(sent)))
    (made,) = [value for name, value in sent[0]["headers"] if name == b"x-request-id"]
    assert len(made) == 32
    assert made.decode() == scope["state"]["request_id"]


def test_a_path_cannot_write_lines_of_its_own(lines: list[str]) -> None:
    call(AccessLogMiddleware(echo), path="/v1/%0Arequest_id=forged%1b[2J")
    assert "\n" not in lines[0]
    assert "\x1b" not in lines[0]


def test_a_failure_is_logged_and_goes_on(lines: list[str]) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError):
        call(AccessLogMiddleware(fails))
    assert "status=500 ended=failed" in lines[0]


def test_the_bytes_of_a_stream_are_those_of_all_its_parts(lines: list[str]) -> None:
    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for size in (5, 3, 0):
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": size > 0})

    call(AccessLogMiddleware(streams))
    assert " bytes=8 " in lines[0]


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
def test_a_client_that_leaves_is_told_of_where_the_server_takes_the_end_of_its_answer(
    http: TestClient, pool: ScriptedPool, lines: list[str], stream: bool, status: int
) -> None:
    pool.script = Script(texts=("a",), endless=True)
    body = json.dumps({"prompt": "a", "stream": stream, "max_tokens": 9}).encode()

    async def leave() -> None:
        received = [part(body, more_body=False)]

        async def receive() -> Message:
            if received:
                return received.pop()
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}

        await http.app(http_scope(), receive, collecting([]))

    assert http.portal is not None
    http.portal.call(leave)
    assert f'status={status} ended="client left"' in lines[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
    ],
)
@pytest.mark.parametrize(
    ("error", "word"),
    [(Internal("broken"), "internal_error"), (RequestTimeout("late"), "timeout"), (InvalidArgument("odd"), "400")],
)
def test_a_stream_that_fails_after_its_beginning_is_not_complete(
    http: TestClient, pool: ScriptedPool, lines: list[str], path: str, body: Any, error: ClientError, word: str
) -> None:
    pool.script = Script(texts=("a",), error=error)
    assert http.post(path, json={**body, "stream": True}).status_code == 200
    assert f'status=200 ended="failed: {word}"' in lines[-1]
    pool.script = Script(error=error, texts=())
    assert http.post(path, json={**body, "stream": True}).status_code >= 400
    assert "ended=complete" in lines[-1]


def test_the_log_may_be_off(lines: list[str]) -> None:
    assert "x-request-id" in call(AccessLogMiddleware(echo, enabled=False)).headers
    assert lines == []


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping", "/metrics"])
def test_a_probe_has_a_line_where_its_answer_changes(lines: list[str], path: str) -> None:
    statuses = [200, 200, 503, 503, 401, 503, 200, 200, 404]
    coming = iter(statuses)

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=next(coming))(scope, receive, send)

    app = AccessLogMiddleware(answers)
    for _ in statuses:
        call(app, "GET", path)
    assert [int(line.split("status=")[1].split()[0]) for line in lines] == [503, 401, 200, 404]
    # Others are told each time, and each probe for itself.
    coming = iter([503, 503, 200, 200, 503])
    for other in ("/v1/models", "/v1/models", "/v1/models", "/healthy", "/ping" if path != "/ping" else "/health"):
        call(app, "GET", other)
    assert len(lines) == 9


@pytest.mark.parametrize(("path", "status", "told"), [("/", 200, 0), ("/static/a.js", 304, 0), ("/static/b", 404, 1)])
def test_the_pages_own_files_have_a_line_where_they_fail(lines: list[str], path: str, status: int, told: int) -> None:
    call(AccessLogMiddleware(Response(status_code=status)), "GET", path)
    assert len(lines) == told


def test_a_client_that_does_not_read_is_given_up(lines: list[str]) -> None:
    closed: list[bool] = []

    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"data", "more_body": True})
        finally:
            closed.append(True)

    sent: list[Message] = []

    async def stuck(message: Message) -> None:
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()

    app = AccessLogMiddleware(WriteTimeoutMiddleware(streams, timeout_s=0.02))
    asyncio.run(app(http_scope(), receiving(), stuck))
    assert closed == [True]
    assert 'status=200 ended="slow client"' in lines[0]

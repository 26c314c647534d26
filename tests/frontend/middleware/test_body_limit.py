"""Bodies that are too large or too slow."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message

from dflash_openai.middleware.body_limit import BodyLimitMiddleware
from tests.frontend.middleware.asgi import call, collecting, echo, error_of, http_scope, part, receiving

APP = BodyLimitMiddleware(echo, max_bytes=10, timeout_s=0.05)


def answer(*messages: Message, headers: tuple[tuple[str, str], ...] = ()) -> list[Message]:
    """What the middleware sends to a client that sends `messages` and then waits."""
    sent: list[Message] = []
    asyncio.run(APP(http_scope(headers=headers), receiving(*messages), collecting(sent)))
    return sent


def test_a_body_is_handed_on_in_one_piece() -> None:
    sent = answer(part(b"01234"), part(b""), part(b"56789", more_body=False))
    assert sent[0]["status"] == 200
    assert json.loads(sent[1]["body"])["body"] == "0123456789"
    assert call(APP, "GET", "/health").status_code == 200


def test_a_length_that_is_too_large_is_refused_before_anything_is_read() -> None:
    sent = answer(headers=(("content-length", "11"),))
    assert sent[0]["status"] == 413
    error = json.loads(sent[1]["body"])["error"]
    assert error["message"] == "the body has 11 bytes; allowed: 10 bytes"
    assert error["code"] == "request_too_large"
    assert (b"connection", b"close") in sent[0]["headers"]


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large() -> None:
    assert answer(part(b"0123456789"), part(b"0"))[0]["status"] == 413
    assert error_of(call(APP, content=b"01234567890"))["code"] == "request_too_large"


def test_a_body_that_trickles_is_refused_in_time() -> None:
    sent = answer(part(b"0"), part(b"1"))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


def test_a_body_that_breaks_off_is_refused_and_goes_no_further() -> None:
    """The server says the same of a client that has left, which nothing reaches, and of one that sent a wrong chunk."""
    sent = answer(part(b"0"), {"type": "http.disconnect"})
    assert sent[0]["status"] == 400
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["message"] == "the body broke off before its end"
    assert sum(message["type"] == "http.response.start" for message in sent) == 1


def test_the_application_learns_of_a_client_that_leaves_later() -> None:
    seen: list[str] = []

    async def watching(scope, receive, send) -> None:
        seen.append((await receive())["type"])
        seen.append((await receive())["type"])

    app = BodyLimitMiddleware(watching, max_bytes=10, timeout_s=1)
    asyncio.run(app(http_scope(), receiving(part(b"0", more_body=False), {"type": "http.disconnect"}), collecting([])))
    assert seen == ["http.request", "http.disconnect"]


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("content-encoding", "gzip", 415),
        ("content-encoding", "identity", 200),
        ("transfer-encoding", "gzip, chunked", 415),
        ("transfer-encoding", "chunked", 200),
    ],
)
def test_a_body_that_is_not_sent_as_it_is_is_refused(name: str, value: str, status: int) -> None:
    sent = answer(part(b"0", more_body=False), headers=((name, value),))
    assert sent[0]["status"] == status
    if status == 415:
        assert f"{name} 'gzip' is not understood" in json.loads(sent[1]["body"])["error"]["message"]

"""Streams that have nothing to send for a while: headers and comments come all the same, errors as events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from dflash_client.errors import ClientError, Internal, InvalidArgument, QueueFull
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.sse import PING, EventStream
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import Script, ScriptedPool

PING_S = 0.06
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
}


@pytest.fixture(scope="module")
def served(model_dir: Path) -> Iterator[tuple[ScriptedPool, TestClient]]:
    pool = ScriptedPool(model_dir)
    with TestClient(create_app(FrontendConfig(ping_interval_s=PING_S), pool), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield pool, http


@pytest.fixture
def late(served: tuple[ScriptedPool, TestClient]) -> tuple[ScriptedPool, TestClient]:
    served[0].script = Script(texts=("Hel", "lo"))
    return served


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_without_a_delta_sends_comments(path: str, late: tuple[ScriptedPool, TestClient]) -> None:
    pool, http = late
    body = {**PATHS[path], "stream": True}
    assert ": ping" not in http.post(path, json=body).text
    pool.script.wait_s = 3.5 * PING_S
    text = http.post(path, json=body).text
    # Before the first delta, and between it and those that follow.
    assert text.count(": ping\n\n") >= 6
    rest = text.replace(": ping\n\n", "")
    assert "lo" in rest
    assert all(block.startswith(("data: ", "event: ")) for block in rest.split("\n\n") if block)


def test_openais_client_reads_over_the_comments(late: tuple[ScriptedPool, TestClient]) -> None:
    pool, http = late
    pool.script.wait_s = 2.5 * PING_S
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)
    stream = client.chat.completions.create(model="dflash", stream=True, messages=[{"role": "user", "content": "a"}])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello"
    events = client.responses.create(model="dflash", input="a", stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("error", "status"), [(InvalidArgument("wrong"), 400), (QueueFull("full"), 429)])
def test_an_error_that_comes_at_once_has_a_status_of_its_own(
    path: str, error: ClientError, status: int, late: tuple[ScriptedPool, TestClient]
) -> None:
    pool, http = late
    pool.script = Script(texts=(), error=error)
    assert http.post(path, json={**PATHS[path], "stream": True}).status_code == status


@pytest.mark.parametrize("path", PATHS)
def test_an_error_after_the_headers_is_an_event(path: str, late: tuple[ScriptedPool, TestClient]) -> None:
    pool, http = late
    pool.script = Script(texts=(), error=Internal("broken"), wait_s=2 * PING_S)
    answer = http.post(path, json={**PATHS[path], "stream": True})
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    (failed,) = [event for event in events if event.get("error") or event.get("type") == "response.failed"]
    assert "broken" in json.dumps(failed)


def test_without_an_interval_a_stream_waits(model_dir: Path) -> None:
    pool = ScriptedPool(model_dir)
    with TestClient(create_app(FrontendConfig(ping_interval_s=0.0), pool)) as http:
        wait_until_ready(http)
        pool.script.wait_s = 0.2
        assert ": ping" not in http.post("/v1/completions", json={"prompt": "a", "stream": True}).text
        pool.script = Script(texts=(), error=InvalidArgument("wrong"))
        assert http.post("/v1/completions", json={"prompt": "a", "stream": True}).status_code == 400


def test_the_time_to_the_first_event_is_not_that_to_a_comment(late: tuple[ScriptedPool, TestClient]) -> None:
    pool, http = late

    def total() -> float:
        name = 'dflash_openai:time_to_first_event_seconds_sum{path="/v1/completions"}'
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
        return float(lines[0].split()[-1]) if lines else 0.0

    before = total()
    pool.script.wait_s = 4 * PING_S
    http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert total() - before >= 4 * PING_S


@dataclasses.dataclass
class Client:
    """Has ASGI's `send`; from the part number `fails_at` on it raises."""

    error: BaseException
    fails_at: int
    num_sent: int = 0

    async def send(self, message: Any) -> None:
        self.num_sent += 1
        if self.num_sent > self.fails_at:
            raise self.error


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("too slow")])
def test_a_comment_that_cannot_be_sent_ends_the_stream(error: Exception) -> None:
    closed = []

    async def silent() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.sleep(60)

    async def close() -> None:
        closed.append(True)

    async def run() -> None:
        client = Client(error, fails_at=2)
        stream = EventStream(silent(), close, ping_s=0.05)
        began = time.monotonic()
        try:
            await stream({}, client.send, client.send)  # type: ignore[arg-type]
        finally:
            assert time.monotonic() - began < 10

    if isinstance(error, OSError):
        asyncio.run(run())
    else:
        with pytest.raises(RuntimeError, match="too slow"):
            asyncio.run(run())
    assert closed == [True]


@pytest.mark.parametrize("ping_first", [True, False])
def test_a_stream_without_an_event_yet_sends_a_comment_with_its_headers(ping_first: bool) -> None:
    sent: list[Any] = []
    before_the_first: list[int] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", message["type"]))

    async def events() -> AsyncGenerator[bytes, None]:
        before_the_first.append(len(sent))
        yield b"data: 1\n\n"

    async def close() -> None:
        """Nothing runs."""

    async def run() -> None:
        await EventStream(events(), close, ping_s=60.0, ping_first=ping_first)({}, send, send)  # type: ignore[arg-type]

    asyncio.run(run())
    assert sent == ["http.response.start", *[PING] * ping_first, b"data: 1\n\n", b""]
    assert before_the_first == [1 + ping_first]


def test_parts_of_a_stream_do_not_overtake_a_comment() -> None:
    sent: list[bytes] = []
    is_sending = False

    async def send(message: Any) -> None:
        nonlocal is_sending
        assert not is_sending
        is_sending = True
        await asyncio.sleep(0.02)
        is_sending = False
        sent.append(message.get("body", b""))

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(20):
            await asyncio.sleep(0.011)
            yield b"data: %d\n\n" % number

    async def close() -> None:
        """Nothing runs."""

    async def run() -> None:
        await EventStream(events(), close, ping_s=0.01)({}, send, send)  # type: ignore[arg-type]

    asyncio.run(run())
    assert PING in sent
    assert [part for part in sent if part.startswith(b"data")] == [b"data: %d\n\n" % number for number in range(20)]

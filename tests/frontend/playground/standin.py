"""A server that speaks as the front end does, with answers that a test can foresee: the page's tests need no model.

What it answers is in the prompt: each script is named by the prompt's first word.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from granian.constants import Interfaces
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dflash_openai.playground import playground_routes

K = 7
MAX_MODEL_LEN = 4096
MODEL = "dflash-demo"
# Tokens of the steps of an answer, over and over; the first step has no drafts.
ACCEPTED = (1, 5, 3, 8, 2, 4, 1, 6)
ANSWER = (
    "Let us solve it step by step.\n"
    "Step 1: Sam fills 4 bags with 6 marbles each, and 4 * 6 = 24.\n"
    "Step 2: Sam gives away 7 marbles, and 24 - 7 = 17.\n"
    "Answer: 17"
)
PARTY = "Beans 🫘 and 東京 tea 🍵 for the party 🎉 today"
MARKDOWN = """# Title
Some **bold**, *slanted* and `code`, 2 * 3 * 4.
- one
- two <b>x</b>
```python
if a < b:
    print("<img src=x onerror=alert(1)>")
```
"""
HTML = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b>bold</b> &amp; </div>'
# Answers by the first word of the prompt.
FIXED = {"html": HTML, "json": '{"name": "Sam", "count": 17}', "markdown": MARKDOWN, "merged": PARTY}
STEP_S = 0.008


def words(text: str) -> list[str]:
    """Tokens of a text: words, each with what stands before it."""
    tokens: list[str] = []
    for character in text:
        if not tokens or character in " \n":
            tokens.append("")
        tokens[-1] += character
    return tokens


def error(status: int, message: str, code: str | None = None, **headers: str) -> Response:
    return JSONResponse(
        {"error": {"message": message, "type": "error", "param": None, "code": code}}, status, {**headers}
    )


class Standin:
    """The app, and what has been asked of it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.api_key: str | None = None
        self.num_left = 0  # streams that their client has left
        self.num_busy = 0  # requests to answer with 429
        self.k = K  # 0: as a server that drafts nothing
        self.app = Starlette(
            routes=[
                *playground_routes(),
                Route("/health/ready", lambda request: Response()),
                Route("/standin", self.state),
                Route("/standin", self.change, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def state(self, request: Request) -> Response:
        return JSONResponse({"requests": self.requests, "num_left": self.num_left})

    async def change(self, request: Request) -> Response:
        for name, value in (await request.json()).items():
            setattr(self, name, value)
        return Response()

    def _refused(self, request: Request) -> Response | None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return error(401, "this server needs an API key", "invalid_api_key")
        return None

    def models(self, request: Request) -> Response:
        card = {"id": MODEL, "object": "model", "max_model_len": MAX_MODEL_LEN, "num_speculative_tokens": self.k}
        return self._refused(request) or JSONResponse({"object": "list", "data": [card]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if refused := self._refused(request):
            return refused
        self.requests.append(body)
        script, _, rest = str(body["messages"][-1]["content"]).partition(" ")
        if script == "toolong":
            return error(400, "the prompt has 5000 tokens; max_model_len is 4096", "context_length_exceeded")
        if self.num_busy:
            self.num_busy -= 1
            return error(429, "the queue is full", "queue_full", **{"retry-after": "1"})
        return StreamingResponse(self._stream(script, rest, body), media_type="text/event-stream")

    async def _stream(self, script: str, rest: str, body: dict[str, Any]) -> AsyncIterator[str]:
        speculative = body.get("num_speculative_tokens", self.k) != 0
        delay = {"slow": 0.05, "long": 0.0, "oneline": 0.0}.get(script, STEP_S)
        tokens, kind = words(self._text(script, rest, body, speculative)), "content"
        numbers = Numbers(speculative)
        try:
            if script == "think":
                for chunk in numbers.chunks(words("First I think about it."), "reasoning"):
                    yield event(chunk)
            if script == "tools":
                yield event(tool_calls())
                tokens = []
            chunks = numbers.chunks(tokens, kind)
            for index, chunk in enumerate(merged(chunks) if script == "merged" else chunks):
                if script == "broken" and index == 4:
                    return
                if script == "failing" and index == 4:
                    yield event({"error": {"message": "the engine ended", "type": "api_error", "code": None}})
                    return
                yield event(chunk)
                if delay or index % 10 == 0:
                    await asyncio.sleep(delay or 0.01)
            for chunk in numbers.last("tool_calls" if script == "tools" else "stop"):
                yield event(chunk)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_left += 1
            raise

    def _text(self, script: str, rest: str, body: dict[str, Any], speculative: bool) -> str:
        if script in ("long", "slow"):
            return "".join(f"word{i}{chr(10) if i % 12 == 11 else ' '}" for i in range(int(rest or 400)))
        if script == "oneline":
            return " ".join(f"word{i}" for i in range(int(rest)))
        if script in FIXED:
            return FIXED[script]
        if script == "drift" and not speculative:
            return ANSWER.replace("17", "18")
        return ANSWER


class Numbers:
    """Chunks of a stream, one for each step, and what they add up to."""

    def __init__(self, speculative: bool) -> None:
        self._speculative = speculative
        self.num_tokens = self.num_steps = 0

    def chunks(self, tokens: list[str], kind: str) -> Iterator[dict[str, Any]]:
        at = 0
        while at < len(tokens):
            count = ACCEPTED[self.num_steps % len(ACCEPTED)] if self._speculative and self.num_steps else 1
            text = "".join(tokens[at : at + count])
            ids = list(range(at, min(at + count, len(tokens))))
            drafts = K if self._speculative and self.num_steps else 0
            at += count
            self.num_steps += 1
            self.num_tokens += len(ids)
            choice = {"index": 0, "delta": {kind: text}, "finish_reason": None}
            yield {"choices": [{**choice, "token_ids": ids, "steps": [[len(ids), drafts, len(text)]]}]}

    def last(self, finish_reason: str) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason, "token_ids": []}]}
        usage = {"prompt_tokens": 30, "completion_tokens": self.num_tokens, "total_tokens": 30 + self.num_tokens}
        yield {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 16}}}


def merged(chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Two chunks in one, as from a busy server."""
    for first, second in itertools.zip_longest(chunks, chunks):
        if second is not None:
            (one,), (two,) = first["choices"], second["choices"]
            one["delta"]["content"] += two["delta"]["content"]
            one["token_ids"] += two["token_ids"]
            one["steps"] += two["steps"]
        yield first


def tool_calls() -> dict[str, Any]:
    calls = [
        {"index": i, "id": f"call_{i}", "type": "function", "function": {"name": "get_weather", "arguments": text}}
        for i, text in enumerate(('{"city": "Oslo"}', '{"city": "Rome"}'))
    ]
    return {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None, "token_ids": [1, 2]}]}


def event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


class Control:
    """A stand-in server in a process of its own, which is ended as a server may end: at once."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", __name__, str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"{self.url}health", verify=False)
                return
            except httpx.TransportError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def set(self, **values: Any) -> None:
        """Change what the server does from now on: `api_key`, `num_busy`."""
        httpx.post(f"{self.url}standin", json=values, verify=False).raise_for_status()

    def state(self) -> dict[str, Any]:
        """The `requests` so far and `num_left`, the streams that clients have left."""
        state: dict[str, Any] = httpx.get(f"{self.url}standin", verify=False).json()
        return state

    @property
    def requests(self) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = self.state()["requests"]
        return requests


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def running_standin() -> Iterator[Control]:
    """A stand-in server on a port of loopback."""
    server = Control()
    server.start()
    try:
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    asyncio.run(Server(Standin().app, port=int(sys.argv[1]), interface=Interfaces.ASGI).serve())

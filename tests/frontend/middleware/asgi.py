"""Calls of ASGI applications without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body that it got, and with the state that middlewares left."""
    message = await receive()
    state = {name: str(value) for name, value in scope.get("state", {}).items()}
    answer = json.dumps({"body": message.get("body", b"").decode(), "state": state}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": answer})


def call(app: ASGIApp, method: str = "POST", path: str = "/v1/completions", **options: Any) -> httpx.Response:
    """One request, in an event loop of its own."""

    async def run() -> httpx.Response:
        async with client(app) as http:
            return await http.request(method, path, **options)

    return asyncio.run(run())


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:9000", verify=False)


def http_scope(path: str = "/v1/completions", headers: Sequence[tuple[str, str]] = ()) -> Scope:
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    return {"type": "http", "method": "POST", "path": path, "headers": encoded, "query_string": b"", "state": {}}


def receiving(*messages: Message) -> Receive:
    """A `receive` that gives these messages and then waits for ever."""
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(body: bytes, more_body: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


def collecting(sent: list[Message]) -> Callable[[Message], Awaitable[None]]:
    async def send(message: Message) -> None:
        sent.append(message)

    return send


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error as OpenAI's API writes it."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error

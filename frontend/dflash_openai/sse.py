"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """One event whose data is JSON."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One event with a name, whose data is JSON."""
    return b"event: " + name.encode() + b"\n" + event(value)


class EventStream(Response):
    """A response that sends events as they come. `close` is called at its end, however that comes."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        self._events, self._close = events, close
        self.status_code, self.background = 200, None
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            # The client has left, which `send` may say before `receive` does.
            pass
        finally:
            await self._events.aclose()
            await self._close()

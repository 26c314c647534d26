"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# A comment, which readers of events skip.
PING = b": ping\n\n"
# What begins a part of a stream that says nothing of its answer.
PINGS = (PING, b"event: ping\n")
_ENCODER = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """One event whose data is JSON."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One event with a name, whose data is JSON."""
    return b"event: " + name.encode() + b"\n" + event(value)


class EventStream(Response):
    """A response that sends events as they come, and `ping` whenever it has sent nothing for `ping_s` (0: none), so
    that no proxy takes it for dead. `close` is called at its end, however that comes."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        ping_s: float = 0.0,
        ping_first: bool = False,
        ping: bytes = PING,
    ) -> None:
        """ping_first: there is no event yet. A server may hold the headers back until something follows them."""
        self._events, self._close, self._ping_s, self._ping_first = events, close, ping_s, ping_first
        self._ping = ping
        self.status_code, self.background = 200, None
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        sender = _PingingSend(send, self._ping_s, self._ping)
        try:
            await sender.send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._ping_first:
                await sender.send(_body(self._ping))
            async for data in self._events:
                await sender.send(_body(data))
            await sender.send(_body(b"", more=False))
        except asyncio.CancelledError:
            # A ping that could not be sent ends the stream.
            if sender.failure is None or sender.task.uncancel() > 0:
                raise
            if not isinstance(sender.failure, OSError):
                raise sender.failure from None
        except OSError:
            # The client has left, which `send` may say before `receive` does.
            pass
        finally:
            sender.close()
            await self._events.aclose()
            await self._close()


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class _PingingSend:
    """Sends the parts of one stream for the task that made it, and pings between them. One timer serves all parts."""

    def __init__(self, send: Send, ping_s: float, ping: bytes) -> None:
        self._send, self._ping_s, self._data = send, ping_s, ping
        self._loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]
        self.failure: BaseException | None = None
        self._sent_at, self._is_sending = self._loop.time(), False
        self._ping: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(ping_s, self._look) if ping_s else None

    async def send(self, message: Message) -> None:
        """Send a part, after a ping that is under way."""
        self._is_sending = True
        if self._ping is not None:
            await asyncio.wait([self._ping])
        await self._send(message)
        self._sent_at, self._is_sending = self._loop.time(), False

    def _look(self) -> None:
        left_s = self._sent_at + self._ping_s - self._loop.time()
        if left_s <= 0 and not self._is_sending and self._ping is None:
            self._ping = self._loop.create_task(self._send_ping())
            left_s = self._ping_s
        self._timer = self._loop.call_later(max(left_s, self._ping_s / 10), self._look)

    async def _send_ping(self) -> None:
        try:
            await self._send(_body(self._data))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the stream's
            self.failure = error
            self.task.cancel()
        finally:
            self._sent_at, self._ping = self._loop.time(), None

    def close(self) -> None:
        """End the timer, and a ping that is under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

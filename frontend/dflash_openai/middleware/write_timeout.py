"""Ends responses whose client has stopped reading."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ClientTooSlow(Exception):
    """A client has not read for as long as it may; its connection is given up."""


class WriteTimeoutMiddleware:
    """Bounds the time that one part of a response waits for its client. When it is over, the application gets
    `ClientTooSlow` from `send`, ends what it does for this client, and the connection is closed."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app, self._timeout_s = app, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a bounded `send`."""
        bounded = _BoundedSend(send, self._timeout_s)
        try:
            await self._app(scope, receive, bounded)
        except ClientTooSlow:
            scope.setdefault("state", {})["ended_by"] = "slow client"
        finally:
            bounded.close()


class _BoundedSend:
    """A `send` that raises `ClientTooSlow`. A response has hundreds of parts, and nearly none of them waits, so one
    timer serves them all."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # The task that sends a part, and since when.
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self._overdue = False

    async def __call__(self, message: Message) -> None:
        """Send a part. Raises `ClientTooSlow`."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)
        self._began, self._task = self._loop.time(), asyncio.current_task()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            # The timer's cancellation is this error; another one goes on as it is.
            if self._overdue and self._task is not None and self._task.uncancel() == 0:
                raise ClientTooSlow(f"the client has not read for {self._timeout_s:g} s") from None
            raise
        finally:
            self._task = None

    def _look(self) -> None:
        left_s = self._timeout_s
        if self._task is not None:
            left_s = self._began + self._timeout_s - self._loop.time()
            if left_s <= 0:
                self._overdue = True
                self._task.cancel()
                return
        self._timer = self._loop.call_later(left_s, self._look)

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()

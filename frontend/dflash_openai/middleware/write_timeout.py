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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def bounded(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError:
                raise ClientTooSlow(f"the client has not read for {self._timeout_s:g} s") from None

        try:
            await self._app(scope, receive, bounded)
        except ClientTooSlow:
            scope.setdefault("state", {})["ended_by"] = "slow client"

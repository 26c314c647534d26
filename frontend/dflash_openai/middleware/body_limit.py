"""Bounds the body of a request: its size, and the time in which it must have come."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_openai.errors import ApiError

# Such a connection has the rest of a body in it, so it cannot be used again.
_CLOSE = {"connection": "close"}


class BodyLimitMiddleware:
    """Reads the body before anything else does, and hands it on in one piece. A body that is too large gets 413 when
    its length or what has come of it says so, before it was read whole; one that takes too long gets 408, one that
    breaks off 400."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then call the application."""
        try:
            headers = Headers(scope=scope)
            _check_encoding(headers)
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > self._max_bytes:
                raise self._too_large(f"the body has {int(length)} bytes")
            body = await self._read(receive)
        except ApiError as error:
            # The client may have left.
            with contextlib.suppress(OSError):
                await error.response()(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes:
        """The body. Raises `ApiError`."""
        parts = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        # The client has left, or what it sent is no chunk.
                        raise ApiError(400, "the body broke off before its end", headers=_CLOSE)
                    parts += message.get("body", b"")
                    if len(parts) > self._max_bytes:
                        raise self._too_large("the body is longer")
                    if not message.get("more_body", False):
                        return bytes(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body had not come within {self._timeout_s:g} s",
                code="request_timeout",
                headers=_CLOSE,
            ) from None

    def _too_large(self, what: str) -> ApiError:
        message = f"{what}; allowed: {self._max_bytes} bytes"
        return ApiError(413, message, code="request_too_large", headers=_CLOSE)


def _check_encoding(headers: Headers) -> None:
    """Raise `ApiError` for a body that is not sent as it is: read as if it were, it would be a wrong one."""
    for name, plain in (("content-encoding", ("identity",)), ("transfer-encoding", ("chunked", "identity"))):
        words = [word.strip().lower() for value in headers.getlist(name) for word in value.split(",")]
        if odd := [word for word in words if word and word not in plain]:
            raise ApiError(
                415,
                f"{name} '{odd[0][:64]}' is not understood; allowed: {', '.join(plain)}",
                code="unsupported_encoding",
                headers=_CLOSE,
            )


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what `receive` says, which is the client's leaving."""
    pending: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal pending
        if pending is None:
            return await receive()
        message, pending = pending, None
        return message

    return replayed

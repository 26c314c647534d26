"""Errors of Anthropic's endpoints in the form of its API, and the header of its requests' ids."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_openai.middleware.access_log import REQUEST_ID

PATH = "/v1/messages"
# A header of each request of Anthropic's clients, at paths that OpenAI's ask as well.
VERSION = "anthropic-version"
# By status; all others are `api_error`, or of the request where they are below 500.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_fields(status: int, message: str) -> dict[str, Any]:
    """The object of an error."""
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicErrorsMiddleware:
    """Rewrites errors, which all parts of the front end write as OpenAI does, of requests of Anthropic's API: those
    of its paths, and those of its clients at all others. Tells the request's id by Anthropic's name. Goes outside of
    all that may refuse a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        if not _is_anthropics(scope):
            await self._app(scope, receive, send)
            return
        begun: Message | None = None

        async def rewrite(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers.get(REQUEST_ID, "")
            if message["type"] == "http.response.start" and message["status"] >= 400:
                begun = message
                return
            if begun is not None:
                headers = MutableHeaders(scope=begun)
                body = _rewritten(begun["status"], message.get("body", b""), headers["request-id"])
                headers["content-length"] = str(len(body))
                await send(begun)
                begun, message = None, {**message, "body": body}
            await send(message)

        await self._app(scope, receive, rewrite)


def _is_anthropics(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API."""
    path: str = scope["path"]
    return path == PATH or path.startswith(f"{PATH}/") or VERSION in Headers(scope=scope)


def _rewritten(status: int, body: bytes, request_id: str) -> bytes:
    """An error in Anthropic's form; what is no error of ours stays as it is."""
    try:
        error = msgspec.json.decode(body)["error"]
        message = error["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body
    if error.get("code") == "context_length_exceeded":
        # Claude Code shortens the conversation when it reads these words.
        message = f"prompt is too long: {message}"
    return msgspec.json.encode({**error_fields(status, message), "request_id": request_id})

"""Gives each request an id and writes one line about it, without prompts, keys or anything else of its body."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# What is asked over and over by programs: a line where the answer changes.
_PROBES = frozenset(("/health", "/health/live", "/health/ready", "/ping", "/metrics"))
_LOG = logging.getLogger("dflash_openai.access")


class AccessLogMiddleware:
    """Takes the request's `X-Request-Id` if it is short and plain, else makes one; puts it into the request's state as
    `request_id` and into the response. Goes outside of all others, so that it sees refusals too.

    A probe, which is asked every few seconds, has a line where it is answered otherwise than the one before: by 200 or
    503. The page's own files have one where they fail."""

    def __init__(self, app: ASGIApp, enabled: bool = True) -> None:
        self._app, self._enabled = app, enabled
        # By the path of a probe: that of its last answer.
        self._statuses: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application and log what became of the request."""
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        entry = _Entry(scope, request_id)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            entry.add(message)
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except BaseException:
            entry.failed = True
            raise
        finally:
            if self._enabled and self._tells(scope, entry):
                _LOG.info("%s", entry)

    def _tells(self, scope: Scope, entry: _Entry) -> bool:
        """Whether the line says more than the ones before it."""
        path, status = scope["path"], entry.status
        if path in _PROBES and status in (200, 503):
            before, self._statuses[path] = self._statuses.get(path, 200), status
            return status != before
        return not (path == "/" or path.startswith("/static/")) or status not in (200, 304)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


class _Entry:
    """What is known of one request."""

    def __init__(self, scope: Scope, request_id: str) -> None:
        self._scope, self._request_id = scope, request_id
        self._began = time.monotonic()
        self._started = 0
        self._num_bytes = 0
        self._complete = False
        self.failed = False

    def add(self, message: Message) -> None:
        """Count a part of the response."""
        if message["type"] == "http.response.start":
            self._started = message["status"]
        elif message["type"] == "http.response.body":
            self._num_bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)

    @property
    def status(self) -> int:
        """That of the answer; 499 where its client left before it began."""
        return self._started or (500 if self.failed else 499)

    def __str__(self) -> str:
        """The line. The path is quoted, since a client chose it; what follows its '?' is left out."""
        state = self._scope["state"]
        key = state.get("api_key")
        client = self._scope.get("client") or ("-",)
        return " ".join(
            [
                f"request_id={self._request_id}",
                f"client={client[0]}",
                f"key={'-' if key is None else key.name}",
                f"{self._scope['method']} {json.dumps(self._scope['path'][:256])}",
                f"status={self.status}",
                f"ended={self._ended(state)}",
                f"bytes={self._num_bytes}",
                f"ms={(time.monotonic() - self._began) * 1000:.1f}",
            ]
        )

    def _ended(self, state: dict[str, object]) -> str:
        if self.failed:
            return "failed"
        by = state.get("ended_by", None if self._complete else "client left")
        return "complete" if by is None else json.dumps(by)

"""What the log says once, however often it comes: for operators, and of requests that are answered otherwise than they
ask."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

_LOG = logging.getLogger("dflash_openai")
# Clients choose some of the words of theirs: those after this many different ones are not logged, nor those of one
# request after this many.
MAX_NOTICES, MAX_OF_REQUEST = 1000, 20
_logged: set[str] = set()
_of_clients: set[str] = set()
# How many notices there were of the request that is worked on; in threads as well.
_of_request: ContextVar[list[str] | None] = ContextVar("of_request", default=None)


def log_once(about: str, notice: Callable[[], str]) -> None:
    """Log a sentence, unless one about the same was logged before. `about` has no word that a client chooses."""
    if about not in _logged:
        _logged.add(about)
        _LOG.warning("%s", notice())


def log_once_of_client(about: str, notice: Callable[[], str]) -> None:
    """As `log_once`, `about` something that a client chooses: no more than `MAX_NOTICES`."""
    of_request = _of_request.get()
    if about in _of_clients or len(_of_clients) >= MAX_NOTICES:
        return
    if of_request is not None:
        if len(of_request) >= MAX_OF_REQUEST:
            return
        of_request.append(about)
    _of_clients.add(about)
    _LOG.warning("%s", notice())


def clear() -> None:
    """Log everything again."""
    _logged.clear()
    _of_clients.clear()


class NoticesMiddleware:
    """Counts what the log says of one request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        before = _of_request.set([])
        try:
            await self._app(scope, receive, send)
        finally:
            _of_request.reset(before)

"""Keeps pages of other sites from using a server through the browser of a person who can reach it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_openai.errors import ApiError
from dflash_openai.middleware.authentication import HEALTH_PATHS

METHODS = ("GET", "POST")
# Clients send headers of their own beside those of the API, as OpenAI's and Anthropic's do in browsers.
REQUEST_HEADERS = ("*",)
RESPONSE_HEADERS = ("x-request-id", "request-id", "retry-after")
LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))


class BrowserGuardMiddleware:
    """Refuses requests that the page of another origin sends. Browsers send some of them without asking first, and
    only hide the answer. `hosts` are the names by which the server may be called, None: any. A server on a loopback
    address without keys needs them, since a site can have its own name lead to that address. Whether the server is up
    it says under any name: probes and load balancers call it by its address."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str] = (), hosts: Collection[str] | None = None) -> None:
        """allowed_origins: such as `https://chat.example`, or `*`."""
        self._origins = frozenset(allowed_origins)
        self._hosts = hosts
        self._app: ASGIApp = app
        if allowed_origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=list(allowed_origins),
                allow_methods=METHODS,
                allow_headers=REQUEST_HEADERS,
                expose_headers=RESPONSE_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to requests of other origins and 421 to those for another host."""
        if (error := self._refusal(scope["path"], Headers(scope=scope))) is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if len(headers.getlist("host")) > 1:
            # RFC 9112: a proxy before us may have read the other one.
            return ApiError(400, "the request has more than one Host header", headers={"connection": "close"})
        host = headers.get("host", "")
        if self._hosts is not None and path not in HEALTH_PATHS and _name(host) not in self._hosts:
            return ApiError(
                421,
                f"this server does not answer to the name {_name(host)!r}; start it with --allowed-hosts or with an "
                "API key",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or self._origins & {"*", origin} or _split(origin).netloc.lower() == host.lower():
            return None
        return ApiError(
            403,
            "requests from pages of other sites are off; --allowed-origins names those that are let in",
            "permission_error",
            "origin_not_allowed",
        )


def _split(url: str) -> SplitResult:
    """The parts of a URL, all empty where it is none, as in `null`."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    return (_split(f"//{host}").hostname or "").rstrip(".")

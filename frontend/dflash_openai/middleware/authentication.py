"""Lets in requests that present a key, and says whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_openai.errors import ApiError
from dflash_openai.middleware.api_keys import ApiKey, find_key

# What probes and load balancers ask.
HEALTH_PATHS = frozenset(("/health", "/health/live", "/health/ready", "/ping"))
# What answers without a key: whether the server is up, and the page, which asks its user for one.
OPEN_PATHS = HEALTH_PATHS | {"/"}
OPEN_PREFIX = "/static/"
API_KEY = "x-api-key"


class AuthenticationMiddleware:
    """Checks `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`, and puts the `ApiKey` into the request's
    state as `api_key`. Without keys everything is let in, and `api_key` is None."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], open_metrics: bool = False) -> None:
        """open_metrics: let /metrics answer without a key."""
        self._app, self._keys = app, tuple(keys)
        self._open = OPEN_PATHS | {"/metrics"} if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 to a request without one of the keys."""
        key = self._find(scope)
        scope.setdefault("state", {})["api_key"] = key
        is_open = scope["path"] in self._open or scope["path"].startswith(OPEN_PREFIX)
        if key is None and self._keys and not is_open:
            await _refusal(Headers(scope=scope)).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> ApiKey | None:
        headers = Headers(scope=scope)
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            presented = headers.get(API_KEY, "")
        return find_key(self._keys, presented.strip()) if presented else None


def _refusal(headers: Headers) -> ApiError:
    """The error; it does not repeat what was presented."""
    if "authorization" in headers or API_KEY in headers:
        message = "the API key is not one of this server's"
    else:
        message = "this server needs an API key, sent as 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

"""Rate and concurrency limits of each key, within one front end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_openai.errors import ApiError
from dflash_openai.middleware.api_keys import ApiKey, KeyLimits
from dflash_openai.middleware.token_bucket import TokenBucket

# Only requests under these paths count: looks at the server's health are free.
LIMITED_PREFIXES = ("/v1/", "/tokenize", "/detokenize", "/invocations")
# A running request ends at a time that is not known.
CONCURRENCY_RETRY_S = 1.0


class KeyUsage:
    """What the requests of one name use now, against its limits."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._requests = TokenBucket(limits.requests_per_minute, clock) if limits.requests_per_minute else None
        tokens = limits.prompt_tokens_per_minute
        self._prompt_tokens = TokenBucket(tokens, clock) if tokens else None
        self.num_running = 0

    def begin(self) -> None:
        """Count a request that begins. Raises `ApiError` 429 when it must wait."""
        limits = self._limits
        if limits.max_concurrency and self.num_running >= limits.max_concurrency:
            raise _refusal(
                f"{self.num_running} requests of this key are running; its max_concurrency is {limits.max_concurrency}",
                CONCURRENCY_RETRY_S,
            )
        if self._requests is not None:
            if (wait_s := self._requests.wait_s()) > 0:
                raise _refusal(f"this key may send {limits.requests_per_minute} requests a minute", wait_s)
            self._requests.take()
        self.num_running += 1

    def end(self) -> None:
        """Count a request that has ended."""
        self.num_running -= 1

    def charge_prompt(self, num_tokens: int) -> None:
        """Count the prompts of a request that has begun. Raises `ApiError` 429 when it must wait."""
        if self._prompt_tokens is None:
            return
        if (wait_s := self._prompt_tokens.wait_s(num_tokens)) > 0:
            per_minute = self._limits.prompt_tokens_per_minute
            raise _refusal(f"this key may send {per_minute} tokens of prompts a minute", wait_s)
        self._prompt_tokens.take(num_tokens)


class KeyLimitsMiddleware:
    """Answers 429 with Retry-After to requests beyond their key's limits. Requests without a key share one count. Puts
    the `KeyUsage` into the request's state as `key_usage`. Goes behind `AuthenticationMiddleware`."""

    def __init__(
        self, app: ASGIApp, default: KeyLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """default: the limits of keys that have none of their own."""
        self._app, self._default, self._clock = app, default or KeyLimits(), clock
        self._usages: dict[str | None, KeyUsage] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through for as long as it runs, or refuse it."""
        if not scope["path"].startswith(LIMITED_PREFIXES):
            await self._app(scope, receive, send)
            return
        usage = self._usage(scope["state"]["api_key"])
        try:
            usage.begin()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope["state"]["key_usage"] = usage
        try:
            await self._app(scope, receive, send)
        finally:
            usage.end()

    def _usage(self, key: ApiKey | None) -> KeyUsage:
        name = None if key is None else key.name
        if name not in self._usages:
            limits = self._default if key is None else key.limits.or_else(self._default)
            self._usages[name] = KeyUsage(limits, self._clock)
        return self._usages[name]


def charge_prompt(request: Request, num_tokens: int) -> None:
    """Count `num_tokens` of prompts against the limits of the request's key. Raises `ApiError` 429."""
    usage: KeyUsage | None = getattr(request.state, "key_usage", None)
    if usage is not None:
        usage.charge_prompt(num_tokens)


def tenant_of(request: Request, asked: str | None) -> str | None:
    """The engine's tenant of a request: its key's name; without keys, what it asks for. Raises `ApiError` 403 when it
    asks for another one than its key's."""
    key: ApiKey | None = getattr(request.state, "api_key", None)
    if key is None:
        return asked
    if asked is not None and asked != key.name:
        raise ApiError(
            403,
            f"the API key belongs to the tenant '{key.name}', so 'tenant' may not be another one; leave it out",
            "permission_error",
            "tenant_not_allowed",
            "tenant",
        )
    return key.name


def _refusal(message: str, wait_s: float) -> ApiError:
    seconds = max(1, math.ceil(wait_s))
    return ApiError(
        429,
        f"{message}; try again in {seconds} s",
        "rate_limit_error",
        "rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
    )

"""The ASGI application: routes, what begins and ends with it, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_backend.text.tokenizer import InputError
from dflash_openai.absent import why_absent
from dflash_openai.anthropic_errors import AnthropicErrorsMiddleware
from dflash_openai.anthropic_messages import count_tokens, create_message
from dflash_openai.bodies import has_messages, in_thread
from dflash_openai.chat import create_chat_completion
from dflash_openai.completions import create_completion
from dflash_openai.config import FrontendConfig
from dflash_openai.errors import ApiError, ClientGone, defect
from dflash_openai.health import get_version, live, ready
from dflash_openai.metrics import FrontendMetrics, MetricsMiddleware, get_metrics
from dflash_openai.middleware.defects import DefectsMiddleware
from dflash_openai.models import get_model, list_models
from dflash_openai.notices import NoticesMiddleware
from dflash_openai.openapi import get_openapi
from dflash_openai.playground import playground_routes
from dflash_openai.responses import count_input_tokens, create_response
from dflash_openai.state import Frontend
from dflash_openai.tokenize import detokenize, tokenize
from dflash_openai.triton_pool import TritonPool


async def invoke(request: Request) -> Response:
    """A chat where the body has messages, else a completion."""
    raw = await request.body()
    is_chat = await in_thread(len(raw), lambda: has_messages(raw))
    return await (create_chat_completion if is_chat else create_completion)(request)


def create_app(config: FrontendConfig, pool: TritonPool | None = None) -> Starlette:
    """The application of one front end. `pool` stands in for the servers that `config` names."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.frontend = frontend = Frontend(config, pool)
        connecting = asyncio.create_task(frontend.connect())
        try:
            yield
        finally:
            connecting.cancel()
            await frontend.close()

    routes = [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/v1/responses", create_response, methods=["POST"]),
        Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/messages", create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", live),
        Route("/health/live", live),
        Route("/health/ready", ready),
        # SageMaker's two.
        Route("/ping", ready, methods=["GET", "POST"]),
        Route("/invocations", invoke, methods=["POST"]),
        Route("/version", get_version),
        Route("/metrics", get_metrics),
        Route("/openapi.json", get_openapi),
        *playground_routes(),
    ]
    metrics = FrontendMetrics(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(TrailingSlashMiddleware),
            Middleware(AnthropicErrorsMiddleware),
            Middleware(MetricsMiddleware, metrics=metrics),
            *config.security.middleware(),
            Middleware(NoticesMiddleware),
            Middleware(DefectsMiddleware),
            *_telemetry(config),
        ],
        exception_handlers=_HANDLERS,
        lifespan=lifespan,
    )
    # It would answer with a redirect, which a load balancer takes for good health.
    app.router.redirect_slashes = False
    app.state.metrics = metrics
    return app


class TrailingSlashMiddleware:
    """Answers a path with a slash at its end as without. Goes outside of all others: they know paths without, and see
    requests alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        if scope["type"] == "lifespan":
            await scope["app"].router(scope, receive, send)
            return
        path = scope["path"]
        if len(path) > 1 and path.endswith("/") and not path.endswith("//"):
            scope = {**scope, "path": path[:-1], "raw_path": scope.get("raw_path", b"").removesuffix(b"/")}
        await self._app(scope, receive, send)


def _telemetry(config: FrontendConfig) -> list[Middleware]:
    if config.tracer is None:
        return []
    from dflash_openai.telemetry import TelemetryMiddleware

    return [Middleware(TelemetryMiddleware, tracer=config.tracer)]


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _input_error(request: Request, error: Exception) -> Response:
    """A text or tokens that the tokenizer fails at."""
    return ApiError(400, str(error)).response()


def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404:
        meant = _meant(request)
        detail = why_absent(request.url.path) or (detail if meant is None else f"{detail}; did you mean {meant}?")
    elif error.status_code == 405:
        methods = sorted(filter(None, (error.headers or {}).get("Allow", "").split(", ")))
        detail = f"{detail}; allowed: {', '.join(methods)}"
    message = f"{request.method} {request.url.path}: {detail}"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


def _meant(request: Request) -> str | None:
    """The path that a client would have sent with the right base URL: those of OpenAI end with /v1, Anthropic's do not,
    and neither with a slash."""
    path = re.sub("/{2,}", "/", request.url.path)
    paths = {route.path for route in request.app.routes}
    return next((each for each in (path, f"/v1{path}", path.removeprefix("/v1")) if each in paths), None)


def _client_gone(request: Request, error: Exception) -> Response:
    """For the log alone: the client cannot read it."""
    return Response(status_code=499)


def _internal_error(request: Request, error: Exception) -> Response:
    """Of a middleware; `DefectsMiddleware` sees the others."""
    return defect(f"{request.method} {request.url.path}", error).response()


_HANDLERS: dict[Any, Callable[[Request, Exception], Response]] = {
    ApiError: _api_error,
    InputError: _input_error,
    HTTPException: _http_error,
    ClientGone: _client_gone,
    ClientDisconnect: _client_gone,
    Exception: _internal_error,
}

"""GET /health and /health/live: the front end lives; /health/ready and /ping: a server takes requests; /version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.errors import unavailable
from dflash_openai.state import Frontend


async def live(request: Request) -> Response:
    """200 with an empty body: the front end lives, whatever its servers do."""
    return Response()


async def ready(request: Request) -> Response:
    """200 with an empty body when a server takes requests now, else 503 with the reason."""
    frontend: Frontend = request.app.state.frontend
    frontend.model()
    if (why := await frontend.readiness.why_not()) is not None:
        raise unavailable(why)
    return Response()


async def get_version(request: Request) -> Response:
    """The version of this package."""
    try:
        found = version("dflash-triton")
    except PackageNotFoundError:
        found = "unknown"
    return Response(msgspec.json.encode({"version": found}), media_type="application/json")

"""GET /health, /health/ready, /ping and /version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.errors import unavailable
from dflash_openai.state import Frontend

PROBE_TIMEOUT_S = 2.0


async def health(request: Request) -> Response:
    """200 with an empty body when a server takes requests now, else 503 with the reason."""
    frontend: Frontend = request.app.state.frontend
    frontend.model()
    if (error := await frontend.pool.probe(PROBE_TIMEOUT_S)) is not None:
        raise unavailable(str(error))
    return Response()


async def get_version(request: Request) -> Response:
    """The version of this package."""
    try:
        found = version("dflash-triton")
    except PackageNotFoundError:
        found = "unknown"
    return Response(msgspec.json.encode({"version": found}), media_type="application/json")

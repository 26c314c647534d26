"""GET /health and /health/live: the front end lives; /health/ready and /ping: a server takes requests; /version."""

from __future__ import annotations

import asyncio
import math
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.errors import unavailable
from dflash_openai.triton_pool import TritonPool

if TYPE_CHECKING:
    from dflash_openai.state import Frontend

# A verdict counts for so long: however many ask, the servers are asked five times a second.
KEPT_S = 0.2
# The longest that one who asks waits. Kubernetes gives a probe one second.
WAIT_S = 0.6
# Servers that say nothing for so long take no requests. One that is busy with a long prompt may be late.
SILENCE_S = 2.0


class Readiness:
    """Whether a server takes requests, in one event loop. All who ask share one question to the servers."""

    def __init__(self, pool: TritonPool) -> None:
        self._pool = pool
        self._why_not: str | None = "no server has answered yet"
        self._known_at = -math.inf
        self._asking: asyncio.Task[None] | None = None

    async def why_not(self) -> str | None:
        """None when at least one server takes requests now, else why not. Known within `WAIT_S`; while the servers are
        silent, for at most `SILENCE_S`, what they last said counts."""
        if asyncio.get_running_loop().time() - self._known_at > KEPT_S:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.wait([self._asking], timeout=WAIT_S)
        return self._why_not

    async def _ask(self) -> None:
        try:
            error = await self._pool.probe(SILENCE_S)
            self._why_not = None if error is None else str(error)
            self._known_at = asyncio.get_running_loop().time()
        finally:
            self._asking = None

    def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()


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

"""Whether a server of the front end takes requests: one question to the servers, however many probes ask."""

from __future__ import annotations

import asyncio
import math

from dflash_openai.triton_pool import TritonPool

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

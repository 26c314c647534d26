"""Runs the application in this process, on granian, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from granian.constants import HTTPModes, Interfaces, TaskImpl
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.applications import Starlette

from dflash_openai.config import FrontendConfig
from dflash_openai.metrics import FrontendMetrics

# Connections that may wait to be accepted, and requests that may run at the same time.
BACKLOG = 4096
MAX_REQUESTS = 16_384
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.05


def serve(app: Starlette, config: FrontendConfig, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve `app` until SIGINT or SIGTERM. Requests that run then have `config.drain_timeout_s` to finish, while new
    ones are refused; a second signal does not wait. `on_ready` is called when it listens."""
    asyncio.run(_serve(app, config, on_ready))


async def _serve(app: Starlette, config: FrontendConfig, on_ready: Callable[[], None]) -> None:
    server = Server(
        app,
        address=config.host,
        port=config.port,
        interface=Interfaces.ASGI,
        http=HTTPModes.auto,
        task_impl=TaskImpl.asyncio,
        websockets=False,
        backlog=BACKLOG,
        backpressure=MAX_REQUESTS,
        log_level=LogLevels.error,
    )
    stop: Callable[[], None] = server.stop
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def signalled() -> None:
        if draining:
            stop()
        else:
            draining.append(loop.create_task(_drain(app, stop, config.drain_timeout_s)))

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, signalled)
    serving = asyncio.create_task(server.serve())
    loop.call_soon(on_ready)
    try:
        await serving
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _drain(app: Starlette, stop: Callable[[], None], timeout_s: float) -> None:
    """Refuse new requests, let running ones finish, then stop."""
    app.state.frontend.stop_taking_requests()
    metrics: FrontendMetrics = app.state.metrics
    deadline = asyncio.get_running_loop().time() + timeout_s
    while metrics.num_running and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL_S)
    stop()

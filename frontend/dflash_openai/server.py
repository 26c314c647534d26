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

# Connections that may wait to be accepted, and requests that may run at the same time.
BACKLOG = 4096
MAX_REQUESTS = 16_384
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(app: Starlette, config: FrontendConfig, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve `app` until SIGINT or SIGTERM. `on_ready` is called when it listens. Raises `OSError` for an address that
    cannot be used."""
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
        log_enabled=True,
        log_level=LogLevels.error,
    )
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, server.stop)
    serving = asyncio.create_task(server.serve())
    loop.call_soon(on_ready)
    try:
        await serving
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

"""Runs the application in this process, on granian, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from granian.constants import HTTPModes, Interfaces, SSLProtocols, TaskImpl
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.applications import Starlette

from dflash_openai.config import FrontendConfig
from dflash_openai.metrics import FrontendMetrics
from dflash_openai.security import ServerTls

# Connections that may wait to be accepted, and requests that may run at the same time.
BACKLOG = 4096
MAX_REQUESTS = 16_384
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.05
# What requests that are ended by a stop have to send their errors.
END_S = 1.0
# A connection on which no request comes is closed, also one that has had requests before.
HEADER_TIMEOUT_MS = 20_000
HEARTBEAT_S = 1.0
# granian's own handlers write to standard output, and would make the event loop wait for who reads that.
LOG_CONFIG = {"handlers": {}, "loggers": {"_granian": {"propagate": True}}}


def serve(app: Starlette, config: FrontendConfig, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve `app` until SIGINT or SIGTERM. Requests that run then have `config.drain_timeout_s` to finish, while new
    ones are refused; a second signal does not wait. `on_ready` is called when it listens."""
    _allow_many_connections()
    asyncio.run(_serve(app, config, on_ready))


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as this process may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _tls_options(tls: ServerTls | None) -> dict[str, Any]:
    """The options of granian's server."""
    if tls is None:
        return {}
    options: dict[str, Any] = {"ssl_cert": Path(tls.cert), "ssl_key": Path(tls.key)}
    if tls.client_ca is not None:
        options |= {"ssl_ca": Path(tls.client_ca), "ssl_client_verify": True}
    return options | {"ssl_protocol_min": SSLProtocols.tls12}


async def _serve(app: Starlette, config: FrontendConfig, on_ready: Callable[[], None]) -> None:
    server = Server(
        app,
        address=config.host,
        port=config.port,
        interface=Interfaces.ASGI,
        # Where HTTP/2 is allowed too, granian waits for ever for a connection's first byte.
        http=HTTPModes.http1,
        task_impl=TaskImpl.asyncio,
        websockets=False,
        backlog=BACKLOG,
        backpressure=MAX_REQUESTS,
        http1_settings=HTTP1Settings(header_read_timeout=HEADER_TIMEOUT_MS),
        log_level=LogLevels.error,
        log_dictconfig=LOG_CONFIG,
        **_tls_options(config.security.tls),
    )
    metrics: FrontendMetrics = app.state.metrics

    async def stop() -> None:
        """Let clients have an error, then end what is left: granian waits for it."""
        app.state.frontend.stop_taking_requests()
        app.state.frontend.end_requests()
        await _until(lambda: not metrics.running, END_S)
        metrics.stopping = True
        for task in metrics.running:
            task.cancel()
        server.stop()  # type: ignore[no-untyped-call]

    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    def signalled() -> None:
        if not stopping:
            stopping.append(loop.create_task(_drain(app, stop, config.drain_timeout_s)))
        elif len(stopping) == 1:
            stopping[0].cancel()
            stopping.append(loop.create_task(stop()))

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, signalled)
    serving = asyncio.create_task(server.serve())
    beside = [asyncio.create_task(_tell_when_it_listens(config.host, config.port, on_ready))]
    if config.heartbeat_fd is not None:
        beside.append(asyncio.create_task(_beat(config.heartbeat_fd)))
    try:
        await serving
    finally:
        for task in beside:
            task.cancel()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _tell_when_it_listens(host: str, port: int, on_ready: Callable[[], None]) -> None:
    """granian listens a moment after it was started, and does not say when."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(POLL_S)
        else:
            writer.close()
            on_ready()
            return


async def _beat(descriptor: int) -> None:
    """Write once a second that the event loop runs."""
    os.set_blocking(descriptor, False)
    while True:
        # Its reader may be gone, or be busy for so long that it is full.
        with contextlib.suppress(OSError):
            os.write(descriptor, b".")
        await asyncio.sleep(HEARTBEAT_S)


async def _drain(app: Starlette, stop: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    """Refuse new requests, let running ones finish, then stop."""
    app.state.frontend.stop_taking_requests()
    metrics: FrontendMetrics = app.state.metrics
    await _until(lambda: not metrics.running, timeout_s)
    await stop()


async def _until(reached: Callable[[], bool], timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not reached() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL_S)

"""Runs the application in this process, on granian, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces, SSLProtocols, TaskImpl
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.applications import Starlette

from dflash_openai.config import FrontendConfig
from dflash_openai.connections import ConnectionGate, listening_socket
from dflash_openai.metrics import FrontendMetrics
from dflash_openai.security import ServerTls

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.05
# What requests that are ended by a stop have to send their errors.
END_S = 1.0
HEARTBEAT_S = 1.0
# How often it is tried whether connections are taken, and how long one may take.
RING_S = 5.0
RING_TIMEOUT_S = 5.0
# What granian may take to stop. Its listener for TLS looks for no stop while it has no descriptors.
STOP_S = 5.0
_LOG = logging.getLogger("dflash_openai")
# granian's own handlers write to standard output, and would make the event loop wait for who reads that.
LOG_CONFIG = {"handlers": {}, "loggers": {"_granian": {"propagate": True}}}


def serve(app: Starlette, config: FrontendConfig, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve `app` until SIGINT or SIGTERM. Requests that run then have `config.drain_timeout_s` to finish, while new
    ones are refused; a second signal does not wait. `on_ready` is called when it listens."""
    asyncio.run(_serve(app, config, on_ready))


def _tls_options(tls: ServerTls | None) -> dict[str, Any]:
    """The options of granian's server."""
    if tls is None:
        return {}
    options: dict[str, Any] = {"ssl_cert": Path(tls.cert), "ssl_key": Path(tls.key)}
    if tls.client_ca is not None:
        options |= {"ssl_ca": Path(tls.client_ca), "ssl_client_verify": True}
    return options | {"ssl_protocol_min": SSLProtocols.tls12}


def _server(app: Starlette, config: FrontendConfig, listener: socket.socket, gate: ConnectionGate) -> Server:
    """granian's server on our own socket: other processes can listen beside the one that it makes."""
    server = Server(
        app,
        address=config.host,
        port=config.port,
        interface=Interfaces.ASGI,
        # Where HTTP/2 is allowed too, granian waits for ever for a connection's first byte.
        http=HTTPModes.http1,
        task_impl=TaskImpl.asyncio,
        websockets=False,
        backlog=gate.backlog,
        backpressure=gate.max_requests,
        # granian has one time for a request's headers and for a connection on which none comes.
        http1_settings=HTTP1Settings(header_read_timeout=round(config.security.keep_alive_timeout_s * 1000)),
        log_level=LogLevels.error,
        log_dictconfig=LOG_CONFIG,
        **_tls_options(config.security.tls),
    )

    def take_socket() -> None:
        server._shd = SocketHolder(listener.fileno(), False, gate.backlog)  # type: ignore[call-arg, assignment]

    server._init_shared_socket = take_socket  # type: ignore[method-assign]
    return server


async def _serve(app: Starlette, config: FrontendConfig, on_ready: Callable[[], None]) -> None:
    listener = listening_socket(config.host, config.port)
    gate = ConnectionGate(listener)
    server = _server(app, config, listener, gate)
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
        await asyncio.wait([serving], timeout=STOP_S)
        if not serving.done():
            _LOG.error("the HTTP server has not stopped within %g s: the process ends without it", STOP_S)
            os._exit(1)

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
    gate.start()
    doorbell = Doorbell(config, gate)
    beside = [asyncio.create_task(_tell_when_it_listens(config.host, config.port, on_ready))]
    beside.append(asyncio.create_task(doorbell.run()))
    if config.heartbeat_fd is not None:
        beside.append(asyncio.create_task(_beat(config.heartbeat_fd, doorbell)))
    try:
        await serving
    finally:
        gate.stop()
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


class Doorbell:
    """Connects to the server's own port now and then: its event loop may run while it takes no connections."""

    def __init__(self, config: FrontendConfig, gate: ConnectionGate) -> None:
        self._host, self._port, self._gate = config.host, config.port, gate
        self._tls: ssl.SSLContext | None = None
        if config.security.tls is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # Its certificate is for the name that clients use.
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self.answers = True

    async def run(self) -> None:
        """Ring until it is cancelled."""
        while True:
            await asyncio.sleep(RING_S)
            answers = self._gate.closed or await self._is_answered()
            if answers != self.answers:
                _LOG.warning("the front end takes %s connections", "new" if answers else "no new")
            self.answers = answers

    async def _is_answered(self) -> bool:
        """Whether something comes back for what is no request; with TLS, for a handshake."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        try:
            async with asyncio.timeout(RING_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, self._port, ssl=self._tls)
                try:
                    if self._tls is None:
                        writer.write(b"\x00\r\n\r\n")
                        await reader.read(1)
                finally:
                    writer.close()
        except ssl.SSLError:
            return True
        except (OSError, TimeoutError):
            return False
        return True


async def _beat(descriptor: int, doorbell: Doorbell) -> None:
    """Write once a second that the event loop runs, while connections are taken too."""
    os.set_blocking(descriptor, False)
    while True:
        # Its reader may be gone, or be busy for so long that it is full.
        with contextlib.suppress(OSError):
            if doorbell.answers:
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

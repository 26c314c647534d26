"""Requests over HTTP: Triton's `generate` and `generate_stream` (server-sent events) on httpx."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import httpx

from dflash_client.address import Location
from dflash_client.connection import CONNECT_TIMEOUT_S, Connection, remaining_s
from dflash_client.errors import ClientError, cancelled_here, timed_out
from dflash_client.http_messages import (
    EventParser,
    client_options,
    decode,
    encode,
    model_path,
    readiness,
    refusal,
    transport_error,
)
from dflash_client.request import Request
from dflash_client.responses import Outputs

# Of a read from a socket, whose time `poll` takes in milliseconds in 32 bits: the call's own timer bounds longer ones.
LONGEST_READ_S = 2_000_000.0


class _HttpCall:
    """One attempt of a request: what to send, and how to end it from another thread or task. Its subclasses read the
    responses with `client`, an httpx client.

    Shutting the socket down wakes the thread or task that waits for it, and tells the server that the client is gone.
    """

    def __init__(self, client: Any, request: Request, location: Location, deadline: float) -> None:
        self._client, self._request, self._location, self._deadline = client, request, location, deadline
        self._lock = threading.Lock()
        self._socket: Any = None
        self._end: ClientError | None = None

    def _send(self, trace: Any) -> Any:
        """httpx's context manager of the response; `trace` passes what it gets on to `_on_event`."""
        remaining = remaining_s(self._deadline)
        return self._client.stream(
            "POST",
            model_path(self._request.model, "generate_stream" if self._request.stream else "generate"),
            json=encode(self._request),
            headers=self._request.headers,
            timeout=httpx.Timeout(
                remaining if remaining < LONGEST_READ_S else None, connect=min(CONNECT_TIMEOUT_S, remaining)
            ),
            extensions={"trace": trace},
        )

    def _on_event(self, event: str, info: Mapping[str, Any]) -> None:
        """Take the socket from what httpx tells about the connection."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                if self._end is not None:
                    self._shut_down()

    def cancel(self) -> None:
        """End the call, at the server too."""
        self._finish(cancelled_here())

    def _finish(self, error: ClientError) -> None:
        with self._lock:
            if self._end is None:
                self._end = error
                self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            # It may be closed already, when the call is over.
            with contextlib.suppress(OSError):
                if isinstance(self._socket, ssl.SSLSocket):
                    # `SSLSocket.shutdown` would also remove the TLS layer while another thread reads from it.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                else:
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        """Raise the error that ended the call, if one did."""
        if self._end is not None:
            raise self._end

    def _error(self, error: httpx.TransportError) -> ClientError:
        return self._end or transport_error(error, self._location)

    def _whole(self, body: bytes) -> Outputs:
        """The one response of a request that does not stream."""
        self._check()
        return decode(body)


class HttpCall(_HttpCall):
    """A call of the synchronous client; it has the methods of `GrpcCall`."""

    def responses(self) -> Generator[Outputs, None, None]:
        """Send the request and yield its responses. Raises `ClientError`."""
        self._check()
        # httpx bounds each read; the timer bounds a server that trickles.
        timer = threading.Timer(remaining_s(self._deadline), self._finish, (timed_out(),))
        timer.daemon = True
        timer.start()
        try:
            with self._send(self._on_event) as response:
                if response.status_code != 200:
                    raise refusal(response.status_code, response.read(), self._location)
                if self._request.stream:
                    events = EventParser()
                    for chunk in response.iter_bytes():
                        for event in events.feed(chunk):
                            yield decode(event)
                else:
                    yield self._whole(response.read())
            self._check()
        except httpx.TransportError as error:
            raise self._error(error) from error
        finally:
            timer.cancel()


class AsyncHttpCall(_HttpCall):
    """A call in one event loop."""

    async def responses(self) -> AsyncGenerator[Outputs, None]:
        """Send the request and yield its responses. Raises `ClientError`."""
        self._check()
        left_s = remaining_s(self._deadline)
        timer = asyncio.get_running_loop().call_later(left_s, self._finish, timed_out())
        try:
            async with self._send(self._trace) as response:
                if response.status_code != 200:
                    raise refusal(response.status_code, await response.aread(), self._location)
                if self._request.stream:
                    events = EventParser()
                    async for chunk in response.aiter_bytes():
                        for event in events.feed(chunk):
                            yield decode(event)
                else:
                    yield self._whole(await response.aread())
            self._check()
        except httpx.TransportError as error:
            raise self._error(error) from error
        finally:
            timer.cancel()

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        self._on_event(event, info)


class HttpTransport:
    """How the requests of the synchronous client travel to one server; it has the methods of `GrpcTransport`."""

    def __init__(self, connection: Connection) -> None:
        self._location = connection.location
        self._client = httpx.Client(**client_options(connection))

    def call(self, request: Request, deadline: float) -> HttpCall:
        """A call that ends at `deadline` at the latest; nothing is sent yet."""
        return HttpCall(self._client, request, self._location, deadline)

    def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """Why the model cannot take requests, or None."""
        try:
            return readiness(self._client.get(model_path(model, "ready"), timeout=timeout_s), model, self._location)
        except httpx.TransportError as error:
            return transport_error(error, self._location)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class AsyncHttpTransport:
    """As `HttpTransport`, in one event loop."""

    def __init__(self, connection: Connection) -> None:
        self._location = connection.location
        self._client = httpx.AsyncClient(**client_options(connection))

    def call(self, request: Request, deadline: float) -> AsyncHttpCall:
        """A call that ends at `deadline` at the latest; nothing is sent yet."""
        return AsyncHttpCall(self._client, request, self._location, deadline)

    async def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """Why the model cannot take requests, or None."""
        try:
            response = await self._client.get(model_path(model, "ready"), timeout=timeout_s)
        except httpx.TransportError as error:
            return transport_error(error, self._location)
        return readiness(response, model, self._location)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

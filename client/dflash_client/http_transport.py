"""Requests over HTTP: Triton's `generate` and `generate_stream` (server-sent events) on httpx."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

import httpx

from dflash_client.connection import Connection
from dflash_client.errors import ClientError
from dflash_client.http_messages import (
    EventParser,
    Exchange,
    client_options,
    decode,
    model_path,
    readiness,
    transport_error,
)
from dflash_client.request import Request
from dflash_client.responses import Outputs


class HttpCall:
    """See `Call`."""

    def __init__(self, client: httpx.Client, exchange: Exchange, stream: bool) -> None:
        self._client, self._exchange, self._stream = client, exchange, stream

    def responses(self) -> Generator[Outputs, None, None]:
        """See `Call.responses`."""
        exchange = self._exchange
        exchange.check()
        # httpx bounds each read; a server that trickles is bounded here.
        timer = threading.Timer(exchange.remaining_s, exchange.expire)
        timer.daemon = True
        timer.start()
        try:
            with self._client.stream(**exchange.options(exchange.on_event)) as response:
                if response.status_code != 200:
                    raise exchange.refusal(response.status_code, response.read())
                yield from self._outputs(response)
            exchange.check()
        except httpx.TransportError as error:
            raise exchange.translate(error) from error
        finally:
            timer.cancel()

    def _outputs(self, response: httpx.Response) -> Iterator[Outputs]:
        if not self._stream:
            body = response.read()
            self._exchange.check()
            yield decode(body)
            return
        events = EventParser()
        for chunk in response.iter_bytes():
            for event in events.feed(chunk):
                yield decode(event)

    def cancel(self) -> None:
        """See `Call.cancel`."""
        self._exchange.cancel()


class HttpTransport:
    """Sends to an HTTP endpoint."""

    def __init__(self, connection: Connection) -> None:
        self._location = connection.location
        self._client = httpx.Client(**client_options(connection))

    def call(self, request: Request, deadline: float) -> HttpCall:
        """See `Transport.call`."""
        return HttpCall(self._client, Exchange(request, self._location, deadline), request.stream)

    def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """See `Transport.probe`."""
        try:
            response = self._client.get(model_path(model, "ready"), timeout=timeout_s)
        except httpx.TransportError as error:
            return transport_error(error, self._location)
        return readiness(response, model, self._location)

    def close(self) -> None:
        """See `Transport.close`."""
        self._client.close()

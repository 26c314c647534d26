"""Requests over HTTP with asyncio: as `http_transport`, on httpx's asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

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


class AsyncHttpCall:
    """See `AsyncCall`."""

    def __init__(self, client: httpx.AsyncClient, exchange: Exchange, stream: bool) -> None:
        self._client, self._exchange, self._stream = client, exchange, stream

    async def responses(self) -> AsyncGenerator[Outputs, None]:
        """See `Call.responses`."""
        exchange = self._exchange
        exchange.check()
        timer = asyncio.get_running_loop().call_later(exchange.remaining_s, exchange.expire)
        try:
            async with self._client.stream(**exchange.options(self._trace)) as response:
                if response.status_code != 200:
                    raise exchange.refusal(response.status_code, await response.aread())
                async for outputs in self._outputs(response):
                    yield outputs
            exchange.check()
        except httpx.TransportError as error:
            raise exchange.translate(error) from error
        finally:
            timer.cancel()

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        self._exchange.on_event(event, info)

    async def _outputs(self, response: httpx.Response) -> AsyncGenerator[Outputs, None]:
        if not self._stream:
            body = await response.aread()
            self._exchange.check()
            yield decode(body)
            return
        events = EventParser()
        async for chunk in response.aiter_bytes():
            for event in events.feed(chunk):
                yield decode(event)

    def cancel(self) -> None:
        """See `AsyncCall.cancel`."""
        self._exchange.cancel()


class AsyncHttpTransport:
    """Sends to an HTTP endpoint."""

    def __init__(self, connection: Connection) -> None:
        self._location = connection.location
        self._client = httpx.AsyncClient(**client_options(connection))

    def call(self, request: Request, deadline: float) -> AsyncHttpCall:
        """See `Transport.call`."""
        return AsyncHttpCall(self._client, Exchange(request, self._location, deadline), request.stream)

    async def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """See `Transport.probe`."""
        try:
            response = await self._client.get(model_path(model, "ready"), timeout=timeout_s)
        except httpx.TransportError as error:
            return transport_error(error, self._location)
        return readiness(response, model, self._location)

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._client.aclose()

"""Requests over gRPC with asyncio: as `grpc_transport`, on `grpc.aio`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_client.connection import Connection
from dflash_client.errors import ClientError, cancelled_here, not_ready
from dflash_client.grpc_messages import CHANNEL_OPTIONS, credentials, decode, encode, remaining_s, translate
from dflash_client.request import Request
from dflash_client.responses import Outputs


class AsyncGrpcCall:
    """See `AsyncCall`."""

    def __init__(self, stub: Any, connection: Connection, request: Request, deadline: float) -> None:
        self._stub, self._connection, self._request, self._deadline = stub, connection, request, deadline
        self._stream: Any = None
        self._cancelled = False

    async def responses(self) -> AsyncGenerator[Outputs, None]:
        """See `Call.responses`."""
        if self._cancelled:
            raise cancelled_here()
        self._stream = self._stub.ModelStreamInfer(
            iter([encode(self._request)]), timeout=remaining_s(self._deadline), metadata=self._connection.headers
        )
        try:
            async for message in self._stream:
                yield decode(message)
        except grpc.RpcError as error:
            raise cancelled_here() if self._cancelled else translate(error, self._connection.location) from error
        except asyncio.CancelledError:
            # grpc.aio raises the same for a call that was cancelled as for a task that was.
            if self._cancelled:
                raise cancelled_here() from None
            raise
        finally:
            self._stream.cancel()

    def cancel(self) -> None:
        """See `AsyncCall.cancel`."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class AsyncGrpcTransport:
    """A gRPC channel. Connects with the first request."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        address, tls = connection.location.address, connection.tls
        self._channel = (
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, credentials(tls), options=CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def call(self, request: Request, deadline: float) -> AsyncGrpcCall:
        """See `Transport.call`."""
        return AsyncGrpcCall(self._stub, self._connection, request, deadline)

    async def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """See `Transport.probe`."""
        request, headers = service_pb2.ModelReadyRequest(name=model), self._connection.headers
        try:
            answer = await self._stub.ModelReady(request, timeout=timeout_s, metadata=headers)
        except grpc.RpcError as error:
            return translate(error, self._connection.location)
        return None if answer.ready else not_ready(model, self._connection.location.address)

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._channel.close()

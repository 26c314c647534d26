"""Requests over gRPC: one `ModelStreamInfer` stream for each, on the stubs that `tritonclient` ships.

`tritonclient`'s own streaming client hands responses to a callback in a thread of its own; the stubs give an iterator
that can be cancelled and carries a deadline, which is all that is needed here.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_client.connection import Connection
from dflash_client.errors import ClientError, cancelled_here, not_ready
from dflash_client.grpc_messages import CHANNEL_OPTIONS, credentials, decode, encode, remaining_s, translate
from dflash_client.request import Request
from dflash_client.responses import Outputs


class GrpcCall:
    """See `Call`."""

    def __init__(self, stub: Any, connection: Connection, request: Request, deadline: float) -> None:
        self._stub, self._connection, self._request, self._deadline = stub, connection, request, deadline
        self._stream: Any = None
        self._cancelled = False

    def responses(self) -> Generator[Outputs, None, None]:
        """See `Call.responses`."""
        self._stream = self._stub.ModelStreamInfer(
            iter([encode(self._request)]), timeout=remaining_s(self._deadline), metadata=self._connection.headers
        )
        # `cancel` sets the flag before it looks for the stream: one of the two sees the other.
        if self._cancelled:
            self._stream.cancel()
        try:
            for message in self._stream:
                yield decode(message)
        except grpc.RpcError as error:
            raise cancelled_here() if self._cancelled else translate(error, self._connection.location) from error
        finally:
            self._stream.cancel()

    def cancel(self) -> None:
        """See `Call.cancel`."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class GrpcTransport:
    """A gRPC channel. Connects with the first request."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        address, tls = connection.location.address, connection.tls
        self._channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(address, credentials(tls), options=CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def call(self, request: Request, deadline: float) -> GrpcCall:
        """See `Transport.call`."""
        return GrpcCall(self._stub, self._connection, request, deadline)

    def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """See `Transport.probe`."""
        request, headers = service_pb2.ModelReadyRequest(name=model), self._connection.headers
        try:
            answer = self._stub.ModelReady(request, timeout=timeout_s, metadata=headers)
        except grpc.RpcError as error:
            return translate(error, self._connection.location)
        return None if answer.ready else not_ready(model, self._connection.location.address)

    def close(self) -> None:
        """See `Transport.close`."""
        self._channel.close()

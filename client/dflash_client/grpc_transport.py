"""Requests over gRPC: one `ModelStreamInfer` stream for each, with the messages that `tritonclient` ships.

`tritonclient`'s own streaming client hands responses to a callback in a thread of its own; gRPC's calls are iterators
that can be cancelled and have a deadline, which is all that is needed here.

A stream has one request, so it is called as one with a single request. That needs no thread for requests, and a server
that refuses before it has read the request is heard: grpc.aio reports a stream of requests that breaks so as INTERNAL.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_client.connection import Connection, remaining_s
from dflash_client.delta_stream import DeltaStreams, Inbox
from dflash_client.errors import ClientError, cancelled_here, not_ready, timed_out
from dflash_client.grpc_messages import CHANNEL_OPTIONS, credentials, encode, read_response, translate
from dflash_client.request import Request
from dflash_client.responses import Outputs

# A response of this many bytes is read in a thread.
LARGE_BYTES = 64 * 1024
# How long the end of a channel is waited for.
CLOSE_S = 2.0
# And that of a stream whose request was refused or failed. Triton ends it at once, and where it was cancelled in that
# moment Triton keeps it for ever (see server pull request 8078): its model is never unloaded.
END_S = 1.0


class _GrpcCall:
    """One attempt of a request; its subclasses read the responses, once. Deadlines are in the clock of
    `time.monotonic()`."""

    def __init__(self, stream_infer: Any, connection: Connection, request: Request, deadline: float) -> None:
        self._stream_infer, self._connection = stream_infer, connection
        self._request, self._deadline = request, deadline
        self._stream: Any = None
        self._cancelled = False

    def _open(self, delta_stream: str = "") -> Any:
        """Send the request and return the iterator over its responses. delta_stream: what it names."""
        headers = self._connection.headers + self._request.headers
        message = encode(self._request, delta_stream)
        self._stream = self._stream_infer(message, timeout=remaining_s(self._deadline), metadata=headers)
        # `cancel` sets the flag before it looks for the stream: one of the two sees the other.
        if self._cancelled:
            self._stream.cancel()
        return self._stream

    def _error(self, error: Any) -> ClientError:
        return cancelled_here() if self._cancelled else translate(error, self._connection.location)

    def cancel(self) -> None:
        """End the call, at the server too; from any thread, also before it was sent. What waits for a response gets an
        error. Does nothing when the call has ended."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class GrpcCall(_GrpcCall):
    """A call of the synchronous client."""

    def responses(self) -> Generator[Outputs, None, None]:
        """Send the request and yield its responses. Raises `ClientError`."""
        stream = self._open()
        try:
            for data in stream:
                yield read_response(data)
        except grpc.RpcError as error:
            raise self._error(error) from error
        except ClientError:
            ended = threading.Event()
            if stream.add_callback(ended.set):  # False: it has ended
                ended.wait(END_S)
            raise
        finally:
            stream.cancel()


class AsyncGrpcCall(_GrpcCall):
    """A call in one event loop. delta_streams: where there are some, those that may carry what comes between the first
    response and the last."""

    delta_streams: DeltaStreams | None = None
    _batch: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """End the call, at the server too, also where its last response waits for a batch."""
        super().cancel()
        if self._batch is not None:
            self._batch.cancel()

    async def _next_batch(self, inbox: Inbox) -> None:
        """Wait for a batch more than there are, until the deadline. Raises `ClientError`."""
        # A number, since a batch may come before the task has begun.
        self._batch = asyncio.ensure_future(inbox.stream.wait_for(inbox.stream.num_batches + 1))
        try:
            await asyncio.wait_for(self._batch, remaining_s(self._deadline))
        except TimeoutError:
            raise timed_out() from None

    async def responses(self) -> AsyncGenerator[Outputs, None]:
        """Send the request and yield its responses. Raises `ClientError`."""
        streams = self.delta_streams if self._request.stream else None
        inbox = None if streams is None else streams.join()
        stream = self._open("" if inbox is None else inbox.name)
        try:
            async for outputs in _read(stream) if inbox is None else self._read_both(stream, inbox):
                yield outputs
        except grpc.RpcError as error:
            raise self._error(error) from error
        except asyncio.CancelledError:
            # grpc.aio raises the same for a call that was cancelled as for a task that was.
            if self._cancelled:
                raise cancelled_here() from None
            raise
        except ClientError:
            await asyncio.wait([asyncio.ensure_future(stream.code())], timeout=END_S)
            raise
        finally:
            stream.cancel()
            if inbox is not None:
                inbox.stream.leave(inbox)

    async def _read_both(self, stream: Any, inbox: Inbox) -> AsyncGenerator[Outputs, None]:
        """The responses of a request, and what comes to its inbox: after the first of them, unless it begins there.
        `delta_batches` in a response says how many batches come before it."""
        reading: asyncio.Future[Any] | None = None
        has_begun = False
        try:
            while True:
                if reading is None:
                    reading = asyncio.ensure_future(stream.read())
                    reading.add_done_callback(inbox.wake)
                while True:
                    is_read, has_begun = reading.done(), has_begun or inbox.begins
                    if has_begun and inbox:
                        yield inbox.take()
                    elif is_read:
                        break
                    else:
                        await inbox.wait()
                if (data := reading.result()) is grpc.aio.EOF:
                    return
                reading, outputs = None, await _outputs(data)
                (num_before,) = outputs.get("delta_batches", (0,))
                while inbox.stream.num_batches < num_before:
                    await self._next_batch(inbox)
                    if inbox:
                        yield inbox.take()
                has_begun = True
                yield outputs
        finally:
            if reading is not None and not reading.cancel() and not reading.cancelled():
                reading.exception()  # which asyncio would log where no one has asked


async def _read(stream: Any) -> AsyncGenerator[Outputs, None]:
    """The responses of a request."""
    async for data in stream:
        yield await _outputs(data)


async def _outputs(data: bytes) -> Outputs:
    return await asyncio.to_thread(read_response, data) if len(data) > LARGE_BYTES else read_response(data)


class _GrpcTransport:
    """A gRPC channel, which connects with the first request. `library` is `grpc` or `grpc.aio`."""

    def __init__(self, connection: Connection, library: Any) -> None:
        self._connection = connection
        address, tls = connection.location.address, connection.tls
        self._channel = (
            library.insecure_channel(address, options=CHANNEL_OPTIONS)
            if tls is None
            else library.secure_channel(address, credentials(tls), options=CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream_infer = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            # As bytes: a large one is read beside the event loop.
            response_deserializer=None,
        )

    def _ask_ready(self, model: str, timeout_s: float) -> Any:
        request = service_pb2.ModelReadyRequest(name=model)
        return self._stub.ModelReady(request, timeout=timeout_s, metadata=self._connection.headers)

    def _unready(self, answer: Any, model: str) -> ClientError | None:
        return None if answer.ready else not_ready(model, self._connection.location.address)


class GrpcTransport(_GrpcTransport):
    """How the requests of the synchronous client travel to one server; it has the methods of `HttpTransport`."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, grpc)

    def call(self, request: Request, deadline: float) -> GrpcCall:
        """A call that ends at `deadline` at the latest; nothing is sent yet."""
        return GrpcCall(self._stream_infer, self._connection, request, deadline)

    def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """Why the model cannot take requests, or None."""
        try:
            return self._unready(self._ask_ready(model, timeout_s), model)
        except grpc.RpcError as error:
            return translate(error, self._connection.location)

    def close(self) -> None:
        """Close the channel. gRPC waits until all calls have ended, and for a call that Ctrl-C interrupted as it began
        it would wait without end: after `CLOSE_S` the channel is left to itself."""
        closing = threading.Thread(target=self._channel.close, name="dflash-grpc-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class AsyncGrpcTransport(_GrpcTransport):
    """As `GrpcTransport`, in one event loop."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, grpc.aio)
        self._delta_streams: dict[str, DeltaStreams] = {}

    def call(self, request: Request, deadline: float) -> AsyncGrpcCall:
        """A call that ends at `deadline` at the latest; nothing is sent yet."""
        call = AsyncGrpcCall(self._stream_infer, self._connection, request, deadline)
        call.delta_streams = self._delta_streams.get(request.model)
        return call

    def share_deltas(self, model: str) -> None:
        """Let one stream carry the deltas of all requests for a model."""

        def open_stream(name: str) -> Any:
            message = encode(Request(model, stream=True, delta_stream=name))
            return self._stream_infer(message, metadata=self._connection.headers)

        self._delta_streams[model] = DeltaStreams(open_stream)

    async def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """Why the model cannot take requests, or None."""
        try:
            return self._unready(await self._ask_ready(model, timeout_s), model)
        except grpc.RpcError as error:
            return translate(error, self._connection.location)

    async def close(self) -> None:
        """Close the channel, which ends its calls, delta streams too."""
        await self._channel.close()

"""`DFlashClient` and `AsyncDFlashClient`: the clients that programs and the command line use."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

from dflash_client.address import ProtocolName, parse_url
from dflash_client.connection import Connection, File
from dflash_client.errors import ClientError, RequestTimeout, no_answer
from dflash_client.grpc_aio_transport import AsyncGrpcTransport
from dflash_client.grpc_transport import GrpcTransport
from dflash_client.http_aio_transport import AsyncHttpTransport
from dflash_client.http_transport import HttpTransport
from dflash_client.request import Request
from dflash_client.results import Delta, GenerationResult
from dflash_client.retry import RetryPolicy
from dflash_client.stream import AsyncStream, Plan, Stream
from dflash_client.transport import CONNECT_TIMEOUT_S, AsyncTransport, Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dflash_client.sampling import Sampling

READY_POLL_S = 0.1

Prompt = str | Sequence[int] | None
Messages = Sequence[Mapping[str, Any]] | None


class _Options(TypedDict):
    """What `Connection.build` takes beside the location."""

    headers: Mapping[str, str] | None
    api_key: str | None
    ca_cert: File | None
    client_cert: File | None
    client_key: File | None


class _Endpoint:
    """What both clients hold: which model of which server, and how long and how often to try."""

    def __init__(
        self, url: str, protocol: ProtocolName, model: str, timeout_s: float, retries: int, options: _Options
    ) -> None:
        self.location = parse_url(url, protocol)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s!r}; allowed: seconds, more than 0")
        self.model = model
        self.timeout_s = timeout_s
        self.retry = RetryPolicy(retries)
        self._connection = Connection.build(self.location, **options)

    @property
    def protocol(self) -> ProtocolName:
        """`grpc` or `http`."""
        return self.location.protocol

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return self.location.address

    def _plan(self, stream: bool, prompt: Prompt, messages: Messages, sampling: Mapping[str, Any]) -> Plan:
        return Plan(Request.build(self.model, stream, prompt, messages, sampling), self.timeout_s, self.retry)

    def _why(self, error: ClientError | None, timeout_s: float) -> ClientError | None:
        """A probe's time-out is no request's."""
        return no_answer(self.address, timeout_s) if isinstance(error, RequestTimeout) else error

    def _never_ready(self, timeout_s: float, why: ClientError) -> RequestTimeout:
        return RequestTimeout(
            f"the model '{self.model}' at {self.address} was not ready within {timeout_s:g} s; last: {why}"
        )


class DFlashClient(_Endpoint):
    """A synchronous client of one model. Safe to share between threads; a context manager.

    `url` is `host:port`, or a URL that begins with `grpc://`, `http://`, `grpcs://` or `https://`, which also chooses
    the protocol and, with the `s`, TLS. Without a port it is Triton's usual one, and 443 with TLS. An HTTP URL may have
    the path under which a proxy has the server: `https://host/llm`.

    `timeout_s` bounds each request as a whole: connecting, retries and reading included. Requests that the server did
    not begin (its queue is full, it is stopping, it is not there) are sent again up to `retries` times, after waits
    that grow.

    `headers` go with every request, over gRPC as metadata; `api_key` is the header `Authorization: Bearer ...`. Triton
    checks neither: they are for what stands in front of it. For TLS, `ca_cert` is a PEM file of the certificates to
    trust in place of the usual authorities, `client_cert` and `client_key` are those of this client.

    Raises `ValueError` for arguments that make no sense.
    """

    def __init__(
        self,
        url: str = "localhost",
        protocol: ProtocolName = "grpc",
        model: str = "dflash",
        timeout_s: float = 300.0,
        retries: int = 0,
        *,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        ca_cert: File | None = None,
        client_cert: File | None = None,
        client_key: File | None = None,
    ) -> None:
        options: _Options = {
            "headers": headers,
            "api_key": api_key,
            "ca_cert": ca_cert,
            "client_cert": client_cert,
            "client_key": client_key,
        }
        super().__init__(url, protocol, model, timeout_s, retries, options)
        self._transport: Transport = (
            GrpcTransport(self._connection) if self.protocol == "grpc" else HttpTransport(self._connection)
        )
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def generate(
        self, prompt: Prompt = None, *, messages: Messages = None, **sampling: Unpack[Sampling]
    ) -> GenerationResult:
        """Complete a prompt (text or token ids) or answer chat messages, and wait for the end.

        `sampling` takes the names of the serving contract (`max_tokens=64, temperature=0, stop=["."]`); those that
        are None are not sent. Raises `ClientError`, or `ValueError` for what cannot be sent.
        """
        with self._start(self._plan(False, prompt, messages, sampling)) as stream:
            return GenerationResult.from_deltas(stream)

    def stream(self, prompt: Prompt = None, *, messages: Messages = None, **sampling: Unpack[Sampling]) -> Stream:
        """As `generate`, but yields what is new as it comes. See `Stream` for how to cancel it."""
        return self._start(self._plan(True, prompt, messages, sampling))

    def ready(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
        """Whether the server is there and says that the model can take requests."""
        return self.probe(timeout_s) is None

    def probe(self, timeout_s: float = CONNECT_TIMEOUT_S) -> ClientError | None:
        """As `ready`, but says why not: the error, or None when the model can take requests."""
        return self._why(self._transport.probe(self.model, timeout_s), timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until `ready`. Raises `RequestTimeout`."""
        deadline = time.monotonic() + timeout_s
        while (error := self.probe(min(CONNECT_TIMEOUT_S, timeout_s))) is not None:
            if time.monotonic() + READY_POLL_S > deadline:
                raise self._never_ready(timeout_s, error)
            time.sleep(READY_POLL_S)

    def close(self) -> None:
        """Close the connections; requests that still run are cancelled."""
        for stream in list(self._streams):
            stream.cancel()
        self._transport.close()

    def _start(self, plan: Plan) -> Stream:
        stream = Stream(self._transport, plan)
        self._streams.add(stream)
        return stream

    def __enter__(self) -> DFlashClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncDFlashClient(_Endpoint):
    """As `DFlashClient`, for one event loop; an asynchronous context manager."""

    def __init__(
        self,
        url: str = "localhost",
        protocol: ProtocolName = "grpc",
        model: str = "dflash",
        timeout_s: float = 300.0,
        retries: int = 0,
        *,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        ca_cert: File | None = None,
        client_cert: File | None = None,
        client_key: File | None = None,
    ) -> None:
        options: _Options = {
            "headers": headers,
            "api_key": api_key,
            "ca_cert": ca_cert,
            "client_cert": client_cert,
            "client_key": client_key,
        }
        super().__init__(url, protocol, model, timeout_s, retries, options)
        self._transport: AsyncTransport = (
            AsyncGrpcTransport(self._connection) if self.protocol == "grpc" else AsyncHttpTransport(self._connection)
        )
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    async def generate(
        self, prompt: Prompt = None, *, messages: Messages = None, **sampling: Unpack[Sampling]
    ) -> GenerationResult:
        """As `DFlashClient.generate`. Cancelling the task that waits cancels the request."""
        async with self._start(self._plan(False, prompt, messages, sampling)) as stream:
            deltas: list[Delta] = [delta async for delta in stream]
        return GenerationResult.from_deltas(deltas)

    def stream(self, prompt: Prompt = None, *, messages: Messages = None, **sampling: Unpack[Sampling]) -> AsyncStream:
        """As `DFlashClient.stream`. See `AsyncStream` for how to cancel it."""
        return self._start(self._plan(True, prompt, messages, sampling))

    async def ready(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
        """As `DFlashClient.ready`."""
        return await self.probe(timeout_s) is None

    async def probe(self, timeout_s: float = CONNECT_TIMEOUT_S) -> ClientError | None:
        """As `DFlashClient.probe`."""
        return self._why(await self._transport.probe(self.model, timeout_s), timeout_s)

    async def wait_ready(self, timeout_s: float) -> None:
        """As `DFlashClient.wait_ready`."""
        deadline = time.monotonic() + timeout_s
        while (error := await self.probe(min(CONNECT_TIMEOUT_S, timeout_s))) is not None:
            if time.monotonic() + READY_POLL_S > deadline:
                raise self._never_ready(timeout_s, error)
            await asyncio.sleep(READY_POLL_S)

    async def close(self) -> None:
        """As `DFlashClient.close`."""
        for stream in list(self._streams):
            await stream.aclose()
        await self._transport.close()

    def _start(self, plan: Plan) -> AsyncStream:
        stream = AsyncStream(self._transport, plan)
        self._streams.add(stream)
        return stream

    async def __aenter__(self) -> AsyncDFlashClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

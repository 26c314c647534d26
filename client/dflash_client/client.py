"""`DFlashClient` and `AsyncDFlashClient`: the clients that programs and the command line use."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from dflash_client.address import ProtocolName, parse_url
from dflash_client.connection import CONNECT_TIMEOUT_S, Connection, File, check_timeout, remaining_s
from dflash_client.errors import ClientError, InvalidArgument, RequestTimeout, no_answer
from dflash_client.grpc_transport import AsyncGrpcTransport, GrpcTransport
from dflash_client.http_transport import AsyncHttpTransport, HttpTransport
from dflash_client.request import Request, as_json
from dflash_client.responses import description
from dflash_client.results import Delta, GenerationResult
from dflash_client.retry import RetryPolicy
from dflash_client.stream import AsyncStream, Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dflash_client.sampling import Sampling

READY_POLL_S = 0.1
# A server may load a large drafter, or bring it from the hub first.
SWAP_TIMEOUT_S = 600.0

Prompt = str | Sequence[int] | None
Messages = Sequence[Mapping[str, Any]] | None


AnyStream = TypeVar("AnyStream", Stream, AsyncStream)


class _Client(Generic[AnyStream]):
    """What both clients share: which model of which server, and how long and how often to try.

    A client has its transport for each protocol in `_transports`, and its kind of stream in `_stream_type`.
    """

    _transports: ClassVar[Mapping[ProtocolName, Callable[[Connection], Any]]]
    _stream_type: type[AnyStream]
    _transport: Any

    def __init__(
        self,
        url: str = "localhost",
        protocol: ProtocolName = "grpc",
        model: str = "dflash",
        timeout_s: float | None = 300.0,
        retries: int = 0,
        *,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        ca_cert: File | None = None,
        client_cert: File | None = None,
        client_key: File | None = None,
    ) -> None:
        location = parse_url(url, protocol)
        # `grpc` or `http`, and `host:port` of the server.
        self.protocol, self.address = location.protocol, location.address
        check_timeout(timeout_s)
        self.model = model
        self.timeout_s = timeout_s
        self.retry = RetryPolicy(retries)
        connection = Connection.build(location, headers, api_key, ca_cert, client_cert, client_key)
        self._transport = self._transports[self.protocol](connection)
        self._streams: weakref.WeakSet[AnyStream] = weakref.WeakSet()

    def stream(self, prompt: Prompt = None, *, messages: Messages = None, **sampling: Unpack[Sampling]) -> AnyStream:
        """As `generate`, but yields what is new as it comes. The stream has methods to cancel the request."""
        return self.request(True, prompt, messages, sampling)

    def request(
        self,
        stream: bool,
        prompt: Prompt,
        messages: Messages,
        sampling: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        dumps: Callable[[Any], str] = json.dumps,
    ) -> AnyStream:
        """As `stream`; with `stream` False the server sends its deltas at the end, each completion's in one piece.
        `headers` go with this request alone. `dumps` writes JSON."""
        request = Request.build(self.model, stream, prompt, messages, sampling, headers, dumps)
        return self._send(request, self.timeout_s)

    def _send(self, request: Request, timeout_s: float | None, retry: RetryPolicy | None = None) -> AnyStream:
        started = self._stream_type(self._transport, (request, check_timeout(timeout_s), retry or self.retry))
        self._streams.add(started)
        return started

    def _why(self, error: ClientError | None, timeout_s: float) -> ClientError | None:
        """What `probe` returns: a probe that timed out is a server that does not answer."""
        return no_answer(self.address, timeout_s) if isinstance(error, RequestTimeout) else error

    def _question(self, timeout_s: float) -> AnyStream:
        """A request that the model answers with its description when it takes requests. Triton 2.51 calls a model ready
        for as long as its process lives, also while its engine is being restarted."""
        return self._send(Request(self.model, stream=False, describe=True), timeout_s, RetryPolicy(0))

    def _swap(self, draft_model: str, admin_key: str, timeout_s: float, options: Mapping[str, Any]) -> AnyStream:
        wanted = as_json({"draft_model": draft_model, "admin_key": admin_key, **options}, "request")
        # Once: a drafter of which an engine dies would end another one with each attempt.
        return self._send(Request(self.model, stream=False, swap_drafter=wanted), timeout_s, RetryPolicy(0))

    def _never_ready(self, timeout_s: float, why: ClientError) -> RequestTimeout:
        return RequestTimeout(
            f"the model '{self.model}' at {self.address} was not ready within {timeout_s:g} s; last: {why}"
        )


class DFlashClient(_Client[Stream]):
    """A synchronous client of one model. Safe to share between threads; a context manager.

    `url` is `host:port`, or a URL that begins with `grpc://`, `http://`, `grpcs://` or `https://`, which also chooses
    the protocol and, with the `s`, TLS. Without a port it is Triton's usual one, and 443 with TLS. An HTTP URL may have
    the path under which a proxy has the server: `https://host/llm`.

    `timeout_s` bounds each request as a whole: connecting, retries and reading included; None is no bound. Requests
    that the server did not begin (its queue is full, it is stopping, it is not there) are sent again up to `retries`
    times, after waits that grow.

    `headers` go with every request, over gRPC as metadata; `api_key` is the header `Authorization: Bearer ...`. Triton
    checks neither: they are for a proxy in front of it. For TLS, `ca_cert` is a PEM file of the certificates to
    trust in place of the usual authorities, `client_cert` and `client_key` are those of this client.

    Raises `ValueError` for arguments that make no sense.
    """

    _transports: ClassVar = {"grpc": GrpcTransport, "http": HttpTransport}
    _stream_type = Stream
    _transport: GrpcTransport | HttpTransport

    def generate(
        self, prompt: Prompt = None, *, messages: Messages = None, **sampling: Unpack[Sampling]
    ) -> GenerationResult:
        """Complete a prompt (text or token ids) or answer chat messages, and wait for the end.

        `sampling` takes the server's sampling parameters (`max_tokens=64, temperature=0, stop=["."]`); those that
        are None are not sent. Raises `ClientError`, or `ValueError` for what cannot be sent.
        """
        with self.request(False, prompt, messages, sampling) as stream:
            return GenerationResult.from_deltas(stream)

    def describe(self, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """What the server says of its model: `max_model_len`, `vocab_size`, where its tokenizer is, and more. Raises
        `ClientError`."""
        with self._send(Request(self.model, stream=False, describe=True), timeout_s) as stream:
            return description("".join(delta.text for delta in stream))

    def swap_drafter(
        self, draft_model: str, admin_key: str, *, timeout_s: float = SWAP_TIMEOUT_S, **options: Any
    ) -> dict[str, Any]:
        """Have the server draft with another drafter from now on, and wait until it does: a folder at the server or a
        hub id. admin_key: that of the server's `admin_key_file`. options: `draft_revision`; `window`, verified blocks
        after which its acceptance is compared (1000; 0: never), and `max_loss`, the part that may be lost (0.1), else
        the old one comes back. The request is sent once, whatever `retries` is. Returns `outcome`, `message` and
        `num_engines`. Raises `ClientError`."""
        with self._swap(draft_model, admin_key, timeout_s, options) as stream:
            return description("".join(delta.text for delta in stream))

    def ready(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
        """Whether the server is there and the model takes requests now."""
        return self.probe(timeout_s) is None

    def probe(self, timeout_s: float = CONNECT_TIMEOUT_S) -> ClientError | None:
        """As `ready`, but says why not: the error, or None when the model can take requests."""
        deadline = time.monotonic() + timeout_s
        if (error := self._transport.probe(self.model, timeout_s)) is None:
            try:
                with self._question(remaining_s(deadline)) as answer:
                    list(answer)
            except InvalidArgument:
                pass  # a model of another kind, which has no such input
            except ClientError as refused:
                error = refused
        return self._why(error, timeout_s)

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

    def __enter__(self) -> DFlashClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncDFlashClient(_Client[AsyncStream]):
    """As `DFlashClient`, for one event loop; an asynchronous context manager.

    With `share_deltas`, for many requests at once: over gRPC, what is new in all of them comes together, in one message
    in place of one for each request, from servers that have delta streams (docs/clients.md).
    """

    _transports: ClassVar = {"grpc": AsyncGrpcTransport, "http": AsyncHttpTransport}
    _stream_type = AsyncStream
    _transport: AsyncGrpcTransport | AsyncHttpTransport

    def __init__(self, *args: Any, share_deltas: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        if share_deltas and isinstance(self._transport, AsyncGrpcTransport):
            self._transport.share_deltas(self.model)

    async def generate(
        self, prompt: Prompt = None, *, messages: Messages = None, **sampling: Unpack[Sampling]
    ) -> GenerationResult:
        """As `DFlashClient.generate`. Cancelling the task that waits cancels the request."""
        async with self.request(False, prompt, messages, sampling) as stream:
            deltas: list[Delta] = [delta async for delta in stream]
        return GenerationResult.from_deltas(deltas)

    async def describe(self, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """As `DFlashClient.describe`."""
        async with self._send(Request(self.model, stream=False, describe=True), timeout_s) as stream:
            return description("".join([delta.text async for delta in stream]))

    async def swap_drafter(
        self, draft_model: str, admin_key: str, *, timeout_s: float = SWAP_TIMEOUT_S, **options: Any
    ) -> dict[str, Any]:
        """As `DFlashClient.swap_drafter`."""
        async with self._swap(draft_model, admin_key, timeout_s, options) as stream:
            return description("".join([delta.text async for delta in stream]))

    async def ready(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
        """As `DFlashClient.ready`."""
        return await self.probe(timeout_s) is None

    async def probe(self, timeout_s: float = CONNECT_TIMEOUT_S) -> ClientError | None:
        """As `DFlashClient.probe`."""
        deadline = time.monotonic() + timeout_s
        if (error := await self._transport.probe(self.model, timeout_s)) is None:
            try:
                async with self._question(remaining_s(deadline)) as answer:
                    async for _ in answer:
                        pass
            except InvalidArgument:
                pass  # a model of another kind, which has no such input
            except ClientError as refused:
                error = refused
        return self._why(error, timeout_s)

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

    async def __aenter__(self) -> AsyncDFlashClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

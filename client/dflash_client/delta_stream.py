"""A delta stream: one gRPC stream on which the server sends what is new in many requests together.

A message costs server, network and client the same whether it has the delta of one request or of all. The stream is
opened with the first request, and once the server has acknowledged one, requests name it. Their last responses and
errors come on streams of their own, so cancelling one, deadlines and errors are as without it. A server
on this machine writes to a Unix socket instead, which costs a fraction; the gRPC stream then says that it is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

from dflash_client.errors import ClientError, ConnectionLost
from dflash_client.grpc_messages import read_response
from dflash_client.responses import Outputs

# A server without delta streams is not asked again for so long.
REFUSED_S = 60.0
# Of a Unix socket without a file: the prefix of its name, and what its last batches have to come, in seconds, when the
# gRPC stream has ended before.
SOCKET_PREFIX = "\0dflash-deltas/"
LAST_S = 1.0


class Inbox:
    """What has come for one request and was not read yet. However much that is, it is read as one delta."""

    def __init__(self, stream: DeltaStream, key: str) -> None:
        self.stream, self.key = stream, key
        self._entries: list[list[Any]] = []
        self._news = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def name(self) -> str:
        """The input of the request that has this inbox."""
        return f"{self.stream.name}/{self.key}"

    @property
    def begins(self) -> bool:
        """Whether the answer begins with what is here, and not with a response."""
        return bool(self._entries) and len(self._entries[0]) > 4

    def put(self, entry: list[Any]) -> None:
        """Add an entry of a batch: key, text, token ids, steps where they were asked for, and whether it is the first
        of its request."""
        self._entries.append(entry)
        self.wake()

    def wake(self, _: Any = None) -> None:
        """End `wait`."""
        self._news.set()

    async def wait(self) -> None:
        """Until there is an entry or `wake` is called."""
        self._news.clear()
        await self._news.wait()

    def take(self) -> Outputs:
        """The outputs of all entries that are here, at least one."""
        entries, self._entries = self._entries, []
        ids = [token_id for entry in entries for token_id in entry[2]]
        outputs: dict[str, list[Any]] = {
            "text_output": ["".join([entry[1] for entry in entries])],
            # The end of an answer comes with a response of its own.
            "finish_reason": ["None"],
            "num_output_tokens": [len(ids)],
            "token_ids": ids,
        }
        if len(entries[0]) > 3 and entries[0][3] is not None:
            outputs["steps"] = [json.dumps([step for entry in entries for step in entry[3]])]
        return outputs


class _Connection(asyncio.Protocol):
    """A connection to the socket of a delta stream: its batches, each its length in 4 bytes, little-endian, then
    JSON."""

    def __init__(self, batches: SocketBatches) -> None:
        self._batches = batches
        self._data = bytearray()
        self._is_server = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        asked = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", asked)
        self._is_server = user == os.geteuid() and self._batches.begin(transport)
        if not self._is_server:
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._data += data
        at = 0
        while len(self._data) >= (begin := at + 4):
            end = begin + int.from_bytes(self._data[at:begin], "little")
            if len(self._data) < end:
                break
            self._batches.take(json.loads(self._data[begin:end]))
            at = end
        del self._data[:at]

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_server:
            self._batches.end()


class SocketBatches:
    """The batches that a server on this machine writes to a Unix socket, by its one connection."""

    def __init__(self, take: Callable[[list[list[Any]]], None], on_end: Callable[[], None]) -> None:
        """take: gets each batch. on_end: is called when the server has closed the connection."""
        self.take, self._on_end = take, on_end
        self._server: asyncio.Server | None = None
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.Event()

    async def listen(self, name: str) -> None:
        """Wait for the server that is told this stream's name; for none where the system has no such sockets."""
        if sys.platform != "linux":
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(SOCKET_PREFIX + name)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listener)
        except OSError:
            listener.close()

    def begin(self, transport: asyncio.BaseTransport) -> bool:
        """Whether this is the server's connection, the first one of this user."""
        if self._transport is not None:
            return False
        self._transport = transport
        if self._server is not None:
            self._server.close()
        return True

    def end(self) -> None:
        """The server has closed its connection."""
        self._ended.set()
        self._on_end()

    async def rest(self) -> None:
        """Wait until the batches that are on their way have come."""
        if self._transport is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self._ended.wait()

    def close(self) -> None:
        """Take no batch any more."""
        if self._server is not None:
            self._server.close()
        if self._transport is not None:
            self._transport.close()


class DeltaStream:
    """One delta stream, in one event loop. is_open: the server has acknowledged it. has_ended: no batch comes any more.
    num_batches: those that have come."""

    def __init__(self, call: Callable[[str], Any]) -> None:
        """call: opens a stream of a name at the server, and returns the iterator over its responses as bytes."""
        # By chance: who knew a name could read what others are answered.
        self.name = secrets.token_urlsafe(24)
        self.num_batches = 0
        self.is_open = self.has_ended = False
        self._keys = map(str, itertools.count())
        self._inboxes: dict[str, Inbox] = {}
        self._next_batch = asyncio.Event()
        self._responses: Any = None
        self._reading = asyncio.create_task(self._read(call))

    def join(self) -> Inbox:
        """An inbox for a request that begins."""
        inbox = Inbox(self, next(self._keys))
        self._inboxes[inbox.key] = inbox
        return inbox

    def leave(self, inbox: Inbox) -> None:
        """Drop the inbox of a request that has ended."""
        self._inboxes.pop(inbox.key, None)

    async def wait_for(self, num_batches: int) -> None:
        """Wait until this many batches have come. Raises `ConnectionLost` when the stream has ended or ends before."""
        while self.num_batches < num_batches:
            if self.has_ended:
                raise ConnectionLost("the stream that carried the deltas of this request broke; send it again")
            await self._next_batch.wait()

    async def _read(self, call: Callable[[str], Any]) -> None:
        batches = SocketBatches(self._take, self._cancel)
        await batches.listen(self.name)
        try:
            # Requests have errors of their own, and a server without such streams answers as it always has.
            with contextlib.suppress(grpc.RpcError, ClientError):
                self._responses = call(self.name)
                async for data in self._responses:
                    self._take(json.loads(read_response(data)["text_output"][0]))
            await batches.rest()
        finally:
            batches.close()
            self._cancel()
            self.has_ended = True
            self._wake()

    def _cancel(self) -> None:
        if self._responses is not None:
            self._responses.cancel()

    def _take(self, batch: list[list[Any]]) -> None:
        """An empty one is the acknowledgement."""
        if not batch:
            self.is_open = True
            return
        self.num_batches += 1
        for entry in batch:
            if (inbox := self._inboxes.get(entry[0])) is not None:
                inbox.put(entry)
        self._wake()

    def _wake(self) -> None:
        self._next_batch.set()
        self._next_batch = asyncio.Event()


class DeltaStreams:
    """The delta streams of one connection, one at a time: the server ends one that no request has named for a while."""

    def __init__(self, call: Callable[[str], Any]) -> None:
        self._call = call
        self._refused_at = -REFUSED_S
        self._is_known = False
        self._stream: DeltaStream | None = None

    def join(self) -> Inbox | None:
        """An inbox for a request that begins; None while the server has acknowledged no stream yet. A later stream may
        be named before it is open: the server looks for it when it has something to send."""
        now, stream = time.monotonic(), self._stream
        if stream is not None and (stream.is_open or stream.has_ended):
            self._is_known = stream.is_open
        if stream is not None and stream.has_ended:
            if not stream.is_open:
                self._refused_at = now
            stream = None
        if stream is None and now - self._refused_at >= REFUSED_S:
            stream = DeltaStream(self._call)
        self._stream = stream
        return stream.join() if stream is not None and self._is_known else None

"""A delta stream: one gRPC stream on which the server sends what is new in many requests together.

A message costs server, network and client the same whether it has the delta of one request or of all. The stream is
opened with the first request, and once the server has acknowledged one, requests name it. Their first and last
responses and errors come on streams of their own, so cancelling one, deadlines and errors are as without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import grpc

from dflash_client.errors import ClientError, ConnectionLost
from dflash_client.grpc_messages import read_response
from dflash_client.responses import Outputs

# A server without delta streams is not asked again for so long.
REFUSED_S = 60.0


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

    def put(self, entry: list[Any]) -> None:
        """Add an entry of a batch: key, text, token ids, and steps where they were asked for."""
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
            "num_output_tokens": [len(ids)],
            "token_ids": ids,
        }
        if len(entries[0]) > 3:
            outputs["steps"] = [json.dumps([step for entry in entries for step in entry[3]])]
        return outputs


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
        # Requests have errors of their own, and a server without such streams answers as it always has.
        with contextlib.suppress(grpc.RpcError, ClientError):
            responses = call(self.name)
            try:
                async for data in responses:
                    self._take(json.loads(read_response(data)["text_output"][0]))
            finally:
                responses.cancel()
                self.has_ended = True
                self._wake()

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

"""Delta streams: one stream of responses that carries what steps add to many requests of one client.

A response costs stub, server, gRPC and client some hundred microseconds, whatever it holds. A client with many
requests, such as a front end, opens a stream by a request whose only input is `delta_stream`, a name of its choice, and
sends that name with its other requests. What a step adds to all of these then leaves as one batch, their first tokens
too. Last responses and errors travel as without it; `delta_batches` says in them how many batches come before, since
two streams have no order.

A client on this machine listens on a Unix socket named after its stream, and batches go there: they skip Triton's
server and gRPC, which cost more than all else that a small batch takes.

A stream ends when no request has named it for a while: Triton waits for it when it unloads the model. Requests whose
stream is not there, or no more, are answered on their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

import msgspec

from dflash_backend.text.output import RequestState
from dflash_backend.triton.log import Log
from dflash_backend.triton.responder import Responder, SendFailed
from dflash_backend.triton.responses import ResponseBuilder
from dflash_backend.triton.submission import Refused

IDLE_S = 1.0
LOOK_S = 0.25
MOST_STREAMS = 1024
# Of a Unix socket without a file: the prefix of its name, and what may wait for its reader, in bytes.
SOCKET_PREFIX = "\0dflash-deltas/"
MOST_WAITING = 64 << 20
_ENCODER = msgspec.json.Encoder()


class DeltaSocket:
    """The socket of a client on this machine, to which batches are written: of each its length in 4 bytes,
    little-endian, then JSON. Nothing waits for its reader."""

    def __init__(self, name: str) -> None:
        """Connect. Raises `OSError` or `ValueError` where no process of this user listens under the stream's name."""
        self.waiting = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.connect(SOCKET_PREFIX + name)
            _, user, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.geteuid():
                raise PermissionError("another user listens there")
        except (OSError, ValueError):
            self._socket.close()
            raise

    def send(self, batch: bytes) -> None:
        """Write a batch, or keep it until its reader has read those before. Raises `SendFailed`: it will not arrive."""
        if len(self.waiting) + len(batch) > MOST_WAITING:
            raise SendFailed(f"its client does not read: {len(self.waiting)} bytes wait for it")
        self.waiting += len(batch).to_bytes(4, "little") + batch
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as its reader takes it. Raises `SendFailed`."""
        try:
            while self.waiting:
                del self.waiting[: self._socket.send(self.waiting)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise SendFailed(f"its client's socket broke: {error.strerror}") from error

    def close(self) -> None:
        """What was written arrives; what still waits does not, as the client sees by the number of batches."""
        self._socket.close()


class DeltaStream:
    """One that is open. num_batches: those that were sent. socket: where they go; None: they are responses."""

    def __init__(self, name: str, responder: Responder) -> None:
        self.name, self.responder = name, responder
        self.num_batches = 0
        self.idle_since: float | None = None
        self.socket: DeltaSocket | None = None
        with contextlib.suppress(OSError, ValueError):
            self.socket = DeltaSocket(name)


def entry(state: RequestState, is_first: bool) -> list[Any]:
    """What is new in a request of one completion, for a batch: the request's key, text, token ids or their number where
    no ids were asked for, and steps where they were. is_first: it had no response; this is a fifth element."""
    completion, returns = state.completions[0], state.parsed.returns
    assert state.parsed.delta_stream is not None
    ids = completion.token_ids if returns.token_ids else len(completion.token_ids)
    fields = [state.parsed.delta_stream[1], "".join(completion.text), ids]
    steps = completion.steps if returns.steps else None
    if is_first:
        return [*fields, steps, True]
    return fields if steps is None else [*fields, steps]


class DeltaStreams:
    """Those that are open. Triton's thread calls `open`, the output thread all else."""

    def __init__(self, responses: ResponseBuilder, log: Log) -> None:
        self._responses, self._log = responses, log
        self._streams: dict[str, DeltaStream] = {}
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, name: str, responder: Responder) -> None:
        """Open a stream. Raises `Refused` for a name that is in use, and where very many are open."""
        if len(self._streams) >= MOST_STREAMS:
            raise Refused("UNAVAILABLE", f"{MOST_STREAMS} delta streams are open already; try again later")
        if name in self._streams:
            raise Refused("INVALID_ARGUMENT", "a delta stream of this name is open; choose another name, by chance")
        try:
            # An empty batch, before all others, tells the client that there are such streams here.
            responder.send(self._responses.description("[]"), final=False)
        except SendFailed as error:
            self._log.error(str(error))
            responder.end()
            return
        self._streams[name] = DeltaStream(name, responder)

    def of(self, state: RequestState) -> DeltaStream | None:
        """The stream of a request's next deltas; None where it names none that is open."""
        named = state.parsed.delta_stream
        return None if named is None else self._streams.get(named[0])

    def send(self, stream: DeltaStream, entries: list[list[Any]]) -> int:
        """Send a batch; the bytes of its text that the server keeps. Raises `SendFailed`, after which the stream is
        closed."""
        batch = _ENCODER.encode(entries)
        num_bytes = 0
        try:
            if stream.socket is not None:
                stream.socket.send(batch)
            else:
                response = self._responses.description(batch.decode())
                stream.responder.send(response, final=False)
                num_bytes = response.num_bytes
        except SendFailed:
            self.close(stream)
            raise
        stream.num_batches += 1
        return num_bytes

    def is_due(self, now: float) -> bool:
        """Whether `look` is to be called."""
        return bool(self._streams) and now - self._looked_at >= LOOK_S

    def look(self, now: float, running: Iterable[RequestState]) -> None:
        """Close the streams whose client has gone, and those that no running request names."""
        self._looked_at = now
        named = {state.parsed.delta_stream[0] for state in running if state.parsed.delta_stream}
        for stream in list(self._streams.values()):
            if stream.name in named or (stream.socket is not None and stream.socket.waiting):
                stream.idle_since = None
            elif stream.idle_since is None:
                stream.idle_since = now
            if (stream.idle_since is not None and now - stream.idle_since >= IDLE_S) or self._has_gone(stream):
                self.close(stream)

    def _has_gone(self, stream: DeltaStream) -> bool:
        try:
            if stream.socket is not None:
                stream.socket.flush()
            return stream.responder.is_cancelled()
        except SendFailed as error:
            self._log.error(str(error))
            return True

    def largest(self) -> DeltaStream | None:
        """The one that was sent the most; None where none is open."""
        return max(list(self._streams.values()), key=lambda stream: stream.responder.num_bytes_sent, default=None)

    def close(self, stream: DeltaStream) -> None:
        """End a stream. What it was sent arrives, but for what waits for a reader of its socket."""
        self._streams.pop(stream.name, None)
        if stream.socket is not None:
            stream.socket.close()
        stream.responder.end()

    def close_all(self) -> None:
        """End all of them."""
        for stream in list(self._streams.values()):
            self.close(stream)

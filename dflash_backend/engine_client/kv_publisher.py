"""Publishes what enters and leaves an engine's prefix cache over ZeroMQ, in vLLM's format, for routers of servers.

A message has three frames: the topic, a sequence number (8 bytes, big-endian, from 0) and a batch in msgpack. A batch
is `[time, [event, ...], data_parallel_rank]`; events are

    ["BlockStored", hashes, parent hash or nil, token ids, block size, nil, medium, nil]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

The medium is "GPU" for the device's cache, also on a CPU; of blocks in a KV tier, which are stored without parent and
tokens, "CPU" or "DISK". What a tier has stays when the device loses it, and the other way round.

A hash is the last 8 bytes of ours as an unsigned number. Who has missed messages sends the first number that it wants
to the replay endpoint (a REQ or DEALER socket: an empty frame, 8 bytes) and gets what is still kept as
(topic, number, batch), ended by (empty, the number -1, empty). After vLLM's `distributed/kv_events.py`.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from dflash_backend.config import EngineConfig
from dflash_backend.messages import BlocksStored, KVEvent

# Batches that can be replayed.
KEPT_BATCHES = 10_000
# Batches that may wait for a subscriber that reads slowly; it misses further ones.
HIGH_WATER_MARK = 100_000
# How long until an address that another process has is tried again.
BIND_RETRY_S = 1.0
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# Names that begin with @ have no file, and the system refuses a second bind.
_IPC = re.compile(r"^ipc://([^@].*)$")
_TCP = re.compile(r"^(tcp://.+:)(\d+)$")


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of the engine with this number: of TCP the port is higher by it, as vLLM's is."""
    if not rank or not endpoint:
        return endpoint
    if found := _TCP.match(endpoint):
        return f"{found[1]}{int(found[2]) + rank}"
    return f"{endpoint}_dp{rank}"


def event_endpoints(config: EngineConfig) -> list[str]:
    """Where each engine publishes; empty without `kv_events_endpoint`."""
    ranks = range(config.data_parallel_size if config.kv_events_endpoint else 0)
    return [at_rank(config.kv_events_endpoint, rank) for rank in ranks]


def make_publishers(config: EngineConfig, log: Callable[[str], None]) -> list[KVEventPublisher]:
    """A publisher for each engine, or none without `kv_events_endpoint`."""
    replay, topic = config.kv_events_replay_endpoint, config.kv_events_topic
    return [
        KVEventPublisher(endpoint, at_rank(replay, rank), topic, rank, log)
        for rank, endpoint in enumerate(event_endpoints(config))
    ]


class KVEventPublisher:
    """One engine's events. `publish`, `clear` and `close` are for one thread; a thread of its own has the sockets."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, rank: int, log: Callable[[str], None]) -> None:
        """Without a `replay_endpoint` nothing is replayed. `log` is called once when an address is in use; it is tried
        again for ever, since an instance of the model that is being replaced may have it."""
        self._topic, self._rank, self._log = topic.encode(), rank, log
        self._context = zmq.Context()
        self._batches, inbox_end = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for end in (self._batches, inbox_end):
            end.set_hwm(0)
        self._batches.linger = 0
        self._batches.bind(inbox := "inproc://batches")
        # Here and not by the thread: until a socket is connected, and once none is, sending would wait.
        inbox_end.connect(inbox)
        # Addresses that were in use, and of which the log knows.
        self._said: set[str] = set()
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._ended = threading.Event()
        arguments = (inbox_end, endpoint, replay_endpoint)
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"dflash-kv-events-{rank}", daemon=True)
        self._thread.start()
        self.clear()

    def publish(self, events: Sequence[KVEvent], block_size: int) -> None:
        """Publish the events of one or more steps, in order. Never waits. block_size: tokens of a block."""
        self._send([_as_vllm(event, block_size) for event in events])

    def clear(self) -> None:
        """The engine's cache is empty: it has just started, or is gone."""
        self._send([["AllBlocksCleared"]])

    def close(self) -> None:
        """Send what is due, then close the sockets."""
        self._ended.set()
        self._put(b"")
        self._thread.join()
        self._context.destroy(linger=0)

    def _send(self, events: list[Any]) -> None:
        self._put(msgspec.msgpack.encode([time.time(), events, self._rank]))

    def _put(self, batch: bytes) -> None:
        """Give it to the thread, unless that has ended."""
        with contextlib.suppress(zmq.Again):
            self._batches.send(batch, zmq.NOBLOCK)

    def _run(self, batches: zmq.Socket[bytes], endpoint: str, replay_endpoint: str) -> None:
        """The thread: until `close`. Without its address it keeps what can be replayed, and no more."""
        public: zmq.Socket[bytes] | None = None
        replay: zmq.Socket[bytes] | None = None
        poller = zmq.Poller()
        poller.register(batches, zmq.POLLIN)
        next_try = time.monotonic()
        while public is not None or not self._ended.is_set():
            waits = public is None or (replay is None and bool(replay_endpoint))
            if waits and time.monotonic() >= next_try:
                public = public or self._bind(zmq.PUB, endpoint)
                if replay is None and replay_endpoint and (replay := self._bind(zmq.ROUTER, replay_endpoint)):
                    poller.register(replay, zmq.POLLIN)
                next_try = time.monotonic() + BIND_RETRY_S
            ready = dict(poller.poll(int(BIND_RETRY_S * 1000) if waits else None))
            if replay is not None and replay in ready:
                self._replay(replay)
            if batches in ready and not self._publish(batches, public):
                break
        for each in filter(None, (batches, public, replay)):
            # A subscriber in this machine gets the last batch.
            each.close(linger=200)

    def _publish(self, batches: zmq.Socket[bytes], public: zmq.Socket[bytes] | None) -> bool:
        """Publish a batch, or without an address keep it for the replay; False at the end."""
        if not (batch := batches.recv()):
            return False
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._kept.append((number, batch))
        if public is not None:
            public.send_multipart((self._topic, number, batch))
        return True

    def _replay(self, replay: zmq.Socket[bytes]) -> None:
        """Answer one request for earlier batches; one that is malformed is ignored."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client = frames[0]
        for number, batch in self._kept:
            if number >= frames[2]:
                replay.send_multipart((client, b"", self._topic, number, batch))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes] | None:
        """A socket at the endpoint; None while that is taken, which is said once."""
        made: zmq.Socket[bytes] | None = None
        try:
            made = self._context.socket(kind)
            made.set_hwm(HIGH_WATER_MARK)
            if _has_listener(endpoint):
                raise zmq.ZMQError(errno.EADDRINUSE)
            made.bind(endpoint)
        except zmq.ZMQError as error:
            if made is not None:
                made.close(linger=0)
            if endpoint not in self._said:
                self._said.add(endpoint)
                self._log(
                    f"KV events cannot be published at {endpoint} ({error.strerror}), which is tried again every "
                    f"{BIND_RETRY_S:g} s: free it, or correct kv_events_endpoint or kv_events_replay_endpoint"
                )
            return None
        return made


def _has_listener(endpoint: str) -> bool:
    """Whether a process listens at an ipc endpoint: ZeroMQ would take its file away and bind without an error."""
    found = _IPC.match(endpoint)
    if found is None:
        return False
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(found[1])
    except BlockingIOError:
        return True  # its queue of connections is full
    except OSError:
        return False  # what else may be wrong with it is for the bind to say
    return True


def _as_vllm(event: KVEvent, block_size: int) -> list[Any]:
    hashes = [_number(block_hash) for block_hash in event.block_hashes]
    if isinstance(event, BlocksStored):
        parent = None if event.parent is None else _number(event.parent)
        return ["BlockStored", hashes, parent, event.token_ids, block_size, None, event.medium, None]
    return ["BlockRemoved", hashes, event.medium]


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")

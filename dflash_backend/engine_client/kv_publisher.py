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
import re
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
        """The thread: until `close`."""
        public = self._bind(zmq.PUB, endpoint)
        replay = self._bind(zmq.ROUTER, replay_endpoint) if replay_endpoint else None
        poller = zmq.Poller()
        for socket in filter(None, (batches, replay)):
            poller.register(socket, zmq.POLLIN)
        while public is not None:
            ready = dict(poller.poll())
            if replay is not None and replay in ready:
                self._replay(replay)
            if batches in ready and not self._publish(batches, public):
                break
        for socket in filter(None, (batches, public, replay)):
            # A subscriber in this machine gets the last batch.
            socket.close(linger=200)

    def _publish(self, batches: zmq.Socket[bytes], public: zmq.Socket[bytes]) -> bool:
        """Publish a batch; False at the end."""
        if not (batch := batches.recv()):
            return False
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._kept.append((number, batch))
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
        """A socket at the endpoint, as soon as that is free; None when `close` came first."""
        socket = self._context.socket(kind)
        socket.set_hwm(HIGH_WATER_MARK)
        has_said = False
        while not self._ended.is_set():
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                if not has_said:
                    self._log(
                        f"KV events cannot be published at {endpoint} ({error.strerror}), which is tried again every "
                        f"{BIND_RETRY_S:g} s: free it, or correct kv_events_endpoint or kv_events_replay_endpoint"
                    )
                has_said = True
                self._ended.wait(BIND_RETRY_S)
            else:
                return socket
        socket.close(linger=0)
        return None


def _as_vllm(event: KVEvent, block_size: int) -> list[Any]:
    hashes = [_number(block_hash) for block_hash in event.block_hashes]
    if isinstance(event, BlocksStored):
        parent = None if event.parent is None else _number(event.parent)
        return ["BlockStored", hashes, parent, event.token_ids, block_size, None, event.medium, None]
    return ["BlockRemoved", hashes, event.medium]


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")

"""A rank that may run on another machine than rank 0: its end of the network."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import dataclass

import zmq

from dflash_backend.config import ConfigError
from dflash_backend.parallel.network_sum import NetworkSum
from dflash_backend.parallel.rank import log_to_stderr, run, sums_of
from dflash_backend.parallel.rank_channel import Endpoint
from dflash_backend.parallel.rank_links import NETWORK_SILENCE_S
from dflash_backend.parallel.rank_messages import RankReady, RemoteRank

LAST_WORDS_MS = 1000
"""How long the last message may take to leave."""


@dataclass(frozen=True)
class RankAddress:
    """Where a rank takes passes. node: in words, for errors. key: its public key."""

    host: str
    port: int
    key: bytes
    node: str


class RemoteRankProcess:
    """`open`, then `run` in the same process."""

    def __init__(self) -> None:
        self._endpoint = Endpoint()

    def open(self, host: str, node: str, engine_key: bytes) -> RankAddress:
        """Take passes at this address of the machine, from the process with that key alone."""
        self._host = host
        self._endpoint.known.keys.add(engine_key)
        self._passes, port = self._endpoint.bind(host)
        return RankAddress(host, port, self._endpoint.keys.public, node)

    def run(self, remote: RemoteRank) -> None:
        """Load, and run passes until rank 0 is gone, with which this process ends."""
        log_to_stderr(remote.setup)
        to_engine, ended = self._endpoint.connect(remote.host, remote.beats_port, remote.engine_key, NETWORK_SILENCE_S)
        threading.Thread(target=_end_with, args=(ended,), name="engine-watch", daemon=True).start()
        shard = remote.setup.shard
        network_sum = NetworkSum(shard)

        def join() -> None:
            network_sum.join(self._host, remote.host, remote.sums_port)

        rank_zero = _RemoteRankZero(shard.rank, self._passes, to_engine)
        try:
            sums, gpu_join = sums_of(remote.setup, lambda: network_sum)
            run(remote.setup, rank_zero, sums, gpu_join or join)
        except ConfigError as error:
            rank_zero.send(RankReady(str(error)))
        finally:
            to_engine.close(linger=LAST_WORDS_MS)


class _RemoteRankZero:
    """Rank 0, over the network."""

    def __init__(self, rank: int, passes: zmq.Socket[bytes], to_engine: zmq.Socket[bytes]) -> None:
        self._rank = rank
        self._passes = passes
        self._to_engine = to_engine
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        with self._lock:
            try:
                self._to_engine.send(pickle.dumps((self._rank, message)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise OSError(str(error)) from error

    def receive(self) -> bytes:
        return self._passes.recv()


def _end_with(ended: zmq.Socket[bytes]) -> None:
    """Wait for the end of the connection to rank 0, then end this process, whatever it is doing."""
    try:
        ended.recv()
    except zmq.ZMQError:  # the process ends anyway
        return
    os._exit(1)

"""Ranks that may run on other machines: passes by ZeroMQ with keys, sums by gloo."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import zmq

from dflash_backend.parallel import links
from dflash_backend.parallel.alike import RankFiles
from dflash_backend.parallel.channel import Endpoint
from dflash_backend.parallel.links import (
    BEAT_S,
    CAUSE_S,
    HANG_S,
    NETWORK_SILENCE_S,
    Beat,
    RankFailed,
    RankReady,
    RankSetup,
    Reduce,
    RemoteRank,
    StartFailure,
    call_together,
    cause_of,
    polled_for,
)
from dflash_backend.parallel.nccl import GpuSum
from dflash_backend.parallel.rank import log_to_stderr, start
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.sums import NetworkSum

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
        self._endpoint.known_keys.add(engine_key)
        self._passes, port = self._endpoint.bind(host)
        return RankAddress(host, port, self._endpoint.public_key, node)

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
            start(remote.setup, rank_zero, lambda: network_sum, join)
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


GONE = "it has ended, or its machine does not answer any more; the log says why"


class Launcher(Protocol):
    """What starts processes of ranks on machines. host: this machine's address, by which they reach it."""

    host: str

    def num_beside(self, rank: int) -> int:
        """As `RankLinks.num_beside`."""

    def device_index(self, rank: int) -> int:
        """As `RankLinks.device_index`."""

    def open(self, num_ranks: int, engine_key: bytes) -> list[RankAddress]:
        """Start a process for each rank, which takes passes from the process with that key. Raises `ConfigError`."""

    def run(self, setups: Sequence[RemoteRank]) -> None:
        """Let each rank load and serve."""

    def ended(self, rank: int) -> str:
        """Why the process of a rank has ended, in words; empty while it is not known to have."""

    def end(self) -> None:
        """End them all. It may be called twice."""


class RemoteRanks:
    """As `RankLinks`. The thread that watches receives; sending is for the engine's."""

    def __init__(self, shard: Shard, launcher: Launcher) -> None:
        self.lost = ""
        self._ended = False
        self._gpu_sum: GpuSum | None = None
        self._network_sum = NetworkSum(shard, lambda: self.lost, lambda: cause_of(self))
        self.reduce: Reduce = self._network_sum
        self._num_others = shard.size - 1
        self._launcher = launcher
        self._endpoint = Endpoint()
        self._beats, self._beats_port = self._endpoint.bind(launcher.host)
        self._poller = zmq.Poller()
        self._poller.register(self._beats, zmq.POLLIN)
        self._addresses: list[RankAddress] = []
        self._passes: list[zmq.Socket[bytes]] = []
        # The sockets by which a rank's connection is known to have ended, with its number.
        self._ends: dict[zmq.Socket[bytes], int] = {}
        self._started: dict[int, str] = {}  # which ranks have loaded, or why they cannot
        self._watching: threading.Thread | None = None

    def sum_by(self, gpu_sum: GpuSum) -> None:
        self.reduce = self._gpu_sum = gpu_sum

    def start(self, setups: Sequence[RankSetup]) -> None:
        port = 0 if self._gpu_sum is not None else self._network_sum.serve_store(self._launcher.host)
        key = self._endpoint.public_key
        files = RankFiles.here(setups[0].spec.path)
        setups = [replace(setup, files=files) for setup in setups]
        self._addresses = self._launcher.open(len(setups), key)
        for rank, address in enumerate(self._addresses, 1):
            self._endpoint.known_keys.add(address.key)
            passes, ended = self._endpoint.connect(address.host, address.port, address.key, NETWORK_SILENCE_S)
            self._passes.append(passes)
            self._ends[ended] = rank
            self._poller.register(ended, zmq.POLLIN)
        self._launcher.run([RemoteRank(setup, self._launcher.host, self._beats_port, key, port) for setup in setups])

    def num_beside(self, rank: int) -> int:
        return self._launcher.num_beside(rank)

    def device_index(self, rank: int) -> int:
        return self._launcher.device_index(rank)

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self._addresses[rank - 1].node}"

    def start_failure(self) -> StartFailure | None:
        silence_s = links.START_SILENCE_S
        last = dict.fromkeys(range(1, self._num_others + 1), time.monotonic())
        while len(self._started) < self._num_others:
            heard = self._receive_events()
            last |= dict.fromkeys(heard, time.monotonic())
            for rank, at in last.items():
                if words := self._started.get(rank, ""):
                    return StartFailure(rank, words)
                if reason := self._launcher.ended(rank) or (rank == self._ended_rank() and GONE):
                    words = self._last_words(rank)
                    return StartFailure(rank, words or reason, is_lost=not words)
                if time.monotonic() - at > silence_s:
                    return StartFailure(rank, f"it has said nothing for {silence_s:g} s", is_lost=True)
        return None

    def _receive_events(self) -> set[int]:
        """Note what ranks say of their start, waiting up to a beat for the first of it. Returns those that spoke."""
        messages = self._receive()
        for rank, message in messages:
            if isinstance(message, RankReady | RankFailed):
                self._started[rank] = message.error
        return {rank for rank, _ in messages}

    def _last_words(self, rank: int) -> str:
        """Why a rank that has ended did not load: it says so on a connection of its own, which may be slower than the
        end. Empty where it said nothing."""
        deadline = time.monotonic() + CAUSE_S
        while rank not in self._started and time.monotonic() < deadline:
            self._receive_events()
        return self._started.get(rank, "")

    def serve(self) -> None:
        self._watching = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watching.start()
        call_together(self)
        if self._gpu_sum is not None:
            self._gpu_sum.join(lambda: self.lost)
        else:
            self._network_sum.join(self._launcher.host)

    def send(self, data: bytes) -> None:
        for passes in self._passes:
            try:
                passes.send(data, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise OSError(str(error)) from error

    def end(self) -> None:
        self._ended = True
        self.lost = self.lost or "the engine has ended"
        self._launcher.end()
        watching = self._watching
        if watching is not None and watching.is_alive():
            if watching is threading.current_thread():
                return  # a socket is closed by its own thread, or with the process
            watching.join(2 * BEAT_S)
        self._endpoint.close()

    def _watch(self) -> None:
        silence = dict.fromkeys(range(1, self._num_others + 1), 0.0)
        polled = time.monotonic()
        while not self.lost:
            messages = self._receive()
            passed, polled = polled_for(polled)
            for rank in silence:
                silence[rank] += passed
            for rank, message in messages:
                silence[rank] = 0.0
                if isinstance(message, RankFailed):
                    self.lost = self.lost or f"{self.name(rank)} failed: {message.error}"
            if rank := self._ended_rank():
                # The heartbeats end a connection too, and then the beats have been missing as long.
                is_silent = silence[rank] > NETWORK_SILENCE_S - BEAT_S
                how = f"has not answered for {NETWORK_SILENCE_S:g} s" if is_silent else "has ended"
                self.lost = self.lost or f"{self.name(rank)} {how}"
            for rank, seconds in silence.items():
                if seconds > HANG_S:
                    self.lost = self.lost or f"{self.name(rank)} has not answered for {HANG_S:g} s"
        self._launcher.end()
        if self._gpu_sum is not None and not self._ended:
            self._gpu_sum.abort()

    def _receive(self) -> list[tuple[int, Beat | RankReady | RankFailed]]:
        """What ranks have said, waiting up to a beat for the first of it, or for the end of a connection."""
        messages = []
        ready = dict(self._poller.poll(int(BEAT_S * 1000)))
        for ended in ready.keys() & self._ends.keys():
            self._poller.unregister(ended)  # it would end each wait from now on
        if self._beats in ready:
            while self._beats.poll(0):
                messages.append(pickle.loads(self._beats.recv()))
        return messages

    def _ended_rank(self) -> int:
        """A rank whose connection has ended; 0 if none is known to have."""
        return next((rank for ended, rank in self._ends.items() if ended.poll(0)), 0)

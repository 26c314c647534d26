"""The other ranks as processes of this machine, with sums in memory that they share."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from dflash_backend.parallel import links
from dflash_backend.parallel.links import (
    BEAT_S,
    HANG_S,
    Beat,
    LocalRank,
    RankFailed,
    RankReady,
    RankSetup,
    Reduce,
    StartFailure,
    call_together,
    polled_for,
)
from dflash_backend.parallel.nccl import GpuSum
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.sums import SharedSum, sum_memory


class LocalRanks:
    """As `RankLinks`."""

    def __init__(self, shard: Shard) -> None:
        self.lost = ""
        self._ended = False
        self._gpu_sum: GpuSum | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._size = shard.size
        self._memory = sum_memory(shard.size)
        self.reduce: Reduce = SharedSum(self._memory, shard, lambda: self.lost)

    def sum_by(self, gpu_sum: GpuSum) -> None:
        self.reduce = self._gpu_sum = gpu_sum

    def start(self, setups: Sequence[RankSetup]) -> None:
        for setup in setups:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "dflash_backend.parallel.rank_process"]
            with theirs:
                self.processes.append(
                    subprocess.Popen(command, stdin=theirs.fileno(), stdout=2, pass_fds=(self._memory,))
                )
            self._connections.append(Connection(ours.detach()))
            with suppress(OSError):  # `start_failure` says that it has ended
                self._connections[-1].send_bytes(pickle.dumps(LocalRank(setup, self._memory, os.getpid())))
        os.close(self._memory)  # each process has it mapped, or has its own descriptor

    def num_beside(self, rank: int) -> int:
        return self._size

    def device_index(self, rank: int) -> int:
        return rank

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def start_failure(self) -> StartFailure | None:
        silence_s, loaded = links.START_SILENCE_S, set[int]()
        last = dict.fromkeys(range(1, self._size), time.monotonic())
        while len(loaded) < len(last):
            ready = wait(self._connections, BEAT_S)
            now = time.monotonic()
            for rank, connection in enumerate(self._connections, 1):
                if connection in ready:
                    last[rank] = now
                    try:
                        message = pickle.loads(connection.recv_bytes())
                    except (EOFError, OSError):
                        return StartFailure(rank, "it ended; the log says why", is_lost=True)
                    if isinstance(message, RankReady | RankFailed):
                        loaded.add(rank)
                        if message.error:
                            return StartFailure(rank, message.error)
                elif now - last[rank] > silence_s:
                    return StartFailure(rank, f"it has said nothing for {silence_s:g} s", is_lost=True)
        return None

    def serve(self) -> None:
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        call_together(self)
        if self._gpu_sum is not None:
            self._gpu_sum.join(lambda: self.lost)

    def send(self, data: bytes) -> None:
        for connection in self._connections:
            connection.send_bytes(data)

    def end(self) -> None:
        self._ended = True
        self.lost = self.lost or "the engine has ended"
        for process in self.processes:
            with suppress(OSError):
                process.kill()
        for process in self.processes:
            process.wait()

    def _watch(self) -> None:
        silence = dict.fromkeys(range(len(self._connections)), 0.0)
        polled = time.monotonic()
        while not self.lost:
            ready = wait(self._connections, BEAT_S)
            passed, polled = polled_for(polled)
            for index, connection in enumerate(self._connections):
                if connection in ready:
                    self.lost = self.lost or self._end_of(index + 1, connection)
                    silence[index] = 0.0
                    continue
                silence[index] += passed
                if silence[index] > HANG_S:
                    self.lost = f"{self.name(index + 1)} has not answered for {HANG_S:g} s"
        was_ended = self._ended
        self.end()
        if self._gpu_sum is not None and not was_ended:
            self._gpu_sum.abort()

    def _end_of(self, rank: int, connection: Connection) -> str:
        """Why a rank that has something to say has ended, empty when it lives."""
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return f"{self.name(rank)} has ended"
        return "" if isinstance(message, Beat) else f"{self.name(rank)} failed: {message.error}"

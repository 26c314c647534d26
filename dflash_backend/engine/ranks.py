"""Starts the other ranks of a shared target, gives them the passes of rank 0, and notices when one is lost."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.quantised import target_kv_dtype
from dflash_backend.models.parallel import Reduce, Shard, SharedPass, unsupported

BEAT_S = 0.5
"""How often a rank says that it lives."""
HANG_S = 4.0
"""The longest silence of a rank that serves."""
CAUSE_S = 1.0
"""How long a rank's end may take to show once a sum with it has failed."""
CONNECT_S = 60.0
"""How long ranks that have loaded may take to find one another."""
# Above what any pass takes: a rank that hangs is noticed by its silence.
PASS_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class RankSetup:
    """What a rank must know to start. spec: of the whole target. meeting: a file by which ranks find one another."""

    shard: Shard
    spec: TargetSpec
    max_positions: int
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    num_threads: int
    log_level: str
    meeting: str
    parent: int


@dataclass(frozen=True)
class RankReady:
    """A rank has loaded its part. error: why it has not, for the operator."""

    error: str = ""


@dataclass(frozen=True)
class Beat:
    """A rank lives."""


def check_tensor_parallel(config: EngineConfig, spec: TargetSpec, device: torch.device) -> None:
    """Raises `ConfigError` for what cannot be served with `tensor_parallel_size` ranks, with what can."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    reason = unsupported(spec, size)
    if device.type != "cpu":
        reason = "on a GPU the ranks cannot run yet: set device=cpu, or 1 for one GPU"
    elif config.attention_backend not in (None, "torch"):
        reason = f"attention_backend is '{config.attention_backend}', and ranks run 'torch' alone: set that, or auto"
    elif config.batch_invariant:
        reason = "sums over ranks are not batch-invariant: turn batch_invariant off, or take 1"
    elif load_quantization(spec.path) is not None:
        reason = "quantised weights cannot be read by slice yet: take a checkpoint that is not quantised, or 1"
    if reason is not None:
        raise ConfigError(
            f"setting 'tensor_parallel_size' is {size}, which the target in {spec.path} cannot have: {reason}"
        )


def group_sum(meeting: str, shard: Shard) -> Reduce:
    """The sum over all ranks, by gloo over loopback. Returns when all ranks have come. Its result is the same to the
    bit on each rank, since each number is summed in one place."""
    store = dist.FileStore(meeting, shard.size)
    store.set_timeout(timedelta(seconds=CONNECT_S))
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=PASS_TIMEOUT_S)
    group = gloo(store, shard.rank, shard.size, options)

    def reduce(x: torch.Tensor) -> torch.Tensor:
        group.allreduce([x]).wait()
        return x

    reduce(torch.zeros(1))
    return reduce


@dataclass
class _Links:
    """The processes of the other ranks, and what speaks to them. lost: why they were ended."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    folder: str = ""
    lost: str = ""

    def end(self) -> None:
        """End all ranks and remove what they leave. It may be called twice, and by a thread that watches."""
        for process in self.processes:
            with suppress(OSError):
                process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def watch(self) -> None:
        """Until a rank is lost: then end all, so that rank 0's sum with them fails at once."""
        last = dict.fromkeys(range(len(self.connections)), time.monotonic())
        while not self.lost:
            ready = wait(self.connections, BEAT_S)
            now = time.monotonic()
            for index, connection in enumerate(self.connections):
                if connection in ready:
                    try:
                        connection.recv_bytes()
                    except (EOFError, OSError):
                        self.lost = self.lost or f"rank {index + 1} has ended"
                    last[index] = now
                elif now - last[index] > HANG_S:
                    self.lost = f"rank {index + 1} has not answered for {HANG_S:g} s"
        self.end()


class RankGroup:
    """The other ranks of this process, which is rank 0. They end with this object, or with this process."""

    def __init__(self, size: int, num_cores: int) -> None:
        """num_cores: those that all ranks share."""
        self.shard = Shard(0, size)
        self.num_threads = max(1, num_cores // size)
        self._links = _Links(folder=tempfile.mkdtemp(prefix="dflash-ranks-"))
        self._reduce: Reduce | None = None
        self._end = weakref.finalize(self, _end, self._links)

    def start(
        self, spec: TargetSpec, max_positions: int, num_blocks: int, config: EngineConfig, dtype: torch.dtype
    ) -> None:
        """Start the ranks, which load their parts meanwhile."""
        for rank in range(1, self.shard.size):
            setup = RankSetup(
                Shard(rank, self.shard.size),
                spec,
                max_positions,
                num_blocks,
                config.kv_block_size,
                dtype,
                target_kv_dtype(config),
                self.num_threads,
                config.log_level,
                self._meeting,
                os.getpid(),
            )
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "dflash_backend.engine.rank"]
            with theirs:
                self._links.processes.append(subprocess.Popen(command, stdin=theirs.fileno(), stdout=2))
            self._links.connections.append(Connection(ours.detach()))
            with suppress(OSError):  # `connect` says that it has ended
                self._links.connections[-1].send_bytes(pickle.dumps(setup))

    def connect(self) -> None:
        """Wait until all ranks have loaded. Raises `ConfigError` when one has not."""
        for rank, connection in enumerate(self._links.connections, 1):
            error = "it ended; the log says why"
            with suppress(EOFError, OSError):
                while isinstance(message := pickle.loads(connection.recv_bytes()), Beat):
                    pass
                error = message.error
            if error:
                self._end()
                raise ConfigError(f"rank {rank} of {self.shard.size} could not start: {error}")
        self._reduce = group_sum(self._meeting, self.shard)
        shutil.rmtree(self._links.folder, ignore_errors=True)  # all have met
        threading.Thread(target=self._links.watch, name="rank-watch", daemon=True).start()

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks. Raises `RuntimeError` when one is lost."""
        assert self._reduce is not None, "not connected"
        try:
            return self._reduce(x)
        except RuntimeError as error:
            raise RuntimeError(self._cause() or str(error)) from error

    def send(self, step: SharedPass) -> None:
        """Give a pass to all other ranks. Raises `RuntimeError` when one is lost."""
        if self._links.lost:
            raise RuntimeError(self._links.lost)
        data = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
        try:
            for connection in self._links.connections:
                connection.send_bytes(data)
        except OSError as error:
            raise RuntimeError(self._cause() or f"a rank has ended ({error})") from error

    def _cause(self) -> str:
        """Which rank is lost, once something has failed: that may show before its end does. Empty when none is."""
        deadline = time.monotonic() + CAUSE_S
        while not self._links.lost and time.monotonic() < deadline:
            time.sleep(CAUSE_S / 50)
        return self._links.lost

    @property
    def pids(self) -> Sequence[int]:
        """The processes of the other ranks."""
        return [process.pid for process in self._links.processes]

    @property
    def _meeting(self) -> str:
        return str(Path(self._links.folder) / "ranks")


def _end(links: _Links) -> None:
    links.lost = links.lost or "the engine has ended"
    links.end()

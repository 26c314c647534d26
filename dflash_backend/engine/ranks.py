"""Starts the other ranks of a shared target, gives them the passes of rank 0, and notices when one is lost."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch

from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.quantised import target_kv_dtype
from dflash_backend.engine.rank_messages import Beat, RankSetup, packed
from dflash_backend.engine.recurrent import num_states
from dflash_backend.engine.sums import SharedSum, sum_memory
from dflash_backend.models.parallel import SharedPass
from dflash_backend.models.recurrent_state import StateChange
from dflash_backend.models.shard import Shard, unsupported

BEAT_S = 0.5
"""How often a rank says that it lives."""
HANG_S = 10.0
"""The longest silence of a rank that serves. With more work than cores it may be seconds without a fault."""
START_SILENCE_S = 120.0
"""The longest silence of a rank that starts: Python and torch are loaded before it speaks."""
CAUSE_S = 1.0
"""How long a rank's end may take to show once a sum with it has failed."""


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
    if reason is not None:
        raise ConfigError(
            f"setting 'tensor_parallel_size' is {size}, which the target in {spec.path} cannot have: {reason}"
        )


@dataclass
class _Links:
    """The processes of the other ranks, and what speaks to them. lost: why they were ended."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    lost: str = ""

    def end(self) -> None:
        """End all ranks. It may be called twice, and by a thread that watches."""
        for process in self.processes:
            with suppress(OSError):
                process.kill()
        for process in self.processes:
            process.wait()

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


@dataclass
class Traffic:
    """What rank 0 has sent: passes, and bytes of messages to all other ranks."""

    num_passes: int = 0
    message_bytes: int = 0


class RankGroup:
    """The other ranks of this process, which is rank 0. They end with this object, or with this process."""

    def __init__(self, size: int, num_threads: int) -> None:
        """num_threads: of an operation, in each rank."""
        self.shard = Shard(0, size)
        self.num_threads = num_threads
        self._links = links = _Links()
        self._memory = sum_memory(size)
        self.reduce = SharedSum(self._memory, self.shard, lambda: links.lost)
        self.traffic = Traffic()
        self._end = weakref.finalize(self, _end, links)

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
                num_states(config),
                config.kv_block_size,
                config.quantization == "fp8",
                config.batch_invariant,
                dtype,
                target_kv_dtype(config),
                self.num_threads,
                config.log_level,
                self._memory,
                os.getpid(),
            )
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "dflash_backend.engine.rank"]
            with theirs:
                self._links.processes.append(
                    subprocess.Popen(command, stdin=theirs.fileno(), stdout=2, pass_fds=(self._memory,))
                )
            self._links.connections.append(Connection(ours.detach()))
            with suppress(OSError):  # `connect` says that it has ended
                self._links.connections[-1].send_bytes(pickle.dumps(setup))
        os.close(self._memory)  # each process has it mapped, or has its own descriptor

    def connect(self) -> None:
        """Wait until all ranks have loaded. Raises `ConfigError` when one has not."""
        for rank, connection in enumerate(self._links.connections, 1):
            if error := _start_error(connection):
                self._end()
                raise ConfigError(f"rank {rank} of {self.shard.size} could not start: {error}")
        threading.Thread(target=self._links.watch, name="rank-watch", daemon=True).start()

    def send(self, step: SharedPass | StateChange) -> None:
        """Give a pass, or a change of states, to all other ranks. Raises `RuntimeError` when one is lost."""
        if self._links.lost:
            raise RuntimeError(self._links.lost)
        data = packed(step)
        self.traffic.num_passes += isinstance(step, SharedPass)
        self.traffic.message_bytes += len(data) * len(self._links.connections)
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


def _start_error(connection: Connection) -> str:
    """Wait until the rank has loaded; why it has not, empty when it has."""
    try:
        while connection.poll(START_SILENCE_S):
            message = pickle.loads(connection.recv_bytes())
            if not isinstance(message, Beat):
                return str(message.error)
    except (EOFError, OSError):
        return "it ended; the log says why"
    return f"it has said nothing for {START_SILENCE_S:g} s"


def _end(links: _Links) -> None:
    links.lost = links.lost or "the engine has ended"
    links.end()

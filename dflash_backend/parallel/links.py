"""What rank 0 has of the other ranks, wherever they run, and what they say to each other."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash_backend.attention import Requirements
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.parallel.alike import RankFiles
from dflash_backend.parallel.nccl import GpuSum
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.vocabulary import Sums

BEAT_S = 0.5
"""How often a rank says that it lives."""
HANG_S = 10.0
"""The longest silence of a rank that serves. With more work than cores it may be seconds without a fault."""
NETWORK_SILENCE_S = 3.5
"""How long another machine may leave ZeroMQ's heartbeats without an answer. Its I/O thread answers them, so a rank that
is busy, even one that holds the interpreter lock, is not silent."""
START_SILENCE_S = 120.0
"""The longest silence of a rank that starts: Python and torch are loaded before it speaks."""
CAUSE_S = 1.0
"""How long a rank's end may take to show once a sum with it has failed."""


def polled_for(since: float) -> tuple[float, float]:
    """Seconds of a poll for what ranks say, which began at `since` and waits up to a beat; and the time now. Where it
    took longer, this process did not run, as in a container that was paused with all of its ranks, and that is no
    silence of theirs."""
    now = time.monotonic()
    return min(now - since, 2 * BEAT_S), now


@dataclass(frozen=True)
class StartFailure:
    """A rank does not start. words: why, for the operator. is_lost: whether it has ended or is silent without a word of
    its own, as one that was killed: to start it again may help then."""

    rank: int
    words: str
    is_lost: bool = False


class Reduce(Sums, Protocol):
    """num_bytes: of all terms that this rank has given."""

    num_bytes: int


class RankLinks(Protocol):
    """The other ranks, numbered from 1. lost: why they were ended, empty while they serve."""

    lost: str

    @property
    def reduce(self) -> Reduce:
        """The sum over all ranks, once they serve."""

    def sum_by(self, gpu_sum: GpuSum) -> None:
        """Let `reduce` be that one, as of ranks on GPUs."""

    def start(self, setups: Sequence[RankSetup]) -> None:
        """Start a rank for each, which loads its part. Raises `ConfigError` where they cannot be started."""

    def num_beside(self, rank: int) -> int:
        """How many ranks share the machine of one, itself among them. Rank 0 is this process."""

    def device_index(self, rank: int) -> int:
        """Which of the GPUs that its process sees a rank runs on."""

    def name(self, rank: int) -> str:
        """For errors: its number, and where it runs if that is another machine."""

    def start_failure(self) -> StartFailure | None:
        """Wait until all ranks have loaded, or until the first of them cannot."""

    def serve(self) -> None:
        """All have loaded: watch them from now on, and end all once one is lost, so that rank 0's sum with them fails.
        Raises `RuntimeError` when sums cannot be taken."""

    def send(self, data: bytes) -> None:
        """Give it to all. Raises `OSError` when one has gone."""

    def end(self) -> None:
        """End all ranks. It may be called twice."""


def cause_of(links: RankLinks) -> str:
    """Which rank is lost, once something has failed: that may show before its end does. Empty when none is."""
    deadline = time.monotonic() + CAUSE_S
    while not links.lost and time.monotonic() < deadline:
        time.sleep(CAUSE_S / 50)
    return links.lost


@dataclass(frozen=True)
class RankSetup:
    """What a rank must know to load.

    spec: of the whole target. num_states: slots of recurrent states, where it has some. fp8: weights are those that FP8
    would hold. attention, needs: by which rank 0 has selected its attention backend, with the dtypes of weights and KV.
    shard, device: which part the rank has, and where it runs.

    files: what rank 0's machine has, where a rank may be on another one; None: the same.

    `RankGroup` adds the rest. weight_bytes: of all models. num_sharers: how many processes share the cores of the
    rank's machine, itself among them. kernels: what rank 0's products are computed by (`alike.kernels_of`), where the
    target has experts, which each rank chooses; else empty. nccl_id: by which ranks on GPUs find each other, empty on
    CPUs.
    """

    spec: TargetSpec
    max_positions: int
    num_blocks: int
    num_states: int
    block_size: int
    fp8: bool
    log_level: str
    attention: str | None
    needs: Requirements
    shard: Shard
    device: torch.device
    files: RankFiles | None = None
    weight_bytes: int = 0
    num_sharers: int = 1
    kernels: str = ""
    nccl_id: bytes = b""


@dataclass(frozen=True)
class LocalRank:
    """A rank on rank 0's machine. memory: a file descriptor, where sums are taken. parent: rank 0's process."""

    setup: RankSetup
    memory: int
    parent: int


@dataclass(frozen=True)
class RemoteRank:
    """A rank that may run on another machine. host: rank 0's address. beats_port: where it takes what ranks say.
    engine_key: its public key. sums_port: where ranks find each other for sums."""

    setup: RankSetup
    host: str
    beats_port: int
    engine_key: bytes
    sums_port: int


@dataclass(frozen=True)
class Join:
    """To a rank: all have loaded, so meet the others now. It waits for this, since they wait for it only so long."""


@dataclass(frozen=True)
class RankReady:
    """A rank has loaded its part. error: why it has not, for the operator."""

    error: str = ""


@dataclass(frozen=True)
class Beat:
    """A rank lives."""


@dataclass(frozen=True)
class RankFailed:
    """A rank's last words: why it ends."""

    error: str


class _Pickler(pickle.Pickler):
    """Tensors as arrays: of a view only what it shows, and in a tenth of the time that torch's own way takes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def packed(message: object) -> bytes:
    """A message as bytes, from which `pickle.loads` makes it. Its tensors are on the host, of a type that numpy has."""
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(message)
    return out.getvalue()


def call_together(links: RankLinks) -> None:
    """Have all ranks meet, since all have loaded. Raises `RuntimeError` when one has ended."""
    try:
        links.send(packed(Join()))
    except OSError as error:
        raise RuntimeError(f"a rank has ended ({error})") from error


class HostMessages:
    """Messages with all that is in them, tensors of the host too."""

    def send(self, message: object, send: Callable[[bytes], None]) -> int:
        data = packed(message)
        send(data)
        return len(data)

"""What rank 0 and the other ranks say to each other."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dflash_backend.attention import Requirements
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.parallel.shard import Shard


@dataclass(frozen=True)
class RankSetup:
    """What a rank must know to load.

    spec: of the whole target. num_states: slots of recurrent states, where it has some. fp8: weights are those that FP8
    would hold. attention, needs: by which rank 0 has selected its attention backend, with the dtypes of weights and KV.
    dependent_launch: the setting `enable_dependent_launch`. shard, device: which part the rank has, and where it runs.

    `RankGroup` adds the rest. weight_bytes: of all models. num_sharers: how many processes share the cores of the
    rank's machine, itself among them. nccl_id: by which ranks on GPUs find each other, empty on CPUs.
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
    dependent_launch: bool
    shard: Shard
    device: torch.device
    weight_bytes: int = 0
    num_sharers: int = 1
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


class HostMessages:
    """Messages with all that is in them, tensors of the host too."""

    def send(self, message: object, send: Callable[[bytes], None]) -> int:
        """As `DeviceMessages.send`."""
        data = packed(message)
        send(data)
        return len(data)

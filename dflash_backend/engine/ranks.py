"""The other ranks of a shared target, as rank 0 has them: it starts them, gives them its passes, and ends with them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch

from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.device import num_rank_threads
from dflash_backend.engine.local_ranks import LocalRanks
from dflash_backend.engine.quantised import target_kv_dtype
from dflash_backend.engine.rank_links import RankLinks, cause_of
from dflash_backend.engine.rank_messages import RankSetup, packed
from dflash_backend.engine.ray_ranks import ray_ranks
from dflash_backend.engine.recurrent import num_states
from dflash_backend.models.parallel import Shared, SharedPass
from dflash_backend.models.shard import Shard, unsupported


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
class Traffic:
    """What rank 0 has sent: passes, and bytes of messages to all other ranks."""

    num_passes: int = 0
    message_bytes: int = 0


class RankGroup:
    """The other ranks of this process, which is rank 0. They end with this object, or with this process."""

    def __init__(self, links: RankLinks, size: int, weight_bytes: int, splits_vocabulary: bool = False) -> None:
        """links: of a group of `size` ranks. weight_bytes: of all models. splits_vocabulary: as of `Shard`."""
        self.shard = Shard(0, size, splits_vocabulary)
        self.links = links
        self._weight_bytes = weight_bytes
        self.reduce = links.reduce
        self.traffic = Traffic()
        self._end = weakref.finalize(self, links.end)

    @classmethod
    def of(cls, config: EngineConfig, weight_bytes: int, splits_vocabulary: bool = False) -> RankGroup:
        """The ranks that the settings ask for. Raises `ConfigError` when they cannot run where they should."""
        size = config.tensor_parallel_size
        links = ray_ranks(size) if config.distributed_executor == "ray" else LocalRanks(Shard(0, size))
        return cls(links, size, weight_bytes, splits_vocabulary)

    def start(
        self, spec: TargetSpec, max_positions: int, num_blocks: int, config: EngineConfig, dtype: torch.dtype
    ) -> None:
        """Start the ranks, which load their parts meanwhile. Raises `ConfigError` where they cannot be started."""
        self.links.start(
            [
                RankSetup(
                    replace(self.shard, rank=rank),
                    spec,
                    max_positions,
                    num_blocks,
                    num_states(config),
                    config.kv_block_size,
                    config.quantization == "fp8",
                    config.batch_invariant,
                    dtype,
                    target_kv_dtype(config),
                    self._weight_bytes,
                    self._num_sharers(config, rank),
                    config.log_level,
                )
                for rank in range(1, self.shard.size)
            ]
        )

    def num_threads(self, config: EngineConfig) -> int:
        """Of an operation in this process."""
        return num_rank_threads(self._weight_bytes, self._num_sharers(config, 0))

    def _num_sharers(self, config: EngineConfig, rank: int) -> int:
        """How many processes share the cores of a rank's machine: the other engines' are taken to be there too."""
        return self.links.num_beside(rank) * config.data_parallel_size

    def connect(self) -> None:
        """Wait until all ranks have loaded. Raises `ConfigError` when one says that it cannot, so that a person has to
        change something, and `RuntimeError` when one is lost."""
        for rank in range(1, self.shard.size):
            what = f"{self.links.name(rank)} of {self.shard.size} could not start"
            try:
                words = self.links.start_error(rank)
            except RuntimeError as error:
                self._end()
                raise RuntimeError(f"{what}: {error}") from None
            if words:
                self._end()
                raise ConfigError(f"{what}: {words}")
        try:
            self.links.serve()
        except RuntimeError as error:
            cause = cause_of(self.links)
            self._end()
            raise RuntimeError(f"the {self.shard.size} ranks could not start: {cause or error}") from error

    @property
    def lost(self) -> str:
        """Why a rank is lost, empty while none is."""
        return self.links.lost

    def send(self, step: Shared) -> None:
        """Give it to all other ranks. Raises `RuntimeError` when one is lost."""
        if self.links.lost:
            raise RuntimeError(self.links.lost)
        data = packed(step)
        self.traffic.num_passes += isinstance(step, SharedPass)
        self.traffic.message_bytes += len(data) * (self.shard.size - 1)
        try:
            self.links.send(data)
        except OSError as error:
            raise RuntimeError(cause_of(self.links) or f"a rank has ended ({error})") from error

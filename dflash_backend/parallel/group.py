"""The group of ranks as rank 0 has it: it starts the others, loads its part, sends its passes, and ends with them."""

from __future__ import annotations

import dataclasses
import os
import weakref
from dataclasses import dataclass, replace

import torch

from dflash_backend.attention import select_backend
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.device import num_rank_threads
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.ops import LayerOps
from dflash_backend.models.peers import ALONE, Peers
from dflash_backend.parallel.alike import kernels_of
from dflash_backend.parallel.gpu import Control, DeviceMessages, GpuPeers
from dflash_backend.parallel.links import HostMessages, RankLinks, RankSetup, cause_of
from dflash_backend.parallel.local import LocalRanks
from dflash_backend.parallel.nccl import GpuSum, load_nccl
from dflash_backend.parallel.ray_ranks import ray_ranks
from dflash_backend.parallel.shard import Shard, unsupported
from dflash_backend.parallel.target import ForwardPass, RankMessage, TensorParallelTarget, load_shard, vocabulary_part


def check_tensor_parallel(config: EngineConfig, spec: TargetSpec, device: torch.device) -> None:
    """Raises `ConfigError` for what cannot be served with `tensor_parallel_size` ranks, with what can."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    reason = unsupported(spec, size)
    if reason is not None:
        raise ConfigError(
            f"setting 'tensor_parallel_size' is {size}, which the target in {spec.path} cannot have: {reason}"
        )
    if device.type == "cuda" and config.distributed_executor != "ray":
        count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
        if count < size:
            shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
            raise ConfigError(
                f"setting 'tensor_parallel_size' is {size}, which takes a GPU for each rank, and this process sees "
                f"{count}{shown}: lower it, show it more, take KIND_MODEL where Triton's instance group is of "
                "KIND_GPU, which shows one, or set distributed_executor=ray for GPUs of several machines"
            )


@dataclass(frozen=True)
class GpuRanks:
    """What ranks on GPUs have in common. device: rank 0's. nccl_id: by which they find each other."""

    device: torch.device
    sums: GpuSum
    nccl_id: bytes

    @classmethod
    def of(cls, size: int, ordered: bool, index: int) -> GpuRanks:
        """Of `size` ranks; rank 0, which is this process, is on the GPU of that index, and allocates there from now
        on. ordered: as of `GpuSum`. Raises `ConfigError` without NCCL."""
        nccl = load_nccl()
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        nccl_id = nccl.unique_id()
        return cls(device, GpuSum.by_nccl(Shard(0, size), device, nccl, nccl_id, ordered), nccl_id)


class RankGroup:
    """The other ranks of this process, which is rank 0. They end with this object, or with this process."""

    def __init__(
        self,
        links: RankLinks,
        size: int,
        weight_bytes: int,
        splits_vocabulary: bool = False,
        gpu: GpuRanks | None = None,
        num_engines: int = 1,
    ) -> None:
        """links: of a group of `size` ranks. weight_bytes: of all models. splits_vocabulary: as of `Shard`. gpu: of
        ranks on GPUs. num_engines: how many engines share the machine's cores."""
        self.shard = Shard(0, size, splits_vocabulary)
        self.links = links
        self._weight_bytes = weight_bytes
        self._num_engines = num_engines
        self.reduce = links.reduce
        self.num_sent = self.num_passes = 0
        self.message_bytes = 0  # to all other ranks
        self.device = torch.device("cpu") if gpu is None else gpu.device
        self.peers: Peers = ALONE if gpu is None else GpuPeers(self, links.reduce, gpu.device)
        self._nccl_id = b"" if gpu is None else gpu.nccl_id
        self._messages = HostMessages() if gpu is None else DeviceMessages(gpu.sums, gpu.device)
        self._end = weakref.finalize(self, links.end)

    @classmethod
    def of(
        cls, config: EngineConfig, spec: TargetSpec, weight_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> RankGroup:
        """The ranks that share the target on devices like this one. weight_bytes: of all models. Raises `ConfigError`
        when they cannot run where they should."""
        size, on_gpus = config.tensor_parallel_size, device.type == "cuda"
        by_ray = config.distributed_executor == "ray"
        links: RankLinks = ray_ranks(size, on_gpus) if by_ray else LocalRanks(Shard(0, size))
        gpu = None
        if on_gpus:
            gpu = GpuRanks.of(size, config.batch_invariant, links.device_index(0))
            links.sum_by(gpu.sums)
        splits_vocabulary = vocabulary_bytes(spec, dtype) >= MIN_SPLIT_BYTES
        return cls(links, size, weight_bytes, splits_vocabulary, gpu, config.data_parallel_size)

    def start(self, setup: RankSetup) -> None:
        """Start the ranks, which load their parts meanwhile. setup: what is the same for all of them. Raises
        `ConfigError` where they cannot be started."""
        kernels = ""
        if setup.spec.decoder.moe is not None:
            attention = select_backend(setup.attention, setup.needs, setup.block_size).name
            kernels = kernels_of(self.device, attention)
        self.links.start(
            [
                replace(
                    setup,
                    shard=replace(self.shard, rank=rank),
                    weight_bytes=self._weight_bytes,
                    num_sharers=self._num_sharers(rank),
                    device=self._device_of(rank),
                    kernels=kernels,
                    nccl_id=self._nccl_id,
                )
                for rank in range(1, self.shard.size)
            ]
        )

    def _device_of(self, rank: int) -> torch.device:
        kind = self.device.type
        return self.device if kind == "cpu" else torch.device(kind, self.links.device_index(rank))

    def num_threads(self) -> int:
        """Of an operation in this process."""
        return num_rank_threads(self._weight_bytes, self._num_sharers(0))

    def _num_sharers(self, rank: int) -> int:
        """How many processes share the cores of a rank's machine: the other engines' are taken to be there too."""
        return self.links.num_beside(rank) * self._num_engines

    def connect(self) -> None:
        """Wait until all ranks have loaded. Raises `ConfigError` when one says that it cannot, so that a person has to
        change something, and `RuntimeError` when one is lost."""
        if (failure := self.links.start_failure()) is not None:
            self._end()
            words = f"{self.links.name(failure.rank)} of {self.shard.size} could not start: {failure.words}"
            raise RuntimeError(words) if failure.is_lost else ConfigError(words)
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

    def send(self, step: RankMessage | Control) -> None:
        """Give it to all other ranks. Raises `RuntimeError` when one is lost."""
        if self.links.lost:
            raise RuntimeError(self.links.lost)
        self.num_sent += 1
        self.num_passes += isinstance(step, ForwardPass)
        try:
            num_bytes = self._messages.send(step, self.links.send)
            self.message_bytes += num_bytes * (self.shard.size - 1)
        except OSError as error:
            raise RuntimeError(cause_of(self.links) or f"a rank has ended ({error})") from error


MIN_SPLIT_BYTES = 64 << 20
"""From this size of embedding and head on each rank has a slice of both. Below there is little memory to save, and each
step would take more exchanges."""


def load_parallel_target(ranks: RankGroup, setup: RankSetup, progress: Progress, ops: LayerOps) -> TargetModel:
    """The target, once all ranks have loaded their parts. setup: what is the same for all of them. Raises
    `CheckpointError`, and `ConfigError` when a rank has not loaded its own."""
    # On GPUs blocks are counted once the memory of the largest step is known.
    ranks.start(setup if ranks.peers is ALONE else dataclasses.replace(setup, num_blocks=1))
    spec, dtype = setup.spec, setup.needs.dtype
    size = setup.max_positions
    local = load_shard(spec, ranks.shard, ranks.reduce, size, dtype, ranks.device, progress, ops, fp8=setup.fp8)
    ranks.connect()
    vocabulary = vocabulary_part(local, spec, ranks.shard, ranks.reduce)
    return TensorParallelTarget(spec, local, ranks, vocabulary, ranks.peers)


def num_rank_0_threads(target: TargetModel) -> int:
    """Of an operation in this process, which has the shared `target`."""
    assert isinstance(target, TensorParallelTarget)
    assert isinstance(target.ranks, RankGroup)
    return target.ranks.num_threads()


def vocabulary_bytes(spec: TargetSpec, dtype: torch.dtype) -> int:
    """What embedding and head take in `dtype`."""
    return (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.decoder.hidden_size * dtype.itemsize


def own_part(config: EngineConfig, pair: ModelPair) -> ModelPair:
    """The pair with what rank 0 has of the target, whose KV and states it keeps."""
    if config.tensor_parallel_size == 1:
        return pair
    return dataclasses.replace(pair, target=Shard(0, config.tensor_parallel_size).spec(pair.target))

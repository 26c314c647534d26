"""A target whose layers `tensor_parallel_size` processes share, as the engine has it, which is rank 0."""

from __future__ import annotations

import dataclasses

import torch

from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.ops import LayerOps
from dflash_backend.models.peers import ALONE
from dflash_backend.parallel.rank_messages import RankSetup
from dflash_backend.parallel.ranks import RankGroup
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.target import SharedTarget, load_shard, vocabulary_part

MIN_SPLIT_BYTES = 64 << 20
"""From this size of embedding and head on each rank has a slice of both. Below there is little memory to save, and each
step would take more exchanges."""


def rank_group(
    config: EngineConfig, spec: TargetSpec, weight_bytes: int, dtype: torch.dtype, device: torch.device
) -> RankGroup:
    """The ranks that share the target on devices like this one. weight_bytes: of all models. Raises `ConfigError` when
    they cannot run where they should."""
    splits_vocabulary = vocabulary_bytes(spec, dtype) >= MIN_SPLIT_BYTES
    return RankGroup.of(config, weight_bytes, splits_vocabulary, device.type == "cuda")


def load_shared_target(ranks: RankGroup, setup: RankSetup, progress: Progress, ops: LayerOps) -> TargetModel:
    """The target, once all ranks have loaded their parts. setup: what is the same for all of them. Raises
    `CheckpointError`, and `ConfigError` when a rank has not loaded its own."""
    # On GPUs blocks are counted once the memory of the largest step is known.
    ranks.start(setup if ranks.peers is ALONE else dataclasses.replace(setup, num_blocks=1))
    spec, dtype = setup.spec, setup.needs.dtype
    size = setup.max_positions
    local = load_shard(spec, ranks.shard, ranks.reduce, size, dtype, ranks.device, progress, ops, fp8=setup.fp8)
    ranks.connect()
    vocabulary = vocabulary_part(local, spec, ranks.shard, ranks.reduce)
    return SharedTarget(spec, local, ranks, vocabulary, ranks.peers)


def num_rank_0_threads(target: TargetModel) -> int:
    """Of an operation in this process, which has the shared `target`."""
    assert isinstance(target, SharedTarget)
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

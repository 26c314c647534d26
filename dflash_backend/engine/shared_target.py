"""A target whose layers `tensor_parallel_size` processes share, as the engine has it, which is rank 0."""

from __future__ import annotations

import dataclasses

import torch

from dflash_backend.attention import Requirements
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine.ranks import RankGroup
from dflash_backend.engine.sizing import loaded_bytes
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.ops import LayerOps
from dflash_backend.models.parallel import SharedTarget, load_shard, vocabulary_part
from dflash_backend.models.peers import ALONE
from dflash_backend.models.shard import Shard

MIN_SPLIT_BYTES = 64 << 20
"""From this size of embedding and head on each rank has a slice of both. Below there is little memory to save, and each
step would take more exchanges."""


def rank_group(config: EngineConfig, pair: ModelPair, dtype: torch.dtype, device: torch.device) -> RankGroup | None:
    """The ranks that share the target on devices like this one; None where the settings ask for one process. Raises
    `ConfigError` when they cannot run where they should."""
    if config.tensor_parallel_size == 1:
        return None
    splits_vocabulary = vocabulary_bytes(pair.target, dtype) >= MIN_SPLIT_BYTES
    return RankGroup.of(config, loaded_bytes(pair, dtype), splits_vocabulary, device.type == "cuda")


def load_shared_target(
    config: EngineConfig,
    pair: ModelPair,
    ranks: RankGroup,
    needs: Requirements,
    num_positions: int,
    num_blocks: int,
    dtype: torch.dtype,
    progress: Progress,
    ops: LayerOps,
) -> TargetModel:
    """The target, once all ranks have loaded their parts. Raises `CheckpointError`, and `ConfigError` when a rank has
    not loaded its own."""
    fp8, device = config.quantization == "fp8", ranks.device
    # On GPUs blocks are counted once the memory of the largest step is known.
    ranks.start(pair.target, num_positions, num_blocks if ranks.peers is ALONE else 1, config, dtype, needs)
    local = load_shard(pair.target, ranks.shard, ranks.reduce, num_positions, dtype, device, progress, ops, fp8=fp8)
    ranks.connect()
    vocabulary = vocabulary_part(local, pair.target, ranks.shard, ranks.reduce)
    return SharedTarget(pair.target, local, ranks, vocabulary, ranks.peers)


def num_rank_0_threads(config: EngineConfig, target: TargetModel) -> int:
    """Of an operation in this process, which has the shared `target`."""
    assert isinstance(target, SharedTarget)
    assert isinstance(target.ranks, RankGroup)
    return target.ranks.num_threads(config)


def vocabulary_bytes(spec: TargetSpec, dtype: torch.dtype) -> int:
    """What embedding and head take in `dtype`."""
    return (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.decoder.hidden_size * dtype.itemsize


def own_part(config: EngineConfig, pair: ModelPair) -> ModelPair:
    """The pair with what rank 0 has of the target, whose KV and states it keeps."""
    if config.tensor_parallel_size == 1:
        return pair
    return dataclasses.replace(pair, target=Shard(0, config.tensor_parallel_size).spec(pair.target))

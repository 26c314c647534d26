"""A target whose layers `tensor_parallel_size` processes share, as the engine has it, which is rank 0."""

from __future__ import annotations

import dataclasses

import torch

from dflash_backend.checkpoints.weights import Progress
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine.device import num_rank_cores
from dflash_backend.engine.ranks import RankGroup
from dflash_backend.engine.sizing import loaded_bytes
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.ops import LayerOps
from dflash_backend.models.parallel import SharedTarget, load_shard
from dflash_backend.models.shard import Shard
from dflash_backend.worker.batch_parallel import num_op_threads


def load_shared_target(
    config: EngineConfig,
    pair: ModelPair,
    num_positions: int,
    num_blocks: int,
    dtype: torch.dtype,
    progress: Progress,
    ops: LayerOps,
) -> TargetModel:
    """The target, once all ranks have loaded their parts. Raises `CheckpointError`, and `ConfigError` when a rank has
    not loaded its own."""
    fp8 = config.quantization == "fp8"
    ranks = RankGroup.of(config, num_op_threads(loaded_bytes(pair, dtype), num_rank_cores(config)))
    ranks.start(pair.target, num_positions, num_blocks, config, dtype)
    device = torch.device("cpu")
    local = load_shard(pair.target, ranks.shard, ranks.reduce, num_positions, dtype, device, progress, ops, fp8=fp8)
    ranks.connect()
    return SharedTarget(pair.target, local, ranks)


def own_part(config: EngineConfig, pair: ModelPair) -> ModelPair:
    """The pair with what rank 0 has of the target, whose KV and states it keeps."""
    if config.tensor_parallel_size == 1:
        return pair
    return dataclasses.replace(pair, target=Shard(0, config.tensor_parallel_size).spec(pair.target))

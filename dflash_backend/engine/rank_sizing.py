"""KV blocks of ranks on GPUs: all have the same number, as many as the one with the least memory holds.

Rank 0 has the drafter and its KV besides, so it is that one unless other programs are on another's GPU.
"""

from __future__ import annotations

import dataclasses

import torch

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine.sizing import Sizes, gpu_budget, kv_bytes, settle_sizes
from dflash_backend.models.interface import TargetModel
from dflash_backend.parallel.gpu_peers import GpuPeers
from dflash_backend.parallel.shared_target import own_part
from dflash_backend.worker.memory import GIB, MemoryUse


def sized_pair(config: EngineConfig, pair: ModelPair, device: torch.device) -> ModelPair:
    """Whose blocks the KV memory holds: `kv_cache_gb` is that of a whole cache, what is measured that of a rank."""
    return own_part(config, pair) if device.type == "cuda" and config.kv_cache_gb is None else pair


def measured_sizes(
    config: EngineConfig, pair: ModelPair, target: TargetModel, use: MemoryUse, dtype: torch.dtype
) -> Sizes:
    """The sizes that fit beside the models and the largest step, on each rank where there are several. use: of this
    process. Raises `ConfigError` when they cannot be had."""
    budget, peers = gpu_budget(config, use), target.peers
    if not isinstance(peers, GpuPeers):
        return settle_sizes(config, pair, budget, dtype)
    uses, share = peers.uses(use), 1.0 if budget.is_explicit else config.gpu_memory_utilization
    block_bytes = [kv_bytes(config, part, 1, 0, dtype) for part in _parts(config, pair)]
    blocks = [rank_use.left(share) / size for rank_use, size in zip(uses, block_bytes, strict=True)]
    least = min(range(len(blocks)), key=blocks.__getitem__)
    where = f"on rank {least} of {len(blocks)}: {uses[least].describe(share)}"
    if budget.is_explicit:
        sizes = settle_sizes(config, pair, budget, dtype)
        if sizes.num_blocks > blocks[least]:
            raise ConfigError(
                f"setting 'kv_cache_gb' is {config.kv_cache_gb:g}, of which each of {len(blocks)} ranks holds a part, "
                f"{sizes.num_blocks * block_bytes[least] / GIB:.2f} GiB, more than there is {where}: lower it, or "
                "max_num_batched_tokens and max_num_seqs, or free memory that other programs hold"
            )
        return sizes
    num_bytes = blocks[least] * block_bytes[0]
    budget = dataclasses.replace(budget, num_bytes=num_bytes, detail=where)
    return settle_sizes(config, own_part(config, pair), budget, dtype)


def take_kv(target: TargetModel, num_blocks: int) -> None:
    """Let other ranks on GPUs take their KV caches, which rank 0 does itself. Raises `RankLostError`."""
    if isinstance(target.peers, GpuPeers):
        target.peers.allocate(num_blocks)


def _parts(config: EngineConfig, pair: ModelPair) -> list[ModelPair]:
    """What each rank keeps KV of, rank 0 first, which has the drafter's too."""
    own = own_part(config, pair)
    return [own] + [dataclasses.replace(own, draft=None)] * (config.tensor_parallel_size - 1)

"""Whether rows read the beginning of their KV together, and from how many positions on."""

from __future__ import annotations

from typing import Any

import torch

from dflash_backend.attention import AttentionBackend
from dflash_backend.attention.shared_prefixes import SharingCost
from dflash_backend.config import EngineConfig
from dflash_backend.engine.quantised import target_kv_dtype
from dflash_backend.models.interface import TargetModel

# Positions that rows share, at least, so that what is saved pays for two launches more. From where on it pays for the
# partial results is the scheduler's to find (`SharingCost`).
MIN_SHARED_POSITIONS = 512


def min_shared_positions(config: EngineConfig, backend: AttentionBackend, target: TargetModel) -> int:
    """From how many positions on rows read what they share together; 0: never."""
    # How a context is cut would depend on which rows share a step.
    wanted = config.share_prefix_attention and config.enable_prefix_caching and not config.batch_invariant
    sees_all = any(pattern.causal and pattern.sliding_window is None for pattern in target.patterns)
    return MIN_SHARED_POSITIONS if wanted and backend.capabilities.shares_prefixes and sees_all else 0


def sharing_limits(
    config: EngineConfig, backend: AttentionBackend, target: TargetModel, dtype: torch.dtype
) -> dict[str, Any]:
    """What the scheduler must know of it, as fields of its config."""
    decoder = target.spec.decoder
    heads, kv_dtype = (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim), target_kv_dtype(config) or dtype
    cost = SharingCost.of(*heads, dtype.itemsize, kv_dtype.itemsize)
    return {
        "min_shared_positions": min_shared_positions(config, backend, target),
        "shared_queries_per_tile": cost.queries_per_tile,
        "positions_per_shared_query": cost.positions_per_query,
    }

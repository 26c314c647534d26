"""How many KV blocks of their own the target's layers with a sliding window get.

As many as all requests that may run can hold at a time, and with the prefix cache as many again, so that no mixture of
requests has less than under one block table for all layers. What that saves goes to the blocks of the other layers.
Where memory holds no more blocks than that in any case, all layers stay under one table.
"""

from __future__ import annotations

from dflash_backend.config import EngineConfig
from dflash_backend.core.cache_group import CacheGroup, WindowGroup
from dflash_backend.drafters.resolve import ModelPair


def widest_window(pair: ModelPair) -> int:
    """The widest window of the target's layers; 0 where none has one."""
    return max((cache.sliding_window or 0 for cache in pair.target.decoder.caches), default=0)


def split_blocks(
    config: EngineConfig,
    pair: ModelPair,
    num_bytes: float,
    sizes: tuple[int, int],
    max_model_len: int,
    most: int | None,
) -> tuple[int, int]:
    """Blocks of the other layers and of those with a window, 0 where they have none of their own.

    num_bytes: the KV memory. sizes: bytes of a block over all layers of both models, and over those with a window.
    most: blocks that all requests together could use; None: no bound.
    """
    whole, of_windows = sizes
    together = int(num_bytes // whole)
    together = together if most is None else min(together, most)
    enough = _enough(config, pair, max_model_len)
    if not of_windows or config.tensor_parallel_size > 1 or enough >= together:
        return together, 0
    others = whole - of_windows
    if not others:  # ids alone, which take no memory
        blocks = CacheGroup(config.kv_block_size).blocks_for(max_model_len)
        return most or max(together, config.max_num_seqs * blocks), enough
    num_blocks = int((num_bytes - enough * of_windows) // others)
    return (num_blocks if most is None else min(num_blocks, most)), enough


def window_group(config: EngineConfig, window: int, num_drafts: int) -> WindowGroup:
    """What a request holds of layers whose widest window is `window`, with k = `num_drafts`; without a pool."""
    return WindowGroup(0, config.kv_block_size, window, config.max_num_batched_tokens, 2 * num_drafts + 2)


def _enough(config: EngineConfig, pair: ModelPair, max_model_len: int) -> int:
    """Blocks of layers with a window that all requests which may run can hold, of `max_model_len` positions at most."""
    group = window_group(config, max(1, widest_window(pair)), pair.num_speculative_tokens)
    longest = CacheGroup(config.kv_block_size).blocks_for(max_model_len)
    steady, of_steps = min(group.steady_blocks, longest), group.most_blocks - group.steady_blocks
    times = 2 if config.enable_prefix_caching else 1
    return times * config.max_num_seqs * steady + of_steps

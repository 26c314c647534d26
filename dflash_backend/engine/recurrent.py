"""What a target with recurrent layers asks of the settings, and what it cannot do."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.models.delta_rule import CHUNK
from dflash_backend.models.recurrent_state import pool_bytes
from dflash_backend.worker.memory import GIB

MIB = 1024**2
MIN_SNAPSHOTS = 4


def check_recurrent(
    config: EngineConfig,
    pair: ModelPair,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str, float], None],
) -> None:
    """Say what the states of a target with recurrent layers take, and what is off for it. Raises `ConfigError` for
    settings that it cannot be served with. On a GPU the pool is part of the largest step that is measured."""
    net = pair.target.decoder.delta_net
    if net is None:
        return
    if config.batch_invariant:
        raise ConfigError(
            "setting 'batch_invariant' is on, and the gated delta net layers of the target in "
            f"{pair.target.path} have no batch-invariant form: turn it off, or serve a target without such layers"
        )
    if pair.num_speculative_tokens >= CHUNK:
        raise ConfigError(
            f"setting 'num_speculative_tokens' is {pair.num_speculative_tokens}; a target with gated delta net layers "
            f"takes at most {CHUNK - 1}"
        )
    num_copies = num_snapshots(config)
    size, slots = pool_bytes(net, config.max_num_seqs + num_copies, dtype), config.max_num_seqs
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cpu" and size + (config.kv_cache_gb or 0) * GIB > machine:
        raise ConfigError(
            f"the recurrent states of max_num_seqs = {slots} requests and of num_state_snapshots = {num_copies} copies "
            f"take {size / GIB:.1f} GiB beside the KV cache, and this machine has {machine / GIB:.1f} GiB of memory: "
            "lower max_num_seqs, num_state_snapshots or kv_cache_gb"
        )
    report(
        f"target: recurrent state: {size / MIB:.1f} MiB for {slots} requests and {num_copies} copies, beside the KV "
        "cache",
        0.1,
    )
    if config.enable_prefix_caching and not num_copies:
        report("prefix cache: off: the target has recurrent layers, and num_state_snapshots is 0", 0.1)


def num_snapshots(config: EngineConfig) -> int:
    """Slots for copies of recurrent states, which prefix hits start from."""
    if not config.enable_prefix_caching:
        return 0
    own = config.num_state_snapshots
    return max(MIN_SNAPSHOTS, config.max_num_seqs // 2) if own is None else own

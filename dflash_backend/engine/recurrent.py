"""What a target with recurrent layers asks of the settings, and what it cannot do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import torch

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.models import TargetModel
from dflash_backend.models.recurrent_state import MAX_ROW_TOKENS, StatePool, pool_bytes
from dflash_backend.parallel.target import SharedTarget
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
    if pair.num_speculative_tokens >= MAX_ROW_TOKENS:
        raise ConfigError(
            f"setting 'num_speculative_tokens' is {pair.num_speculative_tokens}; a target with gated delta net layers "
            f"takes at most {MAX_ROW_TOKENS - 1}"
        )
    num_copies, slots = num_snapshots(config), config.max_num_seqs
    size = pool_bytes(net, num_states(config), dtype)
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


def allocate_states(
    config: EngineConfig, target: TargetModel, decoder: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> StatePool | None:
    """The states of requests and of copies; None where the target has no recurrent layers. decoder: of this process's
    part of the target."""
    if decoder.delta_net is None:
        return None
    pool = StatePool.allocate(decoder, num_states(config), dtype, device)
    return dataclasses.replace(pool, follow=target.tell) if isinstance(target, SharedTarget) else pool


def num_states(config: EngineConfig) -> int:
    """Slots for states: of requests, then of copies."""
    return config.max_num_seqs + num_snapshots(config)


def num_snapshots(config: EngineConfig) -> int:
    """Slots for copies of recurrent states, which prefix hits start from."""
    if not config.enable_prefix_caching:
        return 0
    own = config.num_state_snapshots
    return max(MIN_SNAPSHOTS, config.max_num_seqs // 2) if own is None else own

"""What settings ask of a target: quantised weights, KV and activations, and recurrent states; and where a target cannot
have it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_backend.attention import FP8
from dflash_backend.checkpoints.find import find_model
from dflash_backend.checkpoints.lora import LoraAdapters
from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.quantization.scheme import Layout
from dflash_backend.checkpoints.spec import DecoderSpec, TargetSpec
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.models import TargetModel
from dflash_backend.models.ops import select_ops
from dflash_backend.models.recurrent_state import MAX_ROW_TOKENS, StatePool, pool_bytes
from dflash_backend.parallel.target import TensorParallelTarget
from dflash_backend.worker.kv_cache import bytes_per_block, bytes_per_token
from dflash_backend.worker.memory import GIB

KV_DTYPES = {"fp8": FP8, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


def target_kv_dtype(config: EngineConfig) -> torch.dtype | None:
    """The dtype of the target's KV; None for that of the model."""
    return None if config.kv_cache_dtype is None else KV_DTYPES[config.kv_cache_dtype]


def report_kv_dtype(
    config: EngineConfig, pair: ModelPair, dtype: torch.dtype, report: Callable[[str, float], None]
) -> None:
    """Say what the setting `kv_cache_dtype` makes of the KV's size: how many more blocks fit where there were some."""
    kv_dtype = target_kv_dtype(config)
    if kv_dtype in (None, dtype):
        return
    target, draft = pair.target.decoder, pair.draft_model.decoder if pair.draft_model else None
    plain, own = (bytes_per_block(target, draft, config.kv_block_size, dtype, kv) for kv in (None, kv_dtype))
    name = str(dtype).removeprefix("torch.")
    form = "FP8 (e4m3), a scale for each token and head" if kv_dtype == FP8 else "bfloat16"
    report(
        f"target: KV cache: {form}: {bytes_per_token(target.caches, kv_dtype)} bytes a token in place of "
        f"{bytes_per_token(target.caches, dtype)} in {name}; with the drafter's, {name}, {own} bytes a block in place "
        f"of {plain}, so that {plain / own:.2f} times as many fit",
        0.1,
    )


def check_adapters(config: EngineConfig) -> None:
    """Raises `ConfigError` where adapters cannot be served with the other settings."""
    if config.lora_modules and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"settings 'lora_modules' and 'tensor_parallel_size' ({config.tensor_parallel_size}) do not go together: "
            "ranks have no adapters; take a tensor_parallel_size of 1, or merge an adapter into the weights"
        )


def adapter_directories(config: EngineConfig) -> dict[str, Path]:
    """Where the LoRA adapters lie, by name; from the hub they are fetched first. Raises `CheckpointError`."""
    return {name: find_model(where, f"lora_modules: '{name}'") for name, where in config.adapters.items()}


def find_adapters(config: EngineConfig) -> LoraAdapters | None:
    """The LoRA adapters; None without any. Raises `CheckpointError`."""
    return LoraAdapters(adapter_directories(config)) if config.adapters else None


def keeps_quantised(config: EngineConfig, device: torch.device) -> bool:
    """Whether weights stay quantised on this device: where there are kernels for their products."""
    wanted = "triton" if config.attention_backend == "triton" else None
    return select_ops(device, wanted).keeps_quantised


def check_quantization(
    config: EngineConfig, target: TargetSpec, keeps: bool, report: Callable[[str, float], None]
) -> None:
    """Say what the setting `quantization` makes of the target's weights. keeps: they stay quantised. Raises
    `ConfigError` where they cannot have it, with what would work."""
    if config.quantization is None:
        return
    moe, stored = target.decoder.moe, load_quantization(target.path)
    method = "MXFP4" if moe is not None and moe.mxfp4 else stored.method if stored is not None else None
    reason = None
    if method is not None:
        reason = f"its weights are quantised already ({method}): leave the setting on auto, which serves them"
    elif moe is not None and moe.swiglu is not None:
        reason = (
            "experts of gpt-oss are quantised as MXFP4 alone: take its checkpoint in MXFP4, with the setting on auto"
        )
    if reason is not None:
        where = f"setting 'quantization' is '{config.quantization}', which the target in {target.path} cannot have"
        raise ConfigError(f"{where}: {reason}")
    memory = "kept so" if keeps else "dequantised, so nothing is saved"
    report(f"target: quantised at load: FP8 (e4m3), a scale for each row; in memory {memory}", 0.05)


def check_activation_quantization(
    config: EngineConfig, target: TargetSpec, keeps: bool, report: Callable[[str, float], None]
) -> None:
    """Say what the setting `activation_quantization` does. keeps: as of `check_quantization`. Raises `ConfigError`
    where no product would have activations in FP8, with what would work."""
    if config.activation_quantization is None:
        return
    stored = load_quantization(target.path)
    rules = () if stored is None else stored.rules
    has_fp8 = config.quantization == "fp8" or any(
        scheme is not None and scheme.layout is Layout.FLOAT8 for _, scheme in rules
    )
    reason = None
    if not keeps or config.tensor_parallel_size > 1:
        reason = (
            "here weights are dequantised at load, or ranks share the target, so no product is of both: it needs a "
            "GPU, and tensor_parallel_size=1; else leave the setting on auto"
        )
    elif not has_fp8:
        reason = (
            f"no weights of the target in {target.path} are FP8: take a checkpoint in FP8, or one that is not "
            "quantised with the setting 'quantization' on fp8"
        )
    if reason is not None:
        raise ConfigError(f"setting 'activation_quantization' is '{config.activation_quantization}': {reason}")
    report(
        "target: activations become FP8 (e4m3) before products by FP8 weights of projections, in every step, by scales "
        "made anew for each token; those of experts stay as they are",
        0.05,
    )


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
    return dataclasses.replace(pool, follow=target.tell) if isinstance(target, TensorParallelTarget) else pool


def num_states(config: EngineConfig) -> int:
    """Slots for states: of requests, then of copies."""
    return config.max_num_seqs + num_snapshots(config)


def num_snapshots(config: EngineConfig) -> int:
    """Slots for copies of recurrent states, which prefix hits start from."""
    if not config.enable_prefix_caching:
        return 0
    own = config.num_state_snapshots
    return max(MIN_SNAPSHOTS, config.max_num_seqs // 2) if own is None else own

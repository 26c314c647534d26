"""Puts an engine together from settings: checkpoints, models, K/V, worker, core. Called by the engine process and by
`LLM`; nothing else knows all the parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_backend.attention import AttentionPattern, BackendError, Requirements, select_backend
from dflash_backend.checkpoints import CheckpointError, DraftSpec, ModelPair, TargetSpec, resolve_pair
from dflash_backend.checkpoints.weights import weight_files
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import EngineLimits
from dflash_backend.messages import EngineReady
from dflash_backend.models import DFlashModel, draft_patterns, load_target
from dflash_backend.speculative import DFlashDrafter
from dflash_backend.worker import ModelRunner
from dflash_backend.worker.kv_cache import PagedKVCache, bytes_per_block
from dflash_backend.worker.request_table import RequestTable
from dflash_backend.worker.row_parallel import num_row_workers

Progress = Callable[[str, float], None]

GIB = 1024**3
DEFAULT_CPU_KV_GIB = 4.0

# What can be wrong with a start, each with a sentence for the operator.
LOAD_ERRORS = (ConfigError, CheckpointError, BackendError)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready to step, and what the frontend must know of it."""

    core: EngineCore
    runner: ModelRunner
    pair: ModelPair
    ready: EngineReady


def build_engine(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Load the models that `config` names and build the engine around them.

    `progress` hears `(message, fraction)`. Raises one of `LOAD_ERRORS`.
    """
    report = progress or (lambda message, fraction: None)
    report("reading checkpoints", 0.0)
    pair = resolve_pair(config)
    target_spec, draft_spec = pair.target, pair.draft
    if pair.warning:
        report(f"warning: {pair.warning}", 0.0)
    device = _device(config)
    dtype = _dtype(config, target_spec, device)
    max_model_len = _max_model_len(config, target_spec)
    backend = select_backend(
        config.attention_backend, _requirements(target_spec, draft_spec, dtype, device), config.kv_block_size
    )
    k = pair.num_speculative_tokens
    max_positions = max_model_len + k + 1

    target = load_target(
        target_spec, max_positions, dtype, device, lambda file, done: report(f"target: {file}", 0.1 + 0.6 * done)
    )
    num_blocks = _num_blocks(config, target_spec, draft_spec, max_model_len, dtype, device)
    kv = PagedKVCache.allocate(
        target_spec.decoder, draft_spec.decoder if draft_spec else None, num_blocks, config.kv_block_size, dtype, device
    )
    drafter = None
    if draft_spec is not None:
        model = DFlashModel.load(
            draft_spec, max_positions, dtype, device, lambda file, done: report(f"drafter: {file}", 0.7 + 0.2 * done)
        )
        drafter_len = min(draft_spec.decoder.max_len, max_positions)
        drafter = DFlashDrafter(model, target, kv.draft, backend, drafter_len)
    requests = RequestTable(config.max_num_seqs, max_model_len, k, config.kv_block_size, target_spec.vocab_size, device)
    greedy_drafts = config.draft_sample_method == "greedy"
    row_workers = num_row_workers(device, _weight_bytes(pair))
    runner = ModelRunner(target, drafter, kv, backend, requests, greedy_drafts, device, dtype, row_workers)
    limits = _limits(config, num_blocks, max_model_len, k, drafter)
    ready = EngineReady(
        max_model_len=max_model_len,
        num_speculative_tokens=k,
        num_kv_blocks=num_blocks,
        kv_block_size=config.kv_block_size,
        vocab_size=target_spec.vocab_size,
        description=_describe(pair, device, dtype, backend.name, num_blocks, config.kv_block_size),
    )
    core = _core(limits, runner)
    report("ready", 1.0)
    return BuiltEngine(core, runner, pair, ready)


def _weight_bytes(pair: ModelPair) -> int:
    """Size of the weights on disk, of both models."""
    specs = [pair.target] + ([pair.draft] if pair.draft else [])
    return sum(file.stat().st_size for spec in specs for file in weight_files(spec.path))


def _limits(
    config: EngineConfig, num_blocks: int, max_model_len: int, k: int, drafter: DFlashDrafter | None
) -> EngineLimits:
    return EngineLimits(
        num_blocks=num_blocks,
        block_size=config.kv_block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_queue_size=config.max_queue_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_speculative_tokens=k,
        lookahead_base=drafter.lookahead_base if drafter else 0,
        drafter_max_len=drafter.max_len if drafter else 0,
        kv_write_guard=config.kv_write_guard,
        seed=config.seed,
    )


def _core(limits: EngineLimits, runner: ModelRunner) -> EngineCore:
    try:
        return EngineCore(limits, runner)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("setting 'device' is 'cuda', but torch sees no GPU here; use 'cpu' or 'auto'")
    return torch.device(config.device or ("cuda" if available else "cpu"))


def _dtype(config: EngineConfig, target: TargetSpec, device: torch.device) -> torch.dtype:
    name = config.dtype or ("float32" if device.type == "cpu" else target.dtype)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name]


def _max_model_len(config: EngineConfig, target: TargetSpec) -> int:
    trained = target.decoder.max_len
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"setting 'max_model_len' is {config.max_model_len}; the target in {target.path} was made for at most "
            f"{trained} positions"
        )
    return config.max_model_len or trained


def _requirements(
    target: TargetSpec, draft: DraftSpec | None, dtype: torch.dtype, device: torch.device
) -> Requirements:
    head_dims = {target.decoder.head_dim} | ({draft.decoder.head_dim} if draft else set())
    patterns = {AttentionPattern(True, window) for window in target.decoder.sliding_windows}
    if draft is not None:
        patterns |= set(draft_patterns(draft))
    return Requirements(
        patterns=frozenset(patterns),
        head_dims=frozenset(head_dims),
        dtype=dtype,
        device=device.type,
    )


def _num_blocks(
    config: EngineConfig,
    target: TargetSpec,
    draft: DraftSpec | None,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """How many blocks the K/V memory holds; never more than all running requests at full length could use."""
    block_bytes = bytes_per_block(target.decoder, draft.decoder if draft else None, config.kv_block_size, dtype)
    lookahead = draft.block_size if draft else 0
    wanted = config.max_num_seqs * -(-(max_model_len + lookahead) // config.kv_block_size)
    if config.kv_cache_gb is not None:
        size, source = config.kv_cache_gb * GIB, f"kv_cache_gb = {config.kv_cache_gb:g}"
        num_blocks = int(size // block_bytes)
    elif device.type == "cpu":
        size, source = DEFAULT_CPU_KV_GIB * GIB, f"the default of {DEFAULT_CPU_KV_GIB:g} GiB"
        num_blocks = min(wanted, int(size // block_bytes))
    else:
        free, total = torch.cuda.mem_get_info(device)
        size = free - (1.0 - config.gpu_memory_utilization) * total
        source = f"gpu_memory_utilization = {config.gpu_memory_utilization:g}"
        num_blocks = min(wanted, int(size // block_bytes))
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for a single block: {source} leaves {max(size, 0) / 1024**2:.1f} MiB, a block "
            f"of {config.kv_block_size} tokens takes {block_bytes / 1024**2:.3f} MiB; raise kv_cache_gb"
        )
    return num_blocks


def _describe(
    pair: ModelPair, device: torch.device, dtype: torch.dtype, backend: str, num_blocks: int, block_size: int
) -> str:
    draft = pair.draft
    drafting = "no speculation"
    if draft is not None:
        drafting = (
            f"drafter {draft.path.name} ({draft.format}, {draft.decoder.num_layers} layers, k = "
            f"{pair.num_speculative_tokens}, target layers {list(draft.target_layer_ids)})"
        )
    threads = f", {torch.get_num_threads()} threads of {os.cpu_count()} cores" if device.type == "cpu" else ""
    return (
        f"target {pair.target.path.name} ({pair.target.architecture}, {pair.target.decoder.num_layers} layers), "
        f"{drafting}; {device.type}, {str(dtype).removeprefix('torch.')}, attention {backend}{threads}; "
        f"KV cache of {num_blocks} blocks of {block_size} tokens"
    )

"""Puts an engine together from settings: checkpoints, models, K/V, worker, core. Called by the engine process and by
`LLM`; nothing else knows all the parts."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_backend.attention import BackendError, Requirements, select_backend
from dflash_backend.checkpoints import CheckpointError, DraftSpec, ModelPair, TargetSpec, resolve_pair
from dflash_backend.checkpoints.describe import draft_facts, target_facts, weight_bytes
from dflash_backend.checkpoints.files import weight_files
from dflash_backend.checkpoints.headers import read_headers
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import EngineLimits
from dflash_backend.core.trace import StepTrace
from dflash_backend.messages import EngineReady
from dflash_backend.models import DFlashModel, draft_patterns, load_target, target_patterns
from dflash_backend.speculative import DFlashDrafter
from dflash_backend.worker import ModelRunner
from dflash_backend.worker.kv_cache import PagedKVCache, bytes_per_block
from dflash_backend.worker.request_table import RequestTable
from dflash_backend.worker.row_parallel import num_row_workers

Progress = Callable[[str, float], None]

GIB = 1024**3
DEFAULT_CPU_KV_GIB = 4.0
# Prompt tokens that a step may take on such a device beside decode rows, however few these are (docs/scheduling.md).
MIN_PREFILL_TOKENS = {"cpu": 64, "cuda": 256}
MIN_MODEL_LEN = 2  # a token of prompt and one of output

# What can be wrong with a start, each with a sentence for the operator.
LOAD_ERRORS = (ConfigError, CheckpointError, BackendError)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready to step, and what the frontend must know of it."""

    core: EngineCore
    runner: ModelRunner
    pair: ModelPair
    ready: EngineReady
    trace: StepTrace | None = None


@dataclass(frozen=True)
class Sizes:
    """How long a request may be and how many blocks there are for all. `cut_from`: the length that the target could
    address, where the K/V memory holds less."""

    max_model_len: int
    num_blocks: int
    cut_from: int | None = None


def build_engine(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Load the models that `config` names and build the engine around them.

    `progress` hears `(message, fraction)`: what was read of each checkpoint, line by line, then the files that are
    loaded. Raises one of `LOAD_ERRORS`.
    """
    report = progress or (lambda message, fraction: None)
    report("reading checkpoints", 0.0)
    pair = resolve_pair(config)
    _report_pair(pair, report)
    device = _device(config)
    dtype = _dtype(config, pair.target, device)
    sizes = _sizes(config, pair, dtype, device)
    pair = _at_length(pair, sizes.max_model_len)
    target_spec, draft_spec = pair.target, pair.draft
    backend = select_backend(
        config.attention_backend, _requirements(target_spec, draft_spec, dtype, device), config.kv_block_size
    )
    k = pair.num_speculative_tokens
    max_positions = sizes.max_model_len + k + 1

    target = load_target(
        target_spec, max_positions, dtype, device, lambda file, done: report(f"target: {file}", 0.1 + 0.6 * done)
    )
    kv = _allocate_kv(config, pair, sizes.num_blocks, dtype, device)
    drafter = None
    if draft_spec is not None:
        model = DFlashModel.load(
            draft_spec, max_positions, dtype, device, lambda file, done: report(f"drafter: {file}", 0.7 + 0.2 * done)
        )
        drafter_len = min(draft_spec.decoder.max_len, max_positions)
        drafter = DFlashDrafter(model, target, kv.draft, backend, drafter_len)
    requests = RequestTable(
        config.max_num_seqs, sizes.max_model_len, k, config.kv_block_size, target_spec.vocab_size, device
    )
    greedy_drafts = config.draft_sample_method == "greedy"
    row_workers = num_row_workers(device, sum(weight_bytes(directory) for directory in _directories(pair)))
    runner = ModelRunner(target, drafter, kv, backend, requests, greedy_drafts, device, dtype, row_workers)
    limits = _limits(config, sizes.num_blocks, sizes.max_model_len, k, drafter, device)
    ready = EngineReady(
        max_model_len=sizes.max_model_len,
        num_speculative_tokens=k,
        num_kv_blocks=sizes.num_blocks,
        kv_block_size=config.kv_block_size,
        vocab_size=target_spec.vocab_size,
        description=_describe(pair, device, dtype, backend.name, sizes, config.kv_block_size),
    )
    trace = _trace(config)
    core = _core(limits, runner, trace)
    report("ready", 1.0)
    return BuiltEngine(core, runner, pair, ready, trace)


def _report_pair(pair: ModelPair, report: Progress) -> None:
    """Say what the checkpoints are and how they were read."""
    if pair.warning:
        report(f"warning: {pair.warning}", 0.0)
    for label, text in target_facts(pair.target):
        report(f"target: {label}: {text}", 0.05)
    for label, text in draft_facts(pair.draft) if pair.draft else []:
        report(f"drafter: {label}: {text}", 0.1)


def _directories(pair: ModelPair) -> list[Path]:
    return [spec.path for spec in (pair.target, pair.draft) if spec is not None]


def _limits(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    k: int,
    drafter: DFlashDrafter | None,
    device: torch.device,
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
        max_prefill_tokens_per_step=config.max_prefill_tokens_per_step,
        min_prefill_tokens_per_step=MIN_PREFILL_TOKENS[device.type],
        kv_write_guard=config.kv_write_guard,
        seed=config.seed,
    )


def _trace(config: EngineConfig) -> StepTrace | None:
    if not config.trace_dir:
        return None
    try:
        return StepTrace(Path(config.trace_dir), config.trace_steps)
    except OSError as error:
        raise ConfigError(
            f"setting 'trace_dir' is {config.trace_dir!r}, where no trace can be written ({error.strerror}); name a "
            "folder that the server may write to, or leave it empty"
        ) from None


def _core(limits: EngineLimits, runner: ModelRunner, trace: StepTrace | None) -> EngineCore:
    try:
        return EngineCore(limits, runner, trace=trace)
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


def _sizes(config: EngineConfig, pair: ModelPair, dtype: torch.dtype, device: torch.device) -> Sizes:
    """Settle the longest request and the number of blocks. Raises `ConfigError` when they cannot be had.

    No request's blocks ever cover more than `max_model_len` positions (`core.row_shape.peak_positions`), so the pool
    must hold that many. Where the setting is auto, the length gives way to the pool.
    """
    addressable = pair.target.decoder.max_len
    wanted = config.max_model_len
    if wanted is not None and wanted > addressable:
        raise ConfigError(
            f"setting 'max_model_len' is {wanted}; the target in {pair.target.path} was made for at most "
            f"{addressable} positions"
        )
    longest = wanted or _unscaled_len(pair.target.decoder)
    num_blocks = _num_blocks(config, pair, longest, dtype, device)
    held = num_blocks * config.kv_block_size
    if longest <= held:
        return Sizes(longest, num_blocks)
    if wanted is None and held >= MIN_MODEL_LEN:
        return Sizes(held, num_blocks, cut_from=longest)
    needed = -(-longest // config.kv_block_size)
    raise ConfigError(
        f"setting 'max_model_len' is {'auto' if wanted is None else wanted}, and a request of {longest} tokens takes "
        f"{needed} KV blocks of {config.kv_block_size} tokens; there is memory for {num_blocks}, which hold {held} "
        "tokens: lower max_model_len or raise kv_cache_gb"
    )


def _unscaled_len(decoder: DecoderSpec) -> int:
    """The length that auto takes: all that the model can address, but with dynamic scaling, which changes every
    frequency past the original length, what it was trained for."""
    return decoder.rope.original_max_positions if decoder.rope.kind == "dynamic" else decoder.max_len


def _at_length(pair: ModelPair, max_model_len: int) -> ModelPair:
    """The pair with dynamic frequencies for the longest sequence that is served: K/V of a prefix must be the same for
    every sequence that shares it."""

    def scaled(decoder: DecoderSpec) -> DecoderSpec:
        length = min(max_model_len, decoder.max_len)
        if decoder.rope.kind != "dynamic" or length <= decoder.rope.length:
            return decoder
        return dataclasses.replace(decoder, rope=dataclasses.replace(decoder.rope, length=length))

    target = dataclasses.replace(pair.target, decoder=scaled(pair.target.decoder))
    draft = pair.draft and dataclasses.replace(pair.draft, decoder=scaled(pair.draft.decoder))
    return dataclasses.replace(pair, target=target, draft=draft)


def _requirements(
    target: TargetSpec, draft: DraftSpec | None, dtype: torch.dtype, device: torch.device
) -> Requirements:
    head_dims = {target.decoder.head_dim} | ({draft.decoder.head_dim} if draft else set())
    patterns = set(target_patterns(target))
    if draft is not None:
        patterns |= set(draft_patterns(draft))
    return Requirements(
        patterns=frozenset(patterns),
        head_dims=frozenset(head_dims),
        dtype=dtype,
        device=device.type,
    )


def _num_blocks(
    config: EngineConfig, pair: ModelPair, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> int:
    """How many blocks the K/V memory holds; never more than all running requests at full length could use."""
    draft = pair.draft
    block_bytes = bytes_per_block(pair.target.decoder, draft.decoder if draft else None, config.kv_block_size, dtype)
    lookahead = draft.block_size if draft else 0
    wanted = config.max_num_seqs * -(-(max_model_len + lookahead) // config.kv_block_size)
    if config.kv_cache_gb is not None:
        size, source = config.kv_cache_gb * GIB, f"kv_cache_gb = {config.kv_cache_gb:g}"
    elif device.type == "cpu":
        size, source = DEFAULT_CPU_KV_GIB * GIB, f"the default of {DEFAULT_CPU_KV_GIB:g} GiB"
    else:
        free, total = torch.cuda.mem_get_info(device)
        size = free - (1.0 - config.gpu_memory_utilization) * total - _model_bytes(pair, dtype)
        source = f"gpu_memory_utilization = {config.gpu_memory_utilization:g}"
    num_blocks = int(size // block_bytes)
    if config.kv_cache_gb is None:
        num_blocks = min(wanted, num_blocks)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for a single block: {source} leaves {max(size, 0) / 1024**2:.1f} MiB, a block "
            f"of {config.kv_block_size} tokens takes {block_bytes / 1024**2:.3f} MiB; raise kv_cache_gb"
        )
    return num_blocks


def _allocate_kv(
    config: EngineConfig, pair: ModelPair, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> PagedKVCache:
    """The K/V tensors. Raises `ConfigError` when the device has no room for them."""
    draft = pair.draft.decoder if pair.draft else None
    try:
        return PagedKVCache.allocate(pair.target.decoder, draft, num_blocks, config.kv_block_size, dtype, device)
    except RuntimeError as error:  # torch says so when an allocation fails
        size = num_blocks * bytes_per_block(pair.target.decoder, draft, config.kv_block_size, dtype)
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks of {config.kv_block_size} tokens takes {size / GIB:.1f} GiB, which "
            f"{device} does not have; lower kv_cache_gb ({str(error).partition(chr(10))[0]})"
        ) from None


def _model_bytes(pair: ModelPair, dtype: torch.dtype) -> int:
    """Memory that the weights of both models will take, which are not loaded yet."""
    headers = [header for path in _directories(pair) for header in read_headers(weight_files(path)).values()]
    return sum(math.prod(header.shape) for header in headers) * dtype.itemsize


def _describe(
    pair: ModelPair, device: torch.device, dtype: torch.dtype, backend: str, sizes: Sizes, block_size: int
) -> str:
    draft = pair.draft
    drafting = "no speculation"
    if draft is not None:
        drafting = (
            f"drafter {draft.path.name} ({draft.format}, {draft.decoder.num_layers} layers, k = "
            f"{pair.num_speculative_tokens}, target layers {list(draft.target_layer_ids)})"
        )
    threads = f", {torch.get_num_threads()} threads of {os.cpu_count()} cores" if device.type == "cpu" else ""
    length = f"requests of up to {sizes.max_model_len} tokens"
    if sizes.cut_from is not None:
        length += f" (the target could do {sizes.cut_from}; the KV cache holds no more, raise kv_cache_gb)"
    return (
        f"target {pair.target.path.name} ({pair.target.architecture}, {pair.target.decoder.num_layers} layers), "
        f"{drafting}; {device.type}, {str(dtype).removeprefix('torch.')}, attention {backend}{threads}; "
        f"KV cache of {sizes.num_blocks} blocks of {block_size} tokens; {length}"
    )

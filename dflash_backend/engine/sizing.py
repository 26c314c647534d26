"""How long a request may be and how many KV blocks there are, from settings, models and memory.

No request's blocks ever cover more than `max_model_len` positions (`core.request.peak_positions`), so the pool must
hold that many. Where the setting is auto, the length gives way to the pool.

The target's layers with a sliding window get KV blocks of their own: as many as all requests that may run can hold at a
time, and with the prefix cache as many again, so that no mixture of requests has less than under one block table for
all layers. What that saves goes to the blocks of the other layers. Where memory holds no more blocks than that in any
case, all layers stay under one table.

Ranks on GPUs all have the same number of blocks, as many as the one with the least memory holds. Rank 0 has the drafter
and its KV besides, so it is that one unless other programs are on another's GPU.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch

from dflash_backend.checkpoints.describe import weight_bytes
from dflash_backend.checkpoints.files import read_headers
from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.quantization.at_load import made_fp8_bytes
from dflash_backend.checkpoints.quantization.keepable import holds_mxfp4, kept_bytes
from dflash_backend.checkpoints.quantization.stored import num_parameters
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.core.scheduler_config import WindowGroup, blocks_for
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine.checks import target_kv_dtype
from dflash_backend.error_text import first_line
from dflash_backend.models.interface import TargetModel
from dflash_backend.parallel.gpu import GpuPeers
from dflash_backend.parallel.group import own_part
from dflash_backend.worker.kv_cache import PagedKVCache, bytes_per_block, window_bytes_per_block
from dflash_backend.worker.memory import GIB, MemoryUse

DEFAULT_CPU_KV_GIB = 4.0
MIN_MODEL_LEN = 2  # a token of prompt and one of output


@dataclass(frozen=True)
class Sizes:
    """How long a request may be and how many blocks there are for all. `num_window_blocks`: of the target's layers with
    a window, 0 where they have none of their own. `limited_from`: the length that the target could
    address, where the KV memory holds less; `more` says what would give it more."""

    max_model_len: int
    num_blocks: int
    limited_from: int | None = None
    more: str = ""
    num_window_blocks: int = 0


@dataclass(frozen=True)
class KVCacheBudget:
    """Memory for the KV cache, in bytes, and in words where it comes from, what would make it more, and what else there
    is to say when it is too little. `is_explicit`: the operator named this very size."""

    num_bytes: float
    source: str
    more: str
    detail: str = ""
    is_explicit: bool = False


def cpu_budget(config: EngineConfig) -> KVCacheBudget:
    """What the settings say. Raises `ConfigError` when `kv_cache_gb` asks for more than the machine has."""
    if config.kv_cache_gb is not None:
        machine_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        num = config.data_parallel_size
        if config.kv_cache_gb * num > machine_gib:
            each = f" for each of {num} engines (data_parallel_size)" if num > 1 else ""
            raise ConfigError(
                f"setting 'kv_cache_gb' is {config.kv_cache_gb:g}{each}, and this machine has {machine_gib:.1f} GiB of "
                "memory: lower it, or use auto"
            )
        return _explicit(config.kv_cache_gb)
    return KVCacheBudget(DEFAULT_CPU_KV_GIB * GIB, f"the default of {DEFAULT_CPU_KV_GIB:g} GiB", "raise kv_cache_gb")


def gpu_budget(config: EngineConfig, use: MemoryUse) -> KVCacheBudget:
    """What the settings say and what is left beside `use`. Raises `ConfigError` when `kv_cache_gb` asks for more than
    there is."""
    wanted = config.kv_cache_gb
    if wanted is not None:
        # A cache is shared out to the ranks.
        if wanted / config.tensor_parallel_size * GIB > use.left(1.0):
            raise ConfigError(
                f"setting 'kv_cache_gb' is {wanted:g}, more than the GPU has left ({use.describe(1.0)}): lower it, or "
                "max_num_batched_tokens and max_num_seqs, or free memory that other programs hold"
            )
        return _explicit(wanted)
    share = config.gpu_memory_utilization
    return KVCacheBudget(
        use.left(share),
        f"gpu_memory_utilization = {share:g}",
        "raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or free memory that other "
        "programs hold",
        use.describe(share),
    )


def _explicit(kv_cache_gb: float) -> KVCacheBudget:
    return KVCacheBudget(kv_cache_gb * GIB, f"kv_cache_gb = {kv_cache_gb:g}", "raise kv_cache_gb", is_explicit=True)


def settle_sizes(config: EngineConfig, pair: ModelPair, budget: KVCacheBudget, dtype: torch.dtype) -> Sizes:
    """The longest request and the number of blocks. Raises `ConfigError` when they cannot be had."""
    wanted, decoder = config.max_model_len, pair.target.decoder
    if wanted is not None and wanted > decoder.max_len:
        raise ConfigError(
            f"setting 'max_model_len' is {wanted}; the target in {pair.target.path} was made for at most "
            f"{decoder.max_len} positions: lower it, leave it out, or set rope_scaling to what its model card says of "
            "longer prompts"
        )
    # With auto all that the model can address, but with dynamic scaling, which changes every frequency past the
    # original length, what it was trained for.
    longest = wanted or (decoder.rope.original_max_positions if decoder.rope.kind == "dynamic" else decoder.max_len)
    num_blocks, of_windows = _num_blocks(config, pair, budget, longest, dtype)
    held = num_blocks * config.kv_block_size
    if longest <= held:
        return Sizes(longest, num_blocks, num_window_blocks=of_windows)
    if wanted is None and held >= MIN_MODEL_LEN:
        return Sizes(held, num_blocks, limited_from=longest, more=budget.more, num_window_blocks=of_windows)
    needed = blocks_for(longest, config.kv_block_size)
    size = needed * _block_bytes(config, pair, dtype) / GIB
    raise ConfigError(
        f"setting 'max_model_len' is {'auto' if wanted is None else wanted}, and a request of {longest} tokens takes "
        f"{needed} KV blocks of {config.kv_block_size} tokens ({size:.2f} GiB); there is memory for {num_blocks}, "
        f"which hold {held} tokens: lower max_model_len or {budget.more}{_in_brackets(budget.detail)}"
    )


def _num_blocks(
    config: EngineConfig, pair: ModelPair, budget: KVCacheBudget, max_model_len: int, dtype: torch.dtype
) -> tuple[int, int]:
    """How many blocks the KV memory holds; never more than all running requests at full length could use, unless the
    operator named the size. And how many of its own each layer with a window has, 0 for none."""
    block_bytes, of_windows = _block_bytes(config, pair, dtype), _window_bytes(config, pair, dtype)
    most = None
    if not budget.is_explicit:
        lookahead = pair.draft_model.max_speculative_tokens + 1 if pair.draft_model else 0
        most = config.max_num_seqs * blocks_for(max_model_len + lookahead, config.kv_block_size)
    num_blocks, num_window_blocks = int(budget.num_bytes // block_bytes), 0
    num_blocks = num_blocks if most is None else min(num_blocks, most)
    enough, others = _enough(config, pair, max_model_len), block_bytes - of_windows
    if of_windows and config.tensor_parallel_size == 1 and enough < num_blocks:
        num_window_blocks = enough
        if others:
            num_blocks = int((budget.num_bytes - enough * of_windows) // others)
            num_blocks = num_blocks if most is None else min(num_blocks, most)
        else:  # ids alone, which take no memory
            blocks = blocks_for(max_model_len, config.kv_block_size)
            num_blocks = most or max(num_blocks, config.max_num_seqs * blocks)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for a single block: {budget.source} leaves "
            f"{max(budget.num_bytes, 0) / 1024**2:.1f} MiB, a block of {config.kv_block_size} tokens takes "
            f"{block_bytes / 1024**2:.3f} MiB; {budget.more}{_in_brackets(budget.detail)}"
        )
    return num_blocks, num_window_blocks


def _in_brackets(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _draft_decoder(pair: ModelPair) -> DecoderSpec | None:
    return pair.draft_model.decoder if pair.draft_model else None


def _block_bytes(config: EngineConfig, pair: ModelPair, dtype: torch.dtype) -> int:
    return bytes_per_block(
        pair.target.decoder, _draft_decoder(pair), config.kv_block_size, dtype, target_kv_dtype(config)
    )


def _window_bytes(config: EngineConfig, pair: ModelPair, dtype: torch.dtype) -> int:
    return window_bytes_per_block(pair.target.decoder, config.kv_block_size, target_kv_dtype(config) or dtype)


def kv_bytes(config: EngineConfig, pair: ModelPair, num_blocks: int, num_window_blocks: int, dtype: torch.dtype) -> int:
    """Bytes of `num_blocks` blocks, of which layers with a window have `num_window_blocks` unless that is 0."""
    of_windows = _window_bytes(config, pair, dtype) if num_window_blocks else 0
    return num_blocks * (_block_bytes(config, pair, dtype) - of_windows) + num_window_blocks * of_windows


def at_length(pair: ModelPair, max_model_len: int) -> ModelPair:
    """The pair with dynamic frequencies for the longest sequence that is served: KV of a prefix must be the same for
    every sequence that shares it."""

    def scaled(decoder: DecoderSpec) -> DecoderSpec:
        length = min(max_model_len, decoder.max_len)
        if decoder.rope.kind != "dynamic" or length <= decoder.rope.length:
            return decoder
        return dataclasses.replace(decoder, rope=dataclasses.replace(decoder.rope, length=length))

    target = dataclasses.replace(pair.target, decoder=scaled(pair.target.decoder))
    draft = pair.draft_model
    if draft is None:
        return dataclasses.replace(pair, target=target)
    return dataclasses.replace(pair, target=target, draft=dataclasses.replace(draft, decoder=scaled(draft.decoder)))


def model_bytes(pair: ModelPair, dtype: torch.dtype, keeps_quantised: bool = False, fp8: bool = False) -> int:
    """Memory that the weights of both models take in `dtype`, from the headers of their files. keeps_quantised: those
    that can stay quantised do; fp8: the target's become FP8 as they are loaded."""
    total = 0
    for path in pair.checkpoints:
        headers, quantization = read_headers(path), load_quantization(path)
        total += num_parameters(headers, quantization) * dtype.itemsize
        if keeps_quantised:
            made = fp8 and path == pair.target.path
            kept, numbers = made_fp8_bytes(headers) if made else kept_bytes(headers, quantization)
            total += kept - numbers * dtype.itemsize
    return total


def loaded_bytes(pair: ModelPair, dtype: torch.dtype) -> int:
    """About what a step reads of the weights: what they are on disk, and of quantised ones what they are in `dtype`."""
    if any(load_quantization(path) or holds_mxfp4(read_headers(path)) for path in pair.checkpoints):
        return model_bytes(pair, dtype)
    return sum(weight_bytes(path) for path in pair.checkpoints)


def allocate_kv(
    config: EngineConfig,
    pair: ModelPair,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    num_window_blocks: int = 0,
) -> PagedKVCache:
    """The KV tensors. Raises `ConfigError` when the device has no space for them."""
    draft, block_size, kv_dtype = _draft_decoder(pair), config.kv_block_size, target_kv_dtype(config)
    try:
        return PagedKVCache.allocate(
            pair.target.decoder, draft, num_blocks, block_size, dtype, device, kv_dtype, num_window_blocks
        )
    except (RuntimeError, MemoryError) as error:  # of torch, or of the system on a CPU
        size = kv_bytes(config, pair, num_blocks, num_window_blocks, dtype)
        lower = "kv_cache_gb" if device.type == "cpu" else "kv_cache_gb or gpu_memory_utilization"
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks of {config.kv_block_size} tokens takes {size / GIB:.1f} GiB, which "
            f"{device} does not have; lower {lower} ({first_line(error)})"
        ) from None


def widest_window(pair: ModelPair) -> int:
    """The widest window of the target's layers; 0 where none has one."""
    return max((cache.sliding_window or 0 for cache in pair.target.decoder.caches), default=0)


def window_group(config: EngineConfig, window: int, num_drafts: int) -> WindowGroup:
    """What a request holds of layers whose widest window is `window`, with k = `num_drafts`; without a pool."""
    return WindowGroup(0, config.kv_block_size, window, config.max_num_batched_tokens, 2 * num_drafts + 2)


def _enough(config: EngineConfig, pair: ModelPair, max_model_len: int) -> int:
    """Blocks of layers with a window that all requests which may run can hold, of `max_model_len` positions at most."""
    group = window_group(config, max(1, widest_window(pair)), pair.num_speculative_tokens)
    longest = blocks_for(max_model_len, config.kv_block_size)
    steady, of_steps = min(group.steady_blocks, longest), group.most_blocks - group.steady_blocks
    times = 2 if config.enable_prefix_caching else 1
    return times * config.max_num_seqs * steady + of_steps


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

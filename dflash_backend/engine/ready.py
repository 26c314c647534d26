"""What the log says of an engine: its checkpoints as it reads them, and once it is built its sizes, and in words what
it is."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.drafters.describe import draft_facts
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine.sizing import Sizes
from dflash_backend.messages import EngineReady

Progress = Callable[[str, float], None]


def report_pair(pair: ModelPair, dtype: torch.dtype, report: Progress) -> None:
    """Say what the checkpoints are and how they were read."""
    if pair.warning:
        report(f"warning: {pair.warning}", 0.0)
    served = str(dtype).removeprefix("torch.")
    for label, text in target_facts(pair.target, served):
        report(f"target: {label}: {text}", 0.05)
    for label, text in draft_facts(pair.draft, served) if pair.draft else []:
        report(f"drafter: {label}: {text}", 0.1)


def engine_ready(
    pair: ModelPair,
    sizes: Sizes,
    scheduler: SchedulerConfig,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    kv_dtype: str | None,
) -> EngineReady:
    """The message that the engine takes requests. `attention` names the backend of the target's attention, `kv_dtype`
    what its KV is in where that is not `dtype`."""
    kv = f"{sizes.num_blocks} blocks of {scheduler.block_size} tokens{f' in {kv_dtype}' if kv_dtype else ''}"
    if sizes.num_window_blocks:
        kv += f" ({sizes.num_window_blocks} in layers with a window)"
    return EngineReady(
        max_model_len=sizes.max_model_len,
        num_speculative_tokens=pair.num_speculative_tokens,
        num_kv_blocks=sizes.num_blocks,
        kv_block_size=scheduler.block_size,
        vocab_size=pair.target.vocab_size,
        description=_describe(pair, sizes, kv, device, dtype, attention),
        hashes_cover_next_token=scheduler.reads_next_tokens,
        finds_blocks=scheduler.enable_prefix_caching,
        has_drafter=pair.draft_model is not None,
    )


def _describe(pair: ModelPair, sizes: Sizes, kv: str, device: torch.device, dtype: torch.dtype, attention: str) -> str:
    drafting = "no speculation" if pair.draft is None else pair.draft.summary(pair.num_speculative_tokens)
    number_type = str(dtype).removeprefix("torch.")
    threads = f", {torch.get_num_threads()} threads of {os.cpu_count()} cores" if device.type == "cpu" else ""
    length = f"requests of up to {sizes.max_model_len} tokens"
    if sizes.limited_from is not None:
        length += f" (the target could do {sizes.limited_from}; the KV cache holds no more, {sizes.more})"
    return (
        f"target {pair.target.path.name} ({pair.target.architecture}, {pair.target.decoder.num_layers} layers), "
        f"{drafting}; {device.type}, {number_type}, attention {attention}{threads}; "
        f"KV cache of {kv}; {length}"
    )

"""What the KV of a checkpoint takes: a token, a block, and a request at its longest, as the server keeps them.

A target's layers with a sliding window may have blocks of their own (`window_sizing.py`), of which a request keeps few;
and the target's KV may be in FP8 (setting `kv_cache_dtype`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.attention import FP8
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.checkpoints.weights import TORCH_DTYPES
from dflash_backend.config import EngineConfig
from dflash_backend.core.cache_group import CacheGroup
from dflash_backend.engine.window_sizing import window_group
from dflash_backend.worker.kv_cache import bytes_per_token, window_bytes_per_block

BLOCK_SIZE = EngineConfig().kv_block_size
FP8_NAME = "fp8"


@dataclass(frozen=True)
class WindowReport:
    """A target's layers with a sliding window. bytes_per_token: what they take of a token. blocks_per_request: how many
    of their blocks a request keeps that decodes with k drafts, at most and however long it is."""

    window: int
    num_layers: int
    bytes_per_token: int
    blocks_per_request: int


@dataclass(frozen=True)
class KVReport:
    """KV of one model alone: bytes of a token over all layers, and of a block of `block_size`. request_bytes: of a
    request of `request_tokens` tokens that decodes, once its layers with a window have blocks of their own; without,
    request_bytes_in_one_table. dtype: the checkpoint's own name of it, or "fp8", whose bytes include scales."""

    dtype: str
    bytes_per_token: int
    block_size: int
    bytes_per_block: int
    request_tokens: int
    request_bytes: int
    request_bytes_in_one_table: int
    windows: WindowReport | None = None


def target_kv(decoder: DecoderSpec, dtype: str, num_drafts: int = 0) -> tuple[KVReport, KVReport]:
    """The KV of a target in its own dtype and in FP8, at the longest request that it can address. num_drafts: k."""
    own, in_fp8 = (_report(decoder, name, decoder.max_len, num_drafts) for name in (dtype, FP8_NAME))
    return own, in_fp8


def draft_kv(decoder: DecoderSpec, dtype: str, request_tokens: int | None = None) -> KVReport:
    """The KV of a drafter, all of whose layers keep every position. request_tokens: the longest request of its target;
    None: what the drafter alone can address."""
    return _report(decoder, dtype, request_tokens or decoder.max_len, None)


def _report(decoder: DecoderSpec, name: str, request_tokens: int, num_drafts: int | None) -> KVReport:
    dtype = FP8 if name == FP8_NAME else TORCH_DTYPES[name]
    per_token = bytes_per_token(decoder, dtype)
    num_blocks = CacheGroup(BLOCK_SIZE).blocks_for(request_tokens)
    whole = num_blocks * per_token * BLOCK_SIZE
    windows = None if num_drafts is None else _windows(decoder, dtype, num_drafts)
    kept = whole
    if windows is not None:
        kept -= max(0, num_blocks - windows.blocks_per_request) * windows.bytes_per_token * BLOCK_SIZE
    return KVReport(name, per_token, BLOCK_SIZE, per_token * BLOCK_SIZE, request_tokens, kept, whole, windows)


def _windows(decoder: DecoderSpec, dtype: torch.dtype, num_drafts: int) -> WindowReport | None:
    of_layers = [cache.sliding_window for cache in decoder.caches if cache.sliding_window is not None]
    if not of_layers:
        return None
    group = window_group(EngineConfig(), max(of_layers), num_drafts)
    per_token = window_bytes_per_block(decoder, BLOCK_SIZE, dtype) // BLOCK_SIZE
    return WindowReport(max(of_layers), len(of_layers), per_token, group.steady_blocks)

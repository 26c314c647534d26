"""The attention of one layer for a whole prompt: ours, FlashAttention's where it is installed, and torch's own, by what
torch takes and by cuDNN."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.attention import BLOCK_SIZE, AttentionCase, row_layout
from benchmarks.gpu.results import PromptAttention
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import median_seconds, scale
from dflash_backend.attention import AttentionBackend, AttentionPattern, KVLayer

TOKENS = {"cuda": (2048, 8192, 32768), "cpu": (32,)}
# Packages, each with the module of its `flash_attn_func`.
PACKAGES = {"FlashAttention-3": "flash_attn_interface", "FlashAttention-2": "flash_attn"}
CUDNN = "torch, cuDNN"
REPEATS = 5


def measure(
    shape: Shape, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Iterator[PromptAttention]:
    """Each length by each system: the median time, and the operations that a causal prompt needs over it."""
    decoder = shape.target.decoder
    for tokens in TOKENS[scale(device)]:
        query = torch.randn(tokens, decoder.num_heads, decoder.head_dim, dtype=dtype, device=device)
        keys, values = (
            torch.randn(tokens, decoder.num_kv_heads, decoder.head_dim, dtype=dtype, device=device) for _ in range(2)
        )
        # Two products of two operations for each pair of a query and a position, of which there are half.
        flops = 4 * decoder.query_size * tokens * tokens / 2
        for system, attend in _systems(backend, query, keys, values):
            with torch.inference_mode():
                seconds = median_seconds(device, attend, REPEATS)
            yield PromptAttention(shape.name, system, tokens, seconds, flops / seconds)


def _systems(
    backend: AttentionBackend, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    tokens, num_blocks = len(query), -(-len(query) // BLOCK_SIZE)
    case = AttentionCase("prompt", 1, tokens, tokens, causal=True)
    layer = KVLayer(torch.randn(num_blocks, BLOCK_SIZE, 2, *keys.shape[1:], dtype=query.dtype, device=query.device))
    layout = row_layout(case, num_blocks, query.device)
    metadata = backend.prepare(layout, AttentionPattern(causal=True), query.dtype)
    yield backend.name, lambda: backend.attend(query, layer, metadata)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))

    def by_torch() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    yield "torch", by_torch
    if scale(query.device) == "cuda":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), suppress(RuntimeError):
            by_torch()  # not on every GPU
            yield CUDNN, by_torch
    for name, module in PACKAGES.items():
        try:
            attend = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
        if scale(query.device) == "cuda":
            yield name, partial(attend, query[None], keys[None], values[None], causal=True)

"""The attention of one layer for prompts and for chunks of them: as the engine runs it, by our kernel and by each
package that is here (gathered keys and values, pieces and merges are part of the time), and dense, by torch's own and
the packages' functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.attention import BLOCK_SIZE, AttentionCase, row_layout
from benchmarks.gpu.results import PromptAttention
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import median_seconds, scale
from dflash_backend.attention import AttentionBackend, AttentionPattern, KVLayer, Requirements
from dflash_backend.attention.long_rows import LongAttention, all_installed
from dflash_kernels.triton_import import HAS_TRITON

# Tokens, and how many of the prompt come before them.
CHUNKS = {"cuda": ((2048, 0), (8192, 0), (32768, 0), (2048, 24576), (8192, 24576)), "cpu": ((32, 0), (16, 48))}
# Packages, each with the modules that may have its `flash_attn_func`.
PACKAGES = {"FlashAttention-3": ("fa3_fwd_interface", "flash_attn_interface"), "FlashAttention-2": ("flash_attn",)}
CUDNN = "torch, cuDNN"
REPEATS = 5


@dataclass(frozen=True)
class Way:
    """How a backend attends prompts: by its own kernel, or where `long` is one by that package."""

    backend: AttentionBackend
    long: LongAttention | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return self.backend.name if self.long is None else f"{self.backend.name} with {self.long.name}"

    @contextmanager
    def taken_by(self, backend: AttentionBackend) -> Iterator[None]:
        """In this block a backend of the same kind attends prompts in this way."""
        if not hasattr(backend, "long_attention"):
            yield
            return
        before, backend.long_attention = backend.long_attention, self.long
        try:
            yield
        finally:
            backend.long_attention = before


def ways(backend: AttentionBackend, needs: Requirements) -> list[Way]:
    """The ways of this backend: our own kernel, then each package that is installed and gives what it should."""
    if not HAS_TRITON or backend.name != "triton":
        return [Way(backend)]
    from dflash_backend.attention.triton_backend import TritonBackend

    found = [None, *all_installed(needs, BLOCK_SIZE)]
    return [Way(TritonBackend(BLOCK_SIZE, long), long) for long in found]


def measure(shape: Shape, found: Sequence[Way], dtype: torch.dtype, device: torch.device) -> Iterator[PromptAttention]:
    """Each chunk by each system, the first of which is ours: the median time, and the operations that causal attention
    needs over it."""
    decoder = shape.target.decoder
    for tokens, behind in CHUNKS[scale(device)]:
        query = torch.randn(tokens, decoder.num_heads, decoder.head_dim, dtype=dtype, device=device)
        num_blocks = -(-(behind + tokens) // BLOCK_SIZE)
        size = (num_blocks, BLOCK_SIZE, 2, decoder.num_kv_heads, decoder.head_dim)
        layer = KVLayer(torch.randn(size, dtype=dtype, device=device))
        # Two products of two operations for each pair of a query and a position that it sees.
        flops = 4 * decoder.query_size * tokens * (behind + tokens / 2)
        expected: torch.Tensor | None = None
        for system, attend in _systems(found, query, layer, behind):
            with torch.inference_mode():
                got = attend().reshape(tokens, -1)
                expected = got.clone() if expected is None else expected
                difference = float((got.float() - expected.float()).abs().max())
                del got
                seconds = median_seconds(device, attend, REPEATS)
            is_first = system == found[0].name
            yield PromptAttention(
                shape.name, system, tokens, seconds, flops / seconds, behind, None if is_first else difference
            )


def _systems(
    found: Sequence[Way], query: torch.Tensor, layer: KVLayer, behind: int
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    case = AttentionCase("prompt", 1, behind + len(query), len(query), causal=True)
    layout = row_layout(case, len(layer.data), query.device)
    for way in found:
        metadata = way.backend.prepare(layout, AttentionPattern(causal=True), query.dtype)
        yield way.name, partial(way.backend.attend, query, layer, metadata)
    if behind:
        return
    # Dense: its keys and values lie behind one another already.
    dense = layer.data[layout.block_tables[0].long()].flatten(0, 1)[: len(query)]
    keys, values = (each.contiguous() for each in dense.unbind(1))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))

    def by_torch() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    yield "torch", by_torch
    if scale(query.device) == "cuda":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), suppress(RuntimeError):
            by_torch()  # not on every GPU
            yield CUDNN, by_torch
    for name, modules in PACKAGES.items():
        for module in modules:
            with suppress(ImportError, OSError, AttributeError):
                attend = importlib.import_module(module).flash_attn_func
                if scale(query.device) == "cuda":
                    yield name, partial(_by_package, attend, query, keys, values)
                break


def _by_package(
    attend: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    attended = attend(query[None], keys[None], values[None], causal=True)
    return (attended[0] if isinstance(attended, tuple) else attended)[0]

"""Attention of rows with many queries by FlashAttention, where it is installed: FlashAttention-3 on a Hopper, which
takes KV blocks of any size, or FlashAttention-2, which takes multiples of 256.

Decode rows, draft blocks and whatever a CUDA graph runs stay with our own kernels, and so do short prompts. Written
from the packages' documented interfaces, and tested here against stand-ins that follow them, not against the packages:
so a package is tried at the start, and left alone where it fails or gives other numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.attention.interface import AttentionPattern, DeviceLengths, KVLayer, Requirements
from dflash_backend.attention.packed_queries import compact_tokens, running_sum, window_sides
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.paged_attention import paged_attention_reference

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None
try:
    from flash_attn_interface import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

logger = logging.getLogger(__name__)

# Positions that a row's queries see in the mean, from which on a package is called: it wants the queries of these rows
# behind one another, and the copies cost about as much as 500 positions do.
MIN_POSITIONS = 1024
HOPPER_MAJOR = 9
# What FlashAttention-2 wants the size of a KV block to be a multiple of; both take 16-bit types.
BLOCK_MULTIPLE, DTYPES = 256, frozenset({torch.bfloat16, torch.float16})
# The trial's: rows of (queries, positions), heads, KV heads, and how far bf16 may be off.
TRIAL_ROWS, TRIAL_HEADS, TOLERANCE = ((300, 300), (77, 500)), (4, 2), 3e-2


@dataclass(frozen=True)
class LongRows:
    """Rows as a package takes them, R of them with N queries: source, target, query_ends as in `FlashAttnMetadata`;
    seq_lens int32 `[R]`; block_tables int32 `[R, width]`; the pattern's window by its two sides."""

    source: torch.Tensor
    target: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    window: tuple[int, int]

    @classmethod
    def of(
        cls, rows: PagedBatch, index: np.ndarray, query_lens: np.ndarray, block_size: int, pattern: AttentionPattern
    ) -> LongRows:
        """The rows `index` (int64 `[R]`, on the host) of `rows`; query_lens: the host's bounds, int64 of all rows."""
        device = rows.seq_lens.device
        which = torch.from_numpy(index).to(device, non_blocking=True)
        columns = (rows.query_start, rows.query_lens, rows.seq_lens)
        own = DeviceLengths(*(column.index_select(0, which) for column in columns))
        source, target = compact_tokens(own, int(query_lens[index].sum()))
        longest = rows.block_tables.shape[1] * block_size
        return cls(
            source=source,
            target=target,
            query_ends=running_sum(own.query_lens),
            # A row whose request has ended may be longer than its table.
            seq_lens=own.seq_lens.clamp(max=longest),
            block_tables=rows.block_tables.index_select(0, which).int().clamp(min=0),
            max_query_len=int(query_lens[index].max()),
            max_seq_len=longest,
            causal=pattern.causal,
            window=window_sides(pattern),
        )


LongAttention = Callable[[torch.Tensor, KVLayer, LongRows], torch.Tensor]
"""Attention of queries `[N, num_heads, head_dim]` that lie behind one another, of the same shape."""


def by_flash_attention_3(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
    """A `LongAttention`."""
    key, value = layer.data.unbind(2)
    attended: torch.Tensor = flash_attn_with_kvcache(
        query, key, value, cache_seqlens=rows.seq_lens, page_table=rows.block_tables, cu_seqlens_q=rows.query_ends,
        max_seqlen_q=rows.max_query_len, softmax_scale=query.shape[2] ** -0.5, causal=rows.causal,
        window_size=rows.window,
    )  # fmt: skip
    return attended


def by_flash_attention_2(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
    """A `LongAttention`."""
    key, value = layer.data.unbind(2)
    attended: torch.Tensor = flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=rows.query_ends, cu_seqlens_k=running_sum(rows.seq_lens),
        max_seqlen_q=rows.max_query_len, max_seqlen_k=rows.max_seq_len, softmax_scale=query.shape[2] ** -0.5,
        causal=rows.causal, window_size=rows.window, block_table=rows.block_tables,
    )  # fmt: skip
    return attended


def long_rows(
    query_lens: np.ndarray, seq_lens: np.ndarray, max_overestimate: int, tallest: int, window: int | None
) -> np.ndarray:
    """Which rows a package attends: int64 `[R]`. Those of more queries than a tile of ours has (`tallest`), whose
    queries see enough positions whatever the real lengths are: never rows of a captured step, whose bounds say nothing.
    """
    seen = seq_lens - query_lens // 2 - max_overestimate
    if window is not None:
        seen = np.minimum(seen, window)
    rows: np.ndarray = np.flatnonzero((query_lens > tallest) & (seen >= MIN_POSITIONS))
    return rows


def installed(needs: Requirements, block_size: int) -> LongAttention | None:
    """The package that runs here and gives what it should, for the models of `needs`; None where there is none."""
    if needs.device != "cuda" or needs.dtype not in DTYPES:
        return None
    if needs.kv_dtype not in (None, needs.dtype):
        return None
    for name, attend in _candidates(block_size):
        problem = trial(attend, needs, block_size, torch.device(needs.device))
        if problem is None:
            logger.info("%s attends rows of prompts from %d positions on", name, MIN_POSITIONS)
            return attend
        logger.warning("%s is installed and not used: %s", name, problem)
    return None


def _candidates(block_size: int) -> Iterator[tuple[str, LongAttention]]:
    if flash_attn_with_kvcache is not None and torch.cuda.get_device_capability()[0] == HOPPER_MAJOR:
        yield "FlashAttention-3", by_flash_attention_3
    if flash_attn_varlen_func is not None and block_size % BLOCK_MULTIPLE == 0:
        yield "FlashAttention-2", by_flash_attention_2


def trial(attend: LongAttention, needs: Requirements, block_size: int, device: torch.device) -> str | None:
    """Try a package on a few random rows for each head size and pattern of `needs`; what is wrong, None for nothing."""
    for head_dim in sorted(needs.head_dims):
        for pattern in sorted(needs.patterns, key=repr):
            if pattern.sinks:
                continue
            try:
                off = _trial_error(attend, head_dim, pattern, needs.dtype, block_size, device)
            except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError) as error:
                return f"heads of {head_dim}: {type(error).__name__}: {error}"
            if not off <= TOLERANCE:
                return f"heads of {head_dim}: its numbers differ from ours by {off:.3g}"
    return None


def _trial_error(
    attend: LongAttention,
    head_dim: int,
    pattern: AttentionPattern,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
) -> float:
    generator = torch.Generator().manual_seed(head_dim)
    heads, kv_heads = TRIAL_HEADS
    lens, ends = ([row[column] for row in TRIAL_ROWS] for column in (0, 1))
    width = -(-max(ends) // block_size)
    tables = torch.randperm(len(lens) * width, generator=generator).view(len(lens), width)
    cache = torch.randn(len(lens) * width, block_size, 2, kv_heads, head_dim, generator=generator)
    query = torch.randn(sum(lens), heads, head_dim, generator=generator)
    cache, query = cache.to(dtype), query.to(dtype)
    columns = (list(np.cumsum(lens) - lens), lens, ends)
    on_host = [torch.tensor(column, dtype=torch.int32) for column in columns]
    rows = PagedBatch(on_host[0], on_host[1], on_host[2], tables.int())
    window = pattern.sliding_window
    expected = paged_attention_reference(query.float(), cache.float(), rows, pattern.causal, window)
    start, query_lens, seq_lens = (column.to(device) for column in on_host)
    there = PagedBatch(start, query_lens, seq_lens, tables.int().to(device))
    long = LongRows.of(there, np.arange(len(lens)), np.array(lens), block_size, pattern)
    attended = attend(query.to(device)[long.source], KVLayer(cache.to(device)), long)
    if attended.shape != query.shape:
        raise ValueError(f"its result has the shape {tuple(attended.shape)} in place of {tuple(query.shape)}")
    return float((attended.flatten(1).float().cpu() - expected).abs().max())

"""Paged attention by the `flash_attn` package (FlashAttention-2), where that is installed and it is asked for.

Written from the package's documented interface (`flash_attn_varlen_func` with a block table) and tested here against
a stand-in that follows it, not against the package itself. The package takes KV blocks of a multiple of 256 tokens,
16-bit types and head sizes up to 256, and reads K and V as strided views of our layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionPattern,
    Capabilities,
    KVLayer,
)
from dflash_backend.attention.packed_queries import compact_tokens, flash_attn_varlen_func, running_sum, window_sides
from dflash_backend.attention.triton_backend import exact_rows


@dataclass(frozen=True)
class FlashAttnMetadata(AttentionMetadata):
    """What the package is called with.

    It wants the rows' queries behind one another: source and target, int64 `[sum of the rows' bounds]`, say from
    which token each is taken and, one higher, to which its output goes; 0 past the last. query_ends, key_ends: int32
    `[num_rows + 1]`, running sums from 0. block_tables: int32 `[num_rows, width]`.
    """

    source: torch.Tensor
    target: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    window: tuple[int, int]


class FlashAttnBackend(AttentionBackend):
    """Paged attention by the `flash_attn` package."""

    name = "flash_attn"
    capabilities = Capabilities(
        causal=True,
        non_causal=True,
        sliding_window=True,
        head_dims=frozenset(range(8, 257, 8)),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda"}),
        block_multiple=256,
    )

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def prepare(self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype) -> FlashAttnMetadata:
        rows = layout.device or exact_rows(layout)
        source, target = compact_tokens(rows, int(layout.query_lens.sum()))
        max_seq_len = min(int(layout.seq_lens.max()), layout.block_tables.shape[1] * self.block_size)
        return FlashAttnMetadata(
            source=source,
            target=target,
            query_ends=running_sum(rows.query_lens),
            # A row whose request has ended may be longer than its table.
            key_ends=running_sum(rows.seq_lens.clamp(max=max_seq_len)),
            block_tables=layout.block_tables.int().clamp(min=0),
            max_query_len=int(layout.query_lens.max()),
            max_seq_len=max_seq_len,
            causal=pattern.causal,
            window=window_sides(pattern),
        )

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(metadata, FlashAttnMetadata)
        assert sinks is None, "attention sinks"
        key, value = layer.data.unbind(2)
        attended = flash_attn_varlen_func(
            query[metadata.source],
            key,
            value,
            cu_seqlens_q=metadata.query_ends,
            cu_seqlens_k=metadata.key_ends,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=query.shape[2] ** -0.5,
            causal=metadata.causal,
            window_size=metadata.window,
            block_table=metadata.block_tables,
        )
        out = query.new_zeros(len(query) + 1, query.shape[1] * query.shape[2])
        return out.index_copy_(0, metadata.target, attended.flatten(1))[1:]

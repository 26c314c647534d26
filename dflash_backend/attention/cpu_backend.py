"""Paged attention of a CPU in C++: rows read their KV blocks in place (`cpu_ops.attend`). Long rows go to torch where
its products of many queries gain more than gathering their KV costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.attention.interface import (
    KV_DTYPES,
    AttentionBatch,
    AttentionMetadata,
    AttentionPattern,
    Capabilities,
    KVLayer,
)
from dflash_backend.attention.torch_backend import TorchBackend, TorchMetadata, first_visible_blocks
from dflash_kernels import cpu_ops

MAX_QUERIES = 512 if cpu_ops.HAS_PAIRS and not cpu_ops.HAS_TILES else 1 << 30
"""Rows in float32 with more queries than this go to torch: none do on processors with AVX2 alone, or with AMX."""


@dataclass(frozen=True)
class CpuMetadata(TorchMetadata):
    """The rows of a forward pass that read their KV in place, arrays as of `cpu_ops.attend`; the others are groups."""

    pattern: AttentionPattern
    tables: np.ndarray
    first_tokens: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray


class CpuBackend(TorchBackend):
    """Paged attention in C++, with torch for some long rows."""

    name = "cpu"
    capabilities = Capabilities(
        causal=True,
        non_causal=True,
        sliding_window=True,
        head_dims=frozenset(range(16, cpu_ops.MAX_HEAD_DIM + 1, 16)),
        dtypes=frozenset(cpu_ops.DTYPES),
        devices=frozenset({"cpu"}),
        batch_invariant=TorchBackend.capabilities.batch_invariant,
        sinks=True,
        kv_dtypes=KV_DTYPES,
    )

    def prepare(self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype) -> TorchMetadata:
        if layout.device is not None:
            return super().prepare(layout, pattern, dtype)
        query_lens = np.ascontiguousarray(layout.query_lens, dtype=np.int64)
        seq_lens = np.ascontiguousarray(layout.seq_lens, dtype=np.int64)
        tables = np.ascontiguousarray(layout.block_tables.numpy(), dtype=np.int32)
        first_tokens = query_lens.cumsum() - query_lens
        most = MAX_QUERIES if dtype == torch.float32 else 1 << 30
        if query_lens.max(initial=0) <= most:
            return CpuMetadata([], pattern, tables, first_tokens, query_lens, seq_lens)
        short = query_lens <= most
        first_blocks = first_visible_blocks(layout, pattern, self.block_size)
        groups = [
            self._group(layout, slice(row, row + 1), first_blocks, int(first_tokens[row]), pattern, dtype)
            for row in (~short).nonzero()[0].tolist()
        ]
        rows = (tables[short], first_tokens[short], query_lens[short], seq_lens[short])
        return CpuMetadata(groups, pattern, *rows)

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not isinstance(metadata, CpuMetadata):
            return super().attend(query, layer, metadata, sinks)
        out = torch.empty((len(query), query.shape[1] * query.shape[2]), dtype=query.dtype)
        if len(metadata.seq_lens):
            rows = metadata.tables, metadata.first_tokens, metadata.query_lens, metadata.seq_lens
            pattern = metadata.pattern
            cpu_ops.attend(query, layer.data, layer.scales, out, *rows, pattern.causal, pattern.sliding_window, sinks)
        for group in metadata.groups:
            tokens = slice(group.first_token, group.first_token + group.num_tokens)
            out[tokens] = self._attend_group(query, layer, group, sinks)
        return out

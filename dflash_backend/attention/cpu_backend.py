"""Paged attention of a CPU in C++: rows read their KV blocks in place (`cpu_ops.attend`)."""

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
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_kernels import cpu_ops


@dataclass(frozen=True)
class CpuMetadata(AttentionMetadata):
    """The rows of a forward pass, arrays as of `cpu_ops.attend`."""

    pattern: AttentionPattern
    tables: np.ndarray
    first_tokens: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray


class CpuBackend(TorchBackend):
    """Paged attention in C++."""

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

    def prepare(self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype) -> AttentionMetadata:
        if layout.device is not None:
            return super().prepare(layout, pattern, dtype)
        query_lens = np.ascontiguousarray(layout.query_lens, dtype=np.int64)
        seq_lens = np.ascontiguousarray(layout.seq_lens, dtype=np.int64)
        tables = np.ascontiguousarray(layout.block_tables.numpy(), dtype=np.int32)
        first_tokens = query_lens.cumsum() - query_lens
        return CpuMetadata(pattern, tables, first_tokens, query_lens, seq_lens)

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not isinstance(metadata, CpuMetadata):
            return super().attend(query, layer, metadata, sinks)
        out = torch.empty((len(query), query.shape[1] * query.shape[2]), dtype=query.dtype)
        rows = metadata.tables, metadata.first_tokens, metadata.query_lens, metadata.seq_lens
        pattern = metadata.pattern
        cpu_ops.attend(query, layer.data, layer.scales, out, *rows, pattern.causal, pattern.sliding_window, sinks)
        return out

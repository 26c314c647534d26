"""Paged attention by our own kernels for the setting `batch_invariant`: a query has the same bits in any batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dflash_backend.attention.interface import AttentionBatch, AttentionMetadata, AttentionPattern, KVLayer
from dflash_backend.attention.triton_backend import TritonBackend, exact_rows, gpu_of, to_device
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.invariant_attention import (
    PiecesLaunch,
    invariant_attention,
    pieces_variants,
    plan_pieces,
    with_tiles,
)
from dflash_kernels.paged_attention_launch import HeadShape


@dataclass(frozen=True)
class PiecesMetadata(AttentionMetadata):
    """The rows on the device, and their bounds on the host; `launches` and `outputs` as of `TritonMetadata`."""

    rows: PagedBatch
    query_lens: np.ndarray
    seq_lens: np.ndarray
    pattern: AttentionPattern
    every_variant: bool
    launches: dict[HeadShape, list[PiecesLaunch]] = field(default_factory=dict)
    outputs: dict[HeadShape, torch.Tensor] = field(default_factory=dict)

    def launches_for(self, shape: HeadShape) -> list[PiecesLaunch]:
        """The launches for heads of this shape, with what they read on the device."""
        if shape not in self.launches:
            device = self.rows.seq_lens.device
            if self.every_variant:
                planned = [([launch], tiles) for launch, tiles in pieces_variants(shape, gpu_of(device))]
            else:
                planned = [plan_pieces(self.query_lens, self.seq_lens, shape, gpu_of(device))]
            self.launches[shape] = [
                launch
                for launches, tiles in planned
                for launch in with_tiles(launches, None if tiles is None else to_device(tiles, device))
            ]
        return self.launches[shape]


class InvariantTritonBackend(TritonBackend):
    """Paged attention in pieces at fixed positions, of which there are as many as a row's bound says."""

    capabilities = replace(TritonBackend.capabilities, shares_work=False)

    def prepare(  # type: ignore[override]
        self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype
    ) -> PiecesMetadata:
        exact = layout.device or exact_rows(layout)
        rows = PagedBatch(exact.query_start, exact.query_lens, exact.seq_lens, layout.block_tables)
        return PiecesMetadata(rows, layout.query_lens, layout.seq_lens, pattern, self._every_variant)

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`. The output is valid until the next layer of the forward pass attends."""
        assert isinstance(metadata, PiecesMetadata)
        shape = HeadShape(query.shape[1], layer.data.shape[3], query.shape[2], query.itemsize)
        launches, out = metadata.launches_for(shape), metadata.outputs.get(shape)
        if out is None:
            out = metadata.outputs[shape] = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        pattern = metadata.pattern
        return invariant_attention(
            query, layer.data, metadata.rows, launches, pattern.causal, pattern.sliding_window, out, sinks, layer.scales
        )

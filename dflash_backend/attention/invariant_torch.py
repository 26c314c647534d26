"""Paged attention in plain torch whose queries do not depend on one another: a query has the same bits alone, in a
chunk, among drafts, and beside any other rows. For the setting `batch_invariant` on a CPU.

A query's keys are cut into tiles of `TILE_KEYS` positions, counted from the beginning of its row, and some queries of
one row are multiplied by one tile at a time: products of one shape, whatever the rows. The largest score of a query is
the same in any order. Sums over a tile are added up tile by tile, so that tiles of which a query sees nothing add 0 and
change nothing: how far a row has been padded does not show either. All of it is in float32, rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from dflash_backend.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionPattern,
    Capabilities,
    KVLayer,
    hidden_keys,
)

# Positions of a tile of keys. Queries of a tile times the query heads that share a KV head.
TILE_KEYS = 128
TILE_LINES = 16  # a multiple of 16, so that each tile begins at a multiple of 64 bytes
# Pairs of a tile of queries and one of keys that run at a time, so that their scores stay in a core's cache.
PAIRS_AT_A_TIME = 16


@dataclass(frozen=True)
class TileGroup:
    """Tiles of queries that run together: as many of each of some neighbouring rows.

    source: int64 `[num_rows * num_tiles * per_tile]`, the token of each query; where a row has less, its last. real:
    which of these are a token's own, None where all are. units: int64 `[num_rows * span * units]`, the pieces of KV
    memory (`InvariantTorchBackend.unit`) of `span` tiles of keys of each row. mask: additive, `[span, num_rows,
    num_tiles, 1, 1, per_tile, TILE_KEYS]` (tiles of keys, rows, tiles of queries, KV heads, group).
    """

    num_rows: int
    num_tiles: int
    per_tile: int
    span: int
    source: torch.Tensor
    real: torch.Tensor | None
    units: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class InvariantMetadata(AttentionMetadata):
    """The rows, and what was prepared for layers whose KV heads have that many query heads."""

    layout: AttentionBatch
    pattern: AttentionPattern
    groups: dict[int, list[TileGroup]] = field(default_factory=dict)


class InvariantTorchBackend(AttentionBackend):
    """Paged attention in tiles of one shape, on exact lengths."""

    name = "torch"

    def __init__(self, block_size: int, capabilities: Capabilities) -> None:
        self.block_size = block_size
        self.capabilities = capabilities
        # Positions that lie together in memory and in one tile of keys.
        self.unit = math.gcd(block_size, TILE_KEYS)

    def prepare(self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype) -> InvariantMetadata:
        assert layout.device is None, "rows whose lengths only the device knows"
        return InvariantMetadata(layout, pattern)

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(metadata, InvariantMetadata)
        group = query.shape[1] // layer.data.shape[3]
        if group not in metadata.groups:
            metadata.groups[group] = self._groups(metadata.layout, metadata.pattern, max(1, TILE_LINES // group))
        outputs = [self._attend_group(query, layer, tiles, sinks) for tiles in metadata.groups[group]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _groups(self, layout: AttentionBatch, pattern: AttentionPattern, per_tile: int) -> list[TileGroup]:
        """All queries, in the order of the tokens."""
        counts = -(-layout.query_lens // per_tile)
        ends = -(-layout.seq_lens // TILE_KEYS)
        groups: list[TileGroup] = []
        row = 0
        while row < len(counts):
            end, span = row + 1, int(ends[row])
            while end < len(counts) and counts[end] == counts[row]:
                wider = max(span, int(ends[end]))
                if wider * int(counts[row]) * (end + 1 - row) > PAIRS_AT_A_TIME:
                    break
                end, span = end + 1, wider
            # Many tiles of one row: some of them at a time.
            step = max(1, PAIRS_AT_A_TIME // max(span, 1)) if end == row + 1 else int(counts[row])
            for first in range(0, int(counts[row]), max(step, 1)):
                num_tiles = min(step, int(counts[row]) - first)
                groups.append(self._group(layout, pattern, slice(row, end), first, num_tiles, per_tile))
            row = end
        return groups

    def _group(
        self,
        layout: AttentionBatch,
        pattern: AttentionPattern,
        rows: slice,
        first_tile: int,
        num_tiles: int,
        per_tile: int,
    ) -> TileGroup:
        """Tiles `[first_tile, first_tile + num_tiles)` of each of `rows`."""
        query_lens, seq_lens = layout.query_lens[rows], layout.seq_lens[rows]
        num_rows = len(query_lens)
        starts = (np.cumsum(layout.query_lens) - layout.query_lens)[rows]
        number = first_tile * per_tile + np.arange(num_tiles * per_tile)
        offset = np.minimum(number, query_lens[:, None] - 1)
        position = (seq_lens - query_lens)[:, None] + offset
        # The tiles of keys that any of these queries sees.
        last = position[:, -1] if pattern.causal else seq_lens - 1
        first_key = np.zeros(num_rows, dtype=np.int64)
        if pattern.sliding_window is not None:
            first_key = np.maximum(position[:, 0] - pattern.sliding_window + 1, 0) // TILE_KEYS * TILE_KEYS
        span = int((last // TILE_KEYS + 1 - first_key // TILE_KEYS).max())
        key = first_key[:, None] + np.arange(span * TILE_KEYS)
        hidden = hidden_keys(pattern, seq_lens, position, key[:, None])
        mask = np.where(hidden, np.float32("-inf"), np.float32(0.0))
        mask = mask.reshape(num_rows, num_tiles, 1, 1, per_tile, span, TILE_KEYS)
        within = number < query_lens[:, None]
        return TileGroup(
            num_rows,
            num_tiles,
            per_tile,
            span,
            torch.from_numpy((starts[:, None] + offset).reshape(-1)),
            None if within.all() else torch.from_numpy(within.reshape(-1).nonzero()[0]),
            self._units(layout.block_tables[rows], key[:, :: self.unit]),
            torch.from_numpy(np.ascontiguousarray(np.moveaxis(mask, 5, 0))),
        )

    def _units(self, tables: torch.Tensor, first: np.ndarray) -> torch.Tensor:
        """The pieces of memory that hold the positions from `first` (int64 `[num_rows, n]`) on: int64
        `[num_rows * n]`. What lies past a row's end is hidden by its mask; the last entry of its table stands in."""
        column = np.minimum(first // self.block_size, tables.shape[1] - 1)
        blocks = np.take_along_axis(tables.numpy(), column, axis=1).clip(min=0).astype(np.int64)
        units = blocks * (self.block_size // self.unit) + first % self.block_size // self.unit
        return torch.from_numpy(units.reshape(-1))

    def _attend_group(
        self, query: torch.Tensor, layer: KVLayer, group: TileGroup, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """The output of the group's tokens: `[num_tokens, num_heads * head_dim]`."""
        num_heads, head_dim = query.shape[1:]
        kv_heads, num_rows, num_tiles, span = layer.data.shape[3], group.num_rows, group.num_tiles, group.span
        heads = num_heads // kv_heads
        rows = query.index_select(0, group.source).float() * head_dim**-0.5
        rows = rows.view(num_rows, num_tiles, group.per_tile, kv_heads, heads, head_dim).permute(0, 1, 3, 4, 2, 5)
        num_lines = heads * group.per_tile
        lines = rows.reshape(1, num_rows, num_tiles, kv_heads, num_lines, head_dim)
        lines = F.pad(lines, (0, 0, 0, -num_lines % TILE_LINES))
        gathered = layer.gather(group.units, self.unit, query.dtype).float()
        gathered = gathered.view(num_rows, span, TILE_KEYS, 2, kv_heads, head_dim).permute(3, 1, 0, 4, 2, 5)
        key, value = gathered.contiguous().unsqueeze(3).unbind(0)  # [span, num_rows, 1, kv_heads, TILE_KEYS, head_dim]
        scores = products(lines, key.transpose(-1, -2))
        split = scores[..., :num_lines, :].unflatten(-2, (heads, group.per_tile))
        split += group.mask
        top = scores.amax(dim=(0, -1), keepdim=True)
        weights = scores.sub_(top).exp_()
        total = add_up(weights.sum(dim=-1, keepdim=True))[..., :num_lines, :]
        if sinks is not None:
            of_lines = sinks.view(kv_heads, heads).repeat_interleave(group.per_tile, dim=1)[:, :, None]
            # In float64: in float32 the last bit may follow where a number lies, as of other functions of torch.
            total = total + (of_lines.double() - top[0, ..., :num_lines, :]).exp().float()
        attended = add_up(products(weights, value))[..., :num_lines, :] / total
        attended = attended.unflatten(-2, (heads, group.per_tile))
        output = attended.permute(0, 1, 4, 2, 3, 5)
        output = output.reshape(-1, num_heads * head_dim).to(query.dtype)
        return output if group.real is None else output.index_select(0, group.real)


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of each pair of matrices, `[..., m, k]` by `[..., k, n]`, of as many dimensions; one of size 1 is
    repeated."""
    batch = [max(sizes) for sizes in zip(left.shape[:-2], right.shape[:-2], strict=True)]
    flat = (each.expand(*batch, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (left, right))
    return torch.bmm(*flat).view(*batch, left.shape[-2], right.shape[-1])


def add_up(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, one part after the other, so that zeros at the end change nothing."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total

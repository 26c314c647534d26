"""What models ask of attention, and what a backend declares that it can do.

A forward pass runs *rows*: row r has `query_lens[r]` consecutive queries, the last of them at position
`seq_lens[r] - 1`, over the K/V of positions `[0, seq_lens[r])` of one request. Queries of all rows lie behind one
another in `[num_tokens, ...]` tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class AttentionPattern:
    """Which positions of its row a query sees.

    With `causal` those up to its own, else all. With `sliding_window` W only those less than W away from its own, so
    W of them to the left, its own included (as in FlashAttention and `transformers`).
    """

    causal: bool
    sliding_window: int | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a backend can run. `head_dims` of None means any."""

    causal: bool
    non_causal: bool
    sliding_window: bool
    head_dims: frozenset[int] | None
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]


@dataclass(frozen=True)
class Requirements:
    """What the models of a server need of the backend."""

    patterns: frozenset[AttentionPattern]
    head_dims: frozenset[int]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class RowLayout:
    """The rows of a forward pass, on the host, and their block tables, on the device.

    query_lens, seq_lens: int64 `[num_rows]`. block_tables: int64 `[num_rows, >= blocks of the longest row]`.
    """

    query_lens: np.ndarray
    seq_lens: np.ndarray
    block_tables: torch.Tensor


class AttentionMetadata:
    """What a backend prepared for a forward pass; each backend has a class of its own."""


@dataclass(frozen=True)
class KVLayer:
    """The paged K/V of one layer: `data` is `[num_blocks, block_size, 2, num_kv_heads, head_dim]`, K before V, so
    that one token's K and V lie together and are written and gathered in one piece."""

    data: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        """The same memory by slot: `[num_blocks * block_size, 2, num_kv_heads, head_dim]`."""
        return self.data.flatten(0, 1)


class AttentionBackend(Protocol):
    """One way to run paged attention."""

    name: str
    capabilities: Capabilities

    def prepare(self, layout: RowLayout, pattern: AttentionPattern, dtype: torch.dtype) -> AttentionMetadata:
        """Build what all layers of a forward pass that have the same pattern share."""
        ...

    def write_kv(self, kv: torch.Tensor, slots: torch.Tensor, layer: KVLayer) -> None:
        """Write `kv` `[num_tokens, 2, num_kv_heads, head_dim]` to `slots` (int64 `[num_tokens]`)."""
        ...

    def attend(self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata) -> torch.Tensor:
        """Attention of `query` `[num_tokens, num_heads, head_dim]`, softmax scale `head_dim ** -0.5`.

        Returns `[num_tokens, num_heads * head_dim]`."""
        ...

"""What models ask of attention, and what a backend declares that it can do.

A forward pass runs *rows*: row r has `query_lens[r]` consecutive queries, the last of them at position
`seq_lens[r] - 1`, over the KV of positions `[0, seq_lens[r])` of one request. Queries of all rows lie behind one
another in `[num_tokens, ...]` tensors. On a GPU the host may know only bounds of these lengths (`DeviceLengths`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from dflash_kernels.fp8_kv import dequantise_kv_reference
from dflash_kernels.huge_pages import Scratch
from dflash_kernels.shared_prefix import SharedRows

Array = TypeVar("Array", np.ndarray, torch.Tensor)

FP8 = torch.float8_e4m3fn
"""The dtype of KV in FP8, whose memory is uint8 with scales beside it (`KVLayer`)."""
KV_DTYPES = frozenset({FP8, torch.bfloat16})
"""What the target's KV can be in, whatever the dtype of the model."""


@dataclass(frozen=True)
class AttentionPattern:
    """Which positions of its row a query sees.

    With `causal` those up to its own, else all. With `sliding_window` W only those less than W away from its own, so
    W of them to the left, its own included (as in FlashAttention and `transformers`). sinks: the softmax of each head
    has one more logit, which the head has learned and which has no value (`attend`).
    """

    causal: bool
    sliding_window: int | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What a backend can run.

    head_dims: None means any. emulated: those of `devices` on which it runs for tests only, so that `auto` takes any
    other backend first. block_multiple: what the size of a KV block must be a multiple of. capturable: `attend` may
    run inside a CUDA graph, since the host waits for nothing in it. batch_invariant: those of `devices` on which it has
    a form whose queries do not depend on one another (`AttentionBackend.batch_invariant`). sinks: it takes the sinks of
    layers that have them. kv_dtypes: which KV it takes beside that of the queries' own dtype. shares_prefixes: it reads
    KV that rows share once (`AttentionBatch.shared`). shares_work: what it costs follows from the rows' real lengths,
    however far above them the bounds are.
    """

    causal: bool
    non_causal: bool
    sliding_window: bool
    head_dims: frozenset[int] | None
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]
    emulated: frozenset[str] = frozenset()
    block_multiple: int = 1
    capturable: bool = False
    batch_invariant: frozenset[str] = frozenset()
    sinks: bool = False
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    shares_prefixes: bool = False
    shares_work: bool = False


@dataclass(frozen=True)
class Requirements:
    """What the models of a server need of the backend. batch_invariant: with the setting of that name. kv_dtype: of the
    target's KV; None for `dtype`."""

    patterns: frozenset[AttentionPattern]
    head_dims: frozenset[int]
    dtype: torch.dtype
    device: str
    batch_invariant: bool = False
    kv_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class DeviceLengths:
    """The rows of a forward pass as the device knows them: int32 `[num_rows]` each, on the device.

    Row r has the queries of tokens `[query_start[r], query_start[r] + query_lens[r])`, the last of them at position
    `seq_lens[r] - 1`. A padding row has lengths of 0. Starts ascend; tokens that are no row's are padding: their
    output is finite and means nothing.
    """

    query_start: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True)
class SharedPrefixes:
    """Neighbouring rows that begin with the same KV blocks, to be read once for all of them, G groups of R rows.

    rows: which they are, on the device (`dflash_kernels.shared_prefix`). num_queries, num_positions: the most queries
    of a group, and the most positions that one shares.
    """

    rows: SharedRows
    num_queries: int
    num_positions: int


@dataclass(frozen=True)
class AttentionBatch:
    """The rows of a forward pass, on the host, and their block tables, on the device.

    query_lens, seq_lens: int64 `[num_rows]`. block_tables: int64 or int32 `[num_rows, >= blocks of the longest row]`.

    Without `device` the lengths are exact and the rows' tokens lie behind one another. With it they are upper bounds,
    from which a backend takes its launch sizes alone: a row's real seq_len is at most `max_overestimate` below the
    bound, unless it is a padding row. Behind a row's own tokens, fewer than its bound, lie those of the next row.
    A row whose request has ended meanwhile may be longer than its bound and than its table: it reads nothing past
    either end of the table, and its output is finite and not used. shared: rows that read the beginning of their KV
    together, where the backend can (`Capabilities.shares_prefixes`) and the pattern lets every query see all of it.
    exact: bool `[num_rows]`, the rows whose lengths on the device are their bounds all the same; None for none.
    """

    query_lens: np.ndarray
    seq_lens: np.ndarray
    block_tables: torch.Tensor
    device: DeviceLengths | None = None
    max_overestimate: int = 0
    shared: SharedPrefixes | None = None
    exact: np.ndarray | None = None

    @property
    def known_rows(self) -> np.ndarray:
        """The rows whose lengths the host knows: bool `[num_rows]`."""
        if self.device is None:
            return np.ones(len(self.query_lens), dtype=bool)
        return np.zeros(len(self.query_lens), dtype=bool) if self.exact is None else self.exact


class AttentionMetadata:
    """What a backend prepared for a forward pass; each backend has a class of its own."""


@dataclass(frozen=True)
class KVLayer:
    """The paged KV of one layer: `data` is `[num_blocks, block_size, 2, num_kv_heads, head_dim]`, K before V, so
    that one token's K and V lie together and are written and gathered in one piece. Its dtype is any floating one, or
    uint8 for FP8 (`dflash_kernels.fp8_kv`), whose `scales` are float32 `[num_blocks, block_size, 2, num_kv_heads]`."""

    data: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def slots(self) -> torch.Tensor:
        """The same memory by slot: `[num_blocks * block_size, 2, num_kv_heads, head_dim]`."""
        return self.data.flatten(0, 1)

    @property
    def slot_scales(self) -> torch.Tensor | None:
        """The scales by slot: `[num_blocks * block_size, 2, num_kv_heads]`; None where there are none."""
        return None if self.scales is None else self.scales.flatten(0, 1)

    def gather(
        self, pieces: torch.Tensor, length: int, dtype: torch.dtype, scratch: Scratch | None = None
    ) -> torch.Tensor:
        """The pieces (int `[n]`) of `length` positions, counted through the whole memory, which must be contiguous:
        `[n, length, 2, num_kv_heads, head_dim]` in `dtype`. scratch: on a CPU, where they may lie; they are valid until
        the calling thread asks for the next ones."""
        # A piece is one row of a matrix here, which torch copies several times faster than one of more dimensions.
        token = self.data.shape[2:]
        rows = self.data.view(-1, length * token.numel())
        out = None if scratch is None else scratch.empty(len(pieces), rows.shape[1], rows.dtype)
        data = torch.index_select(rows, 0, pieces, out=out).view(-1, length, *token)
        if self.scales is None:
            return data.to(dtype)
        scales = self.scales.view(-1, length * token[:-1].numel()).index_select(0, pieces)
        return dequantise_kv_reference(data, scales.view(data.shape[:-1]), dtype)


class AttentionBackend(Protocol):
    """One way to run paged attention."""

    name: str
    capabilities: Capabilities

    def prepare(self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype) -> AttentionMetadata:
        """Build what all layers of a forward pass that have the same pattern share."""

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of `query` `[num_tokens, num_heads, head_dim]`, softmax scale `head_dim ** -0.5`. sinks:
        `[num_heads]`, those of a layer whose pattern has them.

        Returns `[num_tokens, num_heads * head_dim]`."""

    def choosing_per_launch(self, needs: Requirements) -> AttentionBackend:
        """This backend, free to leave launches to packages that run them faster, where these are installed."""
        return self

    def batch_invariant(self) -> AttentionBackend:
        """The form of this backend that gives a query the same bits alone, in a chunk, among drafts and beside any
        other rows. Raises `ValueError` where it has none, which its capabilities say."""
        raise ValueError(f"the attention backend '{self.name}' has no batch-invariant form")

    def every_variant(self, max_tokens: int = 0) -> AbstractContextManager[None]:
        """In this block `attend` runs every kernel that rows up to as long as those prepared in it can need, so that
        all are compiled. The rows must be padding alone. max_tokens: of a step, where what packages prepare for
        chunks of prompts is to be prepared too; 0 for none."""
        return nullcontext()


def hidden_keys(pattern: AttentionPattern, lens: Array, query: Array, key: Array) -> Array:
    """Which positions the queries of rows do not see: bool `[num_rows, query_len, num_keys]`.

    lens: int64 `[num_rows]`. query: int64 `[num_rows, query_len]`, positions. key: int64 `[num_keys]` or
    `[num_rows, 1, num_keys]`, positions.
    """
    query = query[:, :, None]
    # Without `causal` a row's last key is the same for all of its queries.
    hidden = key > (query if pattern.causal else query * 0 + lens[:, None, None] - 1)
    if pattern.sliding_window is not None:
        hidden = hidden | (abs(key - query) >= pattern.sliding_window)
    return hidden

"""Paged attention in plain torch: gathers the blocks that a row's queries can see and calls
`scaled_dot_product_attention`.

Runs everywhere and is the reference for the other backends. Neighbouring rows with similar numbers of queries and
contexts are padded to one batch, since on a CPU the number of calls costs as much as the arithmetic.

Where only the device knows the rows' lengths (`DeviceLengths`), the host's bounds say how much is gathered, and the
masks hide what the real lengths leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dflash_backend.attention.interface import (
    KV_DTYPES,
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionPattern,
    Capabilities,
    KVLayer,
    hidden_keys,
)
from dflash_backend.attention.invariant_torch import InvariantTorchBackend
from dflash_kernels.huge_pages import Scratch

# A group may compute this many times the KV positions that its rows need, plus a few blocks.
MAX_PADDING = 1.25
PADDING_ALLOWANCE = 64
# And this many times the queries, plus a few: rows that verify different numbers of drafts go together.
MAX_QUERY_PADDING = 1.25
QUERY_ALLOWANCE = 16
# On a CPU the rows of a group are gathered a few at a time, so that their KV is read again from a cache and not from
# memory. Fewer at a time would stay in the core's own cache, and take longer: the threads that share a step's rows take
# turns in Python, and each piece is a dozen calls.
GATHER_BYTES = 8 * 1024**2
_scratch = Scratch(GATHER_BYTES, GATHER_BYTES // 2)
_HIDDEN, _SEEN = np.float32("-inf"), np.float32(0.0)


@dataclass(frozen=True)
class BatchGroup:
    """Rows `[first_row, first_row + num_rows)` that run as one batch.

    blocks: int64 or int32 `[num_rows * num_blocks]`. mask: additive `[num_rows, 1, query_len, padded_len]`, or None
    where the queries are the whole sequence and a triangular mask says it all; with sinks it has one more column, of
    the sink, and is never None. The queries lie behind one another from
    `first_token` on, `num_tokens` of them.

    source: int64 `[num_rows * query_len]`, the token of each query; None where they lie so. real: int64 `[num_tokens]`,
    which of the queries are a token's own where some rows have fewer than `query_len`, whose last token stands in; else
    None. target: where only the device knows where queries lie, int64 `[num_rows * query_len]`, one more than the token
    of each, 0 for those that a row has less than its bound (whose source is token 0): their output goes to a place of
    its own before the first token's.
    """

    first_token: int
    num_tokens: int
    num_rows: int
    query_len: int
    padded_len: int
    blocks: torch.Tensor
    mask: torch.Tensor | None
    source: torch.Tensor | None = None
    real: torch.Tensor | None = None
    target: torch.Tensor | None = None


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    """The groups of a forward pass, in the order of the tokens."""

    groups: list[BatchGroup]


class TorchBackend(AttentionBackend):
    """Paged attention in plain torch."""

    name = "torch"
    capabilities = Capabilities(
        causal=True,
        non_causal=True,
        sliding_window=True,
        head_dims=None,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        devices=frozenset({"cpu", "cuda"}),
        batch_invariant=frozenset({"cpu"}),
        sinks=True,
        kv_dtypes=KV_DTYPES,
    )

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def batch_invariant(self) -> AttentionBackend:
        return InvariantTorchBackend(self.block_size, self.capabilities)

    def prepare(self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype) -> AttentionMetadata:
        first_blocks = first_visible_blocks(layout, pattern, self.block_size)
        group_of = self._group if layout.device is None else self._device_group
        visible = layout.seq_lens if first_blocks is None else layout.seq_lens - first_blocks * self.block_size
        groups = []
        first_row, first_token = 0, 0
        for num_rows in split_groups(layout.query_lens, visible):
            rows = slice(first_row, first_row + num_rows)
            group = group_of(layout, rows, first_blocks, first_token, pattern, dtype)
            groups.append(group)
            first_row += num_rows
            first_token += group.num_tokens
        return TorchMetadata(groups)

    def _group(
        self,
        layout: AttentionBatch,
        rows: slice,
        first_blocks: np.ndarray | None,
        first_token: int,
        pattern: AttentionPattern,
        dtype: torch.dtype,
    ) -> BatchGroup:
        query_lens, seq_lens = layout.query_lens[rows], layout.seq_lens[rows]
        num_rows, num_tokens, query_len = len(seq_lens), int(query_lens.sum()), int(query_lens.max())
        window = pattern.sliding_window
        blocks, starts = self._visible(layout, rows, first_blocks)
        sees_all = pattern.causal and query_len == seq_lens[0] and (window is None or window >= query_len)
        if sees_all and num_rows == 1 and not pattern.sinks:
            return BatchGroup(first_token, num_tokens, 1, query_len, query_len, blocks.reshape(-1), None)
        padded_len = blocks.shape[1] * self.block_size
        if num_rows == 1 and starts is None and window is None and not pattern.sinks:
            mask = one_row_mask(int(seq_lens[0]), query_len, padded_len, pattern.causal)
            return BatchGroup(
                first_token, num_tokens, 1, query_len, padded_len, blocks.reshape(-1), mask.to(blocks.device, dtype)
            )
        # In numpy, whose calls cost less: these arrays are small.
        key = np.arange(padded_len) if starts is None else starts[:, None, None] + np.arange(padded_len)
        # Of each query, `[num_rows, query_len]`: which of its row's tokens it is, and its position.
        offset = np.minimum(np.arange(query_len), query_lens[:, None] - 1)
        query = (seq_lens - query_lens)[:, None] + offset
        hidden = hidden_keys(pattern, seq_lens, query, key)
        mask = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0.0))[:, None])
        mask = F.pad(mask, (0, 1)) if pattern.sinks else mask
        source, real = None, None
        if num_tokens < num_rows * query_len:
            tokens = (first_token + np.cumsum(query_lens) - query_lens)[:, None] + offset
            own = (np.arange(query_len) < query_lens[:, None]).reshape(-1).nonzero()[0]
            source, real = (torch.from_numpy(index).to(blocks.device) for index in (tokens.reshape(-1), own))
        return BatchGroup(
            first_token,
            num_tokens,
            num_rows,
            query_len,
            padded_len,
            blocks.reshape(-1),
            mask.to(blocks.device, dtype),
            source,
            real,
        )

    def _device_group(
        self,
        layout: AttentionBatch,
        rows: slice,
        first_blocks: np.ndarray | None,
        first_token: int,
        pattern: AttentionPattern,
        dtype: torch.dtype,
    ) -> BatchGroup:
        """As `_group` from bounds: the masks and the places of the queries follow from what the device knows."""
        assert layout.device is not None
        query_len = int(layout.query_lens[rows].max())
        blocks, starts = self._visible(layout, rows, first_blocks)
        padded_len = blocks.shape[1] * self.block_size
        key = torch.arange(padded_len, device=blocks.device)
        if starts is not None:
            key = torch.from_numpy(starts).to(blocks.device)[:, None, None] + key
        offset = torch.arange(query_len, device=blocks.device)
        query_lens, lens = layout.device.query_lens[rows].long(), layout.device.seq_lens[rows].long()
        hidden = hidden_keys(pattern, lens, (lens - query_lens)[:, None] + offset, key)
        # A query that sees nothing (of a padding row, or of one that has ended) sees everything instead: a softmax
        # over nothing would be NaN, which later layers would write where a mask does not remove it.
        hidden = hidden & ~hidden.all(dim=-1, keepdim=True)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None]
        tokens = layout.device.query_start[rows].long()[:, None] + offset
        there = offset < query_lens[:, None]
        return BatchGroup(
            first_token,
            num_tokens=int(layout.query_lens[rows].sum()),
            num_rows=len(blocks),
            query_len=query_len,
            padded_len=padded_len,
            blocks=blocks.clamp(min=0).reshape(-1),
            mask=F.pad(mask, (0, 1)) if pattern.sinks else mask,
            source=(tokens * there).flatten(),
            target=((tokens + 1) * there).flatten(),
        )

    def _visible(
        self, layout: AttentionBatch, rows: slice, first_blocks: np.ndarray | None
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """The blocks that a group's queries see, `[num_rows, num_blocks]`, and the position that each row's first one
        begins at, int64 `[num_rows]`; None where that is 0 for all."""
        tables, seq_lens = layout.block_tables[rows], layout.seq_lens[rows]
        if first_blocks is None:
            return tables[:, : max(-(-int(seq_lens.max()) // self.block_size), 1)], None
        first = first_blocks[rows]
        width = max(int((-(-seq_lens // self.block_size) - first).max()), 1)
        return gather_tables(tables, first, width), first * self.block_size

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(metadata, TorchMetadata)
        outputs = [self._attend_group(query, layer, group, sinks) for group in metadata.groups]
        targets = [group.target for group in metadata.groups if group.target is not None]
        if targets:
            scattered = query.new_zeros(len(query) + 1, query.shape[1] * query.shape[2])
            return scattered.index_copy_(0, torch.cat(targets), torch.cat(outputs))[1:]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_group(
        self, query: torch.Tensor, layer: KVLayer, group: BatchGroup, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        num_heads, head_dim = query.shape[1:]
        if group.source is None:
            rows = query[group.first_token : group.first_token + group.num_tokens]
        else:
            rows = query.index_select(0, group.source)
        rows = rows.view(group.num_rows, group.query_len, num_heads, head_dim).transpose(1, 2)
        blocks = group.blocks.view(group.num_rows, -1)
        step = rows_at_once(group, layer.data, query.itemsize)
        parts = [
            self._attend_rows(rows, layer, blocks, group, slice(first, first + step), sinks)
            for first in range(0, group.num_rows, step)
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        output = output.transpose(1, 2).reshape(-1, num_heads * head_dim)
        return output if group.real is None else output.index_select(0, group.real)

    @staticmethod
    def _attend_rows(
        query: torch.Tensor,
        layer: KVLayer,
        blocks: torch.Tensor,
        group: BatchGroup,
        rows: slice,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Some rows of a group. query: `[num_rows, num_heads, query_len, head_dim]`, blocks: `[num_rows, num_blocks]`.
        Returns these rows' `[n, num_heads, query_len, head_dim]`."""
        query, blocks, mask = query[rows], blocks[rows], None if group.mask is None else group.mask[rows]
        scratch = _scratch if layer.data.is_cpu else None
        gathered = layer.gather(blocks.flatten(), layer.data.shape[1], query.dtype, scratch)
        gathered = gathered.view(len(blocks), -1, *gathered.shape[2:])
        # Padding positions hold what an earlier owner of the block left there, always finite numbers, so that the
        # mask's -inf is enough to hide them.
        key, value = (part.transpose(1, 2) for part in gathered[:, : group.padded_len].unbind(2))
        if sinks is not None:
            assert mask is not None, "prepared for a pattern without sinks"
            return attend_with_sinks(query, key, value, mask, sinks)
        gqa = query.shape[1] != gathered.shape[3]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)


def one_row_mask(seq_len: int, query_len: int, padded_len: int, causal: bool) -> torch.Tensor:
    """What hides the keys that the last `query_len` of `seq_len` positions do not see, all before it being seen:
    float32 0 or -inf, `[1, 1, query_len, padded_len]`."""
    key = np.arange(padded_len)
    last = np.arange(seq_len - query_len, seq_len)[:, None] if causal else np.full((query_len, 1), seq_len - 1)
    return torch.from_numpy(np.where(key > last, _HIDDEN, _SEEN)[None, None])


def rows_at_once(group: BatchGroup, data: torch.Tensor, itemsize: int) -> int:
    """How many rows of a group are gathered together from `data` (see `KVLayer`), as numbers of `itemsize` bytes."""
    if data.device.type != "cpu":
        return group.num_rows
    row_bytes = group.padded_len * data[0, 0].numel() * itemsize
    return max(1, GATHER_BYTES // row_bytes)


def first_visible_blocks(layout: AttentionBatch, pattern: AttentionPattern, block_size: int) -> np.ndarray | None:
    """Index in its table of the first block that any query of a row sees: int64 `[num_rows]`; None where that is the
    first for every row."""
    if pattern.sliding_window is None:
        return None
    first_query = layout.seq_lens - layout.max_overestimate - layout.query_lens
    first_blocks: np.ndarray = np.maximum(first_query - pattern.sliding_window + 1, 0) // block_size
    return first_blocks if first_blocks.any() else None


def gather_tables(tables: torch.Tensor, first_blocks: np.ndarray, num_blocks: int) -> torch.Tensor:
    """The `num_blocks` entries from `first_blocks` on of each row of `tables`: `[num_rows, num_blocks]`.

    What lies past a row's end is hidden by its mask; past the end of the table its last entry stands in.
    """
    columns = np.minimum(first_blocks[:, None] + np.arange(num_blocks), tables.shape[1] - 1)
    return tables.gather(1, torch.from_numpy(columns).to(tables.device))


def split_groups(query_lens: np.ndarray, seq_lens: np.ndarray) -> list[int]:
    """How many neighbouring rows go into each group: padding within `MAX_PADDING` and `MAX_QUERY_PADDING`.

    query_lens, seq_lens: `[num_rows]`, the second without what a window hides. The caller orders rows so that alike
    ones are neighbours.
    """
    sizes: list[int] = []
    total = longest = num_queries = most_queries = 0
    for length, query_len in zip(seq_lens.tolist(), query_lens.tolist(), strict=True):
        if sizes:
            padded = max(longest, length) * (sizes[-1] + 1)
            padded_queries = max(most_queries, query_len) * (sizes[-1] + 1)
            if (
                padded <= MAX_PADDING * (total + length) + PADDING_ALLOWANCE
                and padded_queries <= MAX_QUERY_PADDING * (num_queries + query_len) + QUERY_ALLOWANCE
            ):
                sizes[-1] += 1
                total, longest = total + length, max(longest, length)
                num_queries, most_queries = num_queries + query_len, max(most_queries, query_len)
                continue
        sizes.append(1)
        total, longest, num_queries, most_queries = length, length, query_len, query_len
    return sizes


def attend_with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """query: `[num_rows, num_heads, query_len, head_dim]`; key, value: `[num_rows, num_kv_heads, num_keys, head_dim]`;
    mask: additive, `[num_rows, 1, query_len, num_keys + 1]`, the sink's column last; sinks: `[num_heads]`. Returns
    `[num_rows, num_heads, query_len, head_dim]`.

    The sink is a key of its own with a value of zeros. Heads have one more number, by which the product with this key
    is the head's sink and with every other key is what it was: so the mask stays one for all heads, and no scores are
    kept.
    """
    head_dim = query.shape[-1]
    logits = (sinks * head_dim**0.5).to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    key, value = (F.pad(part, (0, 1, 0, 1)) for part in (key, value))
    key[..., -1, -1] = 1.0
    attended = F.scaled_dot_product_attention(
        torch.cat([query, logits], dim=-1),
        key,
        value,
        attn_mask=mask,
        scale=head_dim**-0.5,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[..., :head_dim]

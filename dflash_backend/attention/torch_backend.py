"""Paged attention in plain torch: gathers the blocks that a row's queries can see and calls
`scaled_dot_product_attention`.

Runs everywhere and is the reference for the other backends. Neighbouring rows with the same number of queries and
similar contexts are padded to one batch, since on a CPU the number of calls costs as much as the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dflash_backend.attention.interface import AttentionMetadata, AttentionPattern, Capabilities, KVLayer, RowLayout
from dflash_kernels.kv_write import kv_write_reference

# A group may compute this many times the K/V positions that its rows need, plus a few blocks.
MAX_PADDING = 1.25
PADDING_ALLOWANCE = 64


@dataclass(frozen=True)
class RowGroup:
    """Rows `[first_row, first_row + num_rows)` that run as one batch.

    blocks: int64 `[num_rows * num_blocks]`. mask: additive `[num_rows, 1, query_len, padded_len]`, or None where the
    queries are the whole sequence and a triangular mask says it all.
    """

    first_token: int
    num_rows: int
    query_len: int
    padded_len: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class TorchMetadata(AttentionMetadata):
    """The groups of a forward pass, in the order of the tokens."""

    groups: list[RowGroup]


class TorchBackend:
    """See the top of this file."""

    name = "torch"
    capabilities = Capabilities(
        causal=True,
        non_causal=True,
        sliding_window=True,
        head_dims=None,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        devices=frozenset({"cpu", "cuda"}),
    )

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def prepare(self, layout: RowLayout, pattern: AttentionPattern, dtype: torch.dtype) -> TorchMetadata:
        """See `AttentionBackend.prepare`."""
        first_blocks = first_visible_blocks(layout, pattern, self.block_size)
        visible = layout.seq_lens if first_blocks is None else layout.seq_lens - first_blocks * self.block_size
        groups = []
        first_row, first_token = 0, 0
        for num_rows in split_groups(layout.query_lens, visible):
            rows = slice(first_row, first_row + num_rows)
            group = self._group(layout, rows, first_blocks, first_token, pattern, dtype)
            groups.append(group)
            first_row += num_rows
            first_token += num_rows * group.query_len
        return TorchMetadata(groups)

    def _group(
        self,
        layout: RowLayout,
        rows: slice,
        first_blocks: np.ndarray | None,
        first_token: int,
        pattern: AttentionPattern,
        dtype: torch.dtype,
    ) -> RowGroup:
        query_len = int(layout.query_lens[rows.start])
        seq_lens = layout.seq_lens[rows]
        num_rows = len(seq_lens)
        window = pattern.sliding_window
        blocks, key = self._visible(layout, rows, first_blocks)
        if pattern.causal and num_rows == 1 and query_len == seq_lens[0] and (window is None or window >= query_len):
            return RowGroup(first_token, 1, query_len, query_len, blocks.reshape(-1), None)
        device = blocks.device
        padded_len = blocks.shape[1] * self.block_size
        lens = torch.from_numpy(seq_lens).to(device)
        # Position of each query, `[num_rows, query_len, 1]`.
        query = (lens[:, None] - query_len + torch.arange(query_len, device=device))[:, :, None]
        if pattern.causal:
            hidden = key > query
        else:
            hidden = (key >= lens[:, None, None]).expand(num_rows, query_len, padded_len)
        if window is not None:
            hidden = hidden | ((key - query).abs() >= window)
        mask = torch.zeros(num_rows, 1, query_len, padded_len, dtype=dtype, device=device)
        mask.masked_fill_(hidden[:, None], float("-inf"))
        return RowGroup(first_token, num_rows, query_len, padded_len, blocks.reshape(-1), mask)

    def _visible(
        self, layout: RowLayout, rows: slice, first_blocks: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks that a group's queries see, `[num_rows, num_blocks]`, and the positions in them:
        `[num_blocks * block_size]`, or `[num_rows, 1, num_blocks * block_size]` where rows begin at different ones."""
        tables, seq_lens = layout.block_tables[rows], layout.seq_lens[rows]
        if first_blocks is None:
            width = -(-int(seq_lens.max()) // self.block_size)
            return tables[:, :width], torch.arange(width * self.block_size, device=tables.device)
        first = first_blocks[rows]
        width = int((-(-seq_lens // self.block_size) - first).max())
        starts = torch.from_numpy(first * self.block_size).to(tables.device)
        key = starts[:, None, None] + torch.arange(width * self.block_size, device=tables.device)
        return gather_tables(tables, first, width), key

    def write_kv(self, kv: torch.Tensor, slots: torch.Tensor, layer: KVLayer) -> None:
        """See `AttentionBackend.write_kv`."""
        kv_write_reference(kv, slots, layer.slots)

    def attend(self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, TorchMetadata)
        outputs = [self._attend_group(query, layer.data, group) for group in metadata.groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_group(self, query: torch.Tensor, data: torch.Tensor, group: RowGroup) -> torch.Tensor:
        num_heads, head_dim = query.shape[1:]
        num_tokens = group.num_rows * group.query_len
        rows = query[group.first_token : group.first_token + num_tokens]
        rows = rows.view(group.num_rows, group.query_len, num_heads, head_dim).transpose(1, 2)
        gathered = data.index_select(0, group.blocks).view(group.num_rows, -1, *data.shape[2:])
        # Padding positions hold what an earlier owner of the block left there, always finite numbers, so that the
        # mask's -inf is enough to hide them.
        key, value = gathered[:, : group.padded_len].unbind(2)
        output = F.scaled_dot_product_attention(
            rows,
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=group.mask,
            is_causal=group.mask is None,
            enable_gqa=num_heads != data.shape[3],
        )
        return output.transpose(1, 2).reshape(num_tokens, num_heads * head_dim)


def first_visible_blocks(layout: RowLayout, pattern: AttentionPattern, block_size: int) -> np.ndarray | None:
    """Index in its table of the first block that any query of a row sees: int64 `[num_rows]`; None where that is the
    first for every row."""
    if pattern.sliding_window is None:
        return None
    first_query = layout.seq_lens - layout.query_lens
    first_blocks: np.ndarray = np.maximum(first_query - pattern.sliding_window + 1, 0) // block_size
    return first_blocks if first_blocks.any() else None


def gather_tables(tables: torch.Tensor, first_blocks: np.ndarray, num_blocks: int) -> torch.Tensor:
    """The `num_blocks` entries from `first_blocks` on of each row of `tables`: `[num_rows, num_blocks]`.

    What lies past a row's end is hidden by its mask; past the end of the table its last entry stands in.
    """
    columns = np.minimum(first_blocks[:, None] + np.arange(num_blocks), tables.shape[1] - 1)
    return tables.gather(1, torch.from_numpy(columns).to(tables.device))


def split_groups(query_lens: np.ndarray, seq_lens: np.ndarray) -> list[int]:
    """How many neighbouring rows go into each group: equal query lengths, and padding within `MAX_PADDING`.

    query_lens, seq_lens: `[num_rows]`, the second without what a window hides. The caller orders rows so that alike
    ones are neighbours.
    """
    sizes: list[int] = []
    total, longest = 0, 0
    for row in range(len(query_lens)):
        length = int(seq_lens[row])
        if sizes and query_lens[row] == query_lens[row - 1]:
            padded = max(longest, length) * (sizes[-1] + 1)
            if padded <= MAX_PADDING * (total + length) + PADDING_ALLOWANCE:
                sizes[-1] += 1
                total, longest = total + length, max(longest, length)
                continue
        sizes.append(1)
        total, longest = length, length
    return sizes

"""Paged attention in torch equals dense attention, row by row, however rows are grouped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionPattern, KVLayer, RowLayout
from dflash_backend.attention.torch_backend import TorchBackend, split_groups
from tests.paged import BLOCK_SIZE, NUM_BLOCKS, block_tables


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of one row: query `[q, heads, dim]` over key, value `[n, kv_heads, dim]`, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    if causal:
        first = len(key) - len(query)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(first + 1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1], [1]), ([5], [5]), ([1, 1, 1], [9, 10, 12]), ([4, 4, 3, 11], [4, 15, 3, 15]), ([3, 3], [16, 5])],
)
def test_paged_attention_equals_dense(query_lens: list[int], seq_lens: list[int], kv_heads: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    backend, tables = TorchBackend(BLOCK_SIZE), block_tables(4)
    layer = KVLayer(torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, kv_heads, 8, generator=generator))
    query = torch.randn(sum(query_lens), 4, 8, generator=generator)
    expected, first = [], 0
    for row, (q, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots = torch.from_numpy(tables[row, np.arange(n) // BLOCK_SIZE] * BLOCK_SIZE + np.arange(n) % BLOCK_SIZE)
        kv = torch.randn(n, 2, kv_heads, 8, generator=generator)
        backend.write_kv(kv, slots, layer)
        expected.append(dense(query[first : first + q], kv[:, 0], kv[:, 1], causal))
        first += q
    layout = RowLayout(np.array(query_lens), np.array(seq_lens), torch.from_numpy(tables[: len(seq_lens)]))
    actual = backend.attend(query, layer, backend.prepare(layout, AttentionPattern(causal), torch.float32))
    torch.testing.assert_close(actual, torch.cat(expected).float(), atol=1e-5, rtol=1e-5)


def test_rows_are_grouped_by_query_length_and_not_padded_much() -> None:
    assert split_groups(np.array([1, 1, 1]), np.array([100, 110, 120])) == [3]
    assert split_groups(np.array([1, 1, 4]), np.array([100, 110, 110])) == [2, 1]
    assert split_groups(np.array([1, 1, 1]), np.array([100, 110, 2000])) == [2, 1]

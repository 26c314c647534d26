"""Attention for `batch_invariant` in torch: it is attention, and a query has the same bits however it comes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBatch, AttentionPattern, KVLayer, invariant_torch
from dflash_backend.attention.invariant_torch import TILE_KEYS, TILE_LINES
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.paged_attention import paged_attention_reference

HEAD_DIM, LONGEST = 8, 4 * TILE_KEYS
PATTERNS = [
    AttentionPattern(True),
    AttentionPattern(True, 1),
    AttentionPattern(True, 70),
    AttentionPattern(True, TILE_KEYS + 30),
    AttentionPattern(False),
    AttentionPattern(False, 90),
    AttentionPattern(True, None, sinks=True),
    AttentionPattern(True, 70, sinks=True),
]
# Lengths in queries, and at the end of the row, around the borders of tiles.
ROWS = [
    ([1], [1]),
    ([16, 16, 16], [16, TILE_KEYS, TILE_KEYS + 1]),
    ([1, 1, 1, 1], [1, TILE_KEYS + 7, 300, LONGEST]),
    ([9, 200, 3], [400, 201, TILE_KEYS + 2]),
    ([LONGEST], [LONGEST]),
]


class Memory:
    """Rows of one request each, over scattered blocks that they share with nobody."""

    def __init__(self, num_rows: int, block_size: int, kv_heads: int, dtype: torch.dtype, heads: int = 4) -> None:
        generator = torch.Generator().manual_seed(2)
        width = -(-LONGEST // block_size)
        order = np.random.default_rng(3).permutation(num_rows * width)
        self.tables = torch.from_numpy(order.reshape(num_rows, width).astype(np.int64))
        shape = (num_rows * width, block_size, 2, kv_heads, HEAD_DIM)
        self.layer = KVLayer(torch.randn(shape, generator=generator).to(dtype))
        self.sinks = 4 + torch.randn(heads, generator=generator).to(dtype)
        self.query = torch.randn(num_rows, LONGEST, heads, HEAD_DIM, generator=generator).to(dtype)
        self.backend = TorchBackend(block_size).batch_invariant()

    def rows(self, rows: list[int], query_lens: list[int], seq_lens: list[int]) -> tuple[torch.Tensor, AttentionBatch]:
        """The last `query_lens` queries of the first `seq_lens` positions of `rows`, and their layout."""
        spans = zip(rows, query_lens, seq_lens, strict=True)
        query = torch.cat([self.query[row, end - count : end] for row, count, end in spans])
        return query, AttentionBatch(np.array(query_lens), np.array(seq_lens), self.tables[rows])

    def attend(
        self, rows: list[int], query_lens: list[int], seq_lens: list[int], pattern: AttentionPattern
    ) -> torch.Tensor:
        """The output of these rows' queries, behind one another."""
        query, layout = self.rows(rows, query_lens, seq_lens)
        prepared = self.backend.prepare(layout, pattern, query.dtype)
        return self.backend.attend(query, self.layer, prepared, self.sinks if pattern.sinks else None)


BLOCKS = [(4, 2), (24, 1), (256, 4)]
# Each pair of two of the three; all of them by night.
CASES = [
    pytest.param(
        *BLOCKS[i],
        *ROWS[j],
        PATTERNS[k],
        marks=[] if (i + j + k) % 3 == 0 else pytest.mark.nightly,
    )
    for i in range(len(BLOCKS))
    for j in range(len(ROWS))
    for k in range(len(PATTERNS))
]


@pytest.mark.parametrize(("block_size", "kv_heads", "query_lens", "seq_lens", "pattern"), CASES)
def test_it_is_attention(
    query_lens: list[int], seq_lens: list[int], block_size: int, kv_heads: int, pattern: AttentionPattern
) -> None:
    memory, numbers = Memory(4, block_size, kv_heads, torch.float32), list(range(len(query_lens)))
    actual = memory.attend(numbers, query_lens, seq_lens, pattern)
    query, layout = memory.rows(numbers, query_lens, seq_lens)
    starts = np.cumsum(query_lens) - query_lens
    rows = PagedBatch(*(torch.tensor(column) for column in (starts, query_lens, seq_lens)), layout.block_tables)
    expected = paged_attention_reference(
        query.double(),
        memory.layer.data.double(),
        rows,
        pattern.causal,
        pattern.sliding_window,
        memory.sinks if pattern.sinks else None,
    )
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


SEEN = [pattern for pattern in PATTERNS if pattern.causal]
# By day one number of threads and heads with each pattern in float32, and another in bfloat16.
THREADS = [(1, 4), (2, 4), (1, 6)]
WITH_THREADS = [
    pytest.param(
        dtype,
        SEEN[i],
        *THREADS[j],
        marks=[] if (i + j + half) % 3 == 0 and (half, i, j) != (1, 1, 1) else pytest.mark.nightly,
    )
    for half, dtype in enumerate([torch.float32, torch.bfloat16])
    for i in range(len(SEEN))
    for j in range(len(THREADS))
]


@pytest.mark.parametrize(("dtype", "pattern", "threads", "heads"), WITH_THREADS)
def test_a_query_has_the_same_bits_alone_in_any_chunk_and_beside_any_rows(
    dtype: torch.dtype, pattern: AttentionPattern, threads: int, heads: int
) -> None:
    memory, before = Memory(3, 16, 2, dtype, heads), torch.get_num_threads()
    torch.set_num_threads(threads)
    whole = memory.attend([1], [LONGEST], [LONGEST], pattern)
    for end in (1, 5, TILE_KEYS, TILE_KEYS + 1, 300, LONGEST):
        assert torch.equal(memory.attend([1], [1], [end], pattern)[0], whole[end - 1]), end
    for first, end in ((0, 100), (100, 130), (117, 259), (300, LONGEST)):
        assert torch.equal(memory.attend([1], [end - first], [end], pattern), whole[first:end]), (first, end)
    for others in ([1, 1], [16, 3], [200, 200]):
        together = memory.attend([0, 1, 2], [others[0], 16, others[1]], [others[0], 272, LONGEST], pattern)
        assert torch.equal(together[others[0] : others[0] + 16], whole[256:272]), others
    torch.set_num_threads(before)


@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [200, 9, 3]])
def test_products_are_as_high_whatever_rows_have(query_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may sum rows of another number of them in another order: some do, and some only on some processors."""
    products, heights = invariant_torch.products, set[int]()

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        heights.add(left.shape[-2])
        return products(left, right)

    monkeypatch.setattr(invariant_torch, "products", watched)
    memory = Memory(3, 16, 2, torch.float32)
    memory.attend(list(range(len(query_lens))), query_lens, [300] * len(query_lens), PATTERNS[0])
    assert heights == {TILE_LINES}

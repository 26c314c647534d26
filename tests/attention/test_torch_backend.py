"""Paged attention in torch equals attention row by row, whatever a query sees and however rows are grouped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBatch, AttentionPattern, KVLayer, torch_backend
from dflash_backend.attention.torch_backend import TorchBackend, TorchMetadata, first_visible_blocks, split_groups
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.paged_attention import paged_attention_reference
from tests.support.paged import BLOCK_SIZE, NUM_BLOCKS, block_tables

HEAD_DIM = 8
ROWS = [
    ([1], [1]),
    ([5], [5]),
    ([1, 1, 1], [9, 10, 12]),
    ([4, 4, 3, 11], [4, 15, 3, 15]),
    ([3, 3], [16, 5]),
    # As a decode step has them: one length of query, contexts far apart.
    ([1, 1, 1, 1], [1, 4, 37, 61]),
    ([9, 9, 9, 9], [9, 33, 38, 64]),
    ([23], [64]),
]


def run_and_compare(
    query_lens: list[int],
    seq_lens: list[int],
    pattern: AttentionPattern,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> TorchMetadata:
    """Attend over scattered blocks and compare with the kernels' reference in float64, a row at a time."""
    generator = torch.Generator().manual_seed(1)
    backend, tables = TorchBackend(BLOCK_SIZE), torch.from_numpy(block_tables(4)[: len(seq_lens)])
    layer = KVLayer(torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, kv_heads, HEAD_DIM, generator=generator).to(dtype))
    query = torch.randn(sum(query_lens), 4, HEAD_DIM, generator=generator).to(dtype)
    sinks = torch.randn(4, generator=generator).to(dtype) + 1 if pattern.sinks else None
    layout = AttentionBatch(np.array(query_lens), np.array(seq_lens), tables)
    metadata = backend.prepare(layout, pattern, dtype)
    assert isinstance(metadata, TorchMetadata)
    actual = backend.attend(query, layer, metadata, sinks)
    starts = np.cumsum(query_lens) - query_lens
    rows = PagedBatch(*(torch.tensor(column) for column in (starts, query_lens, seq_lens)), tables)
    causal, window = pattern.causal, pattern.sliding_window
    expected = paged_attention_reference(query.double(), layer.data.double(), rows, causal, window, sinks)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    return metadata


@pytest.mark.parametrize("causal", [True, False])
# None, itself alone, less than a block, a block, less than some rows, all of the longest row, more than any row.
@pytest.mark.parametrize("window", [None, 1, 3, BLOCK_SIZE, 11, 64, 1000])
@pytest.mark.parametrize(("query_lens", "seq_lens"), ROWS)
def test_batches_of_rows_equal_rows_one_by_one(
    query_lens: list[int], seq_lens: list[int], window: int | None, causal: bool
) -> None:
    run_and_compare(query_lens, seq_lens, AttentionPattern(causal, window))


@pytest.mark.parametrize("window", [None, 1, BLOCK_SIZE, 11])
@pytest.mark.parametrize(("query_lens", "seq_lens"), ROWS)
def test_layers_with_sinks_have_them_in_every_softmax(
    query_lens: list[int], seq_lens: list[int], window: int | None
) -> None:
    run_and_compare(query_lens, seq_lens, AttentionPattern(True, window, sinks=True))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    "pattern", [AttentionPattern(True), AttentionPattern(False, 6), AttentionPattern(True, None, sinks=True)]
)
def test_any_grouping_of_heads(kv_heads: int, pattern: AttentionPattern) -> None:
    run_and_compare([4, 4, 3, 11], [4, 15, 3, 15], pattern, kv_heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "pattern",
    [AttentionPattern(True), AttentionPattern(False), AttentionPattern(True, 6), AttentionPattern(True, 6, True)],
)
def test_half_precision_within_its_rounding(dtype: torch.dtype, pattern: AttentionPattern) -> None:
    run_and_compare([9, 9, 23], [9, 33, 38], pattern, dtype=dtype, tolerance=2e-2)


def test_only_blocks_that_a_query_sees_are_gathered() -> None:
    metadata = run_and_compare([1, 1, 1, 1], [1, 4, 37, 61], AttentionPattern(True, 5))
    # Five positions lie in at most two blocks of four; rows that see equally much are one batch.
    (group,) = metadata.groups
    assert group.padded_len == 2 * BLOCK_SIZE


def test_the_first_block_seen_is_that_of_the_first_querys_window() -> None:
    layout = AttentionBatch(np.array([1, 1, 3]), np.array([8, 9, 11]), torch.zeros(3, 4, dtype=torch.int64))

    def first_blocks(window: int | None) -> list[int] | None:
        blocks = first_visible_blocks(layout, AttentionPattern(True, window), 4)
        return None if blocks is None else blocks.tolist()

    # With a window of 4: positions from 4, 5 and, for the queries 8, 9 and 10, from 5 on.
    assert first_blocks(4) == [1, 1, 1]
    assert first_blocks(5) == [0, 1, 1]
    assert first_blocks(9) is None
    assert first_blocks(None) is None


@pytest.mark.parametrize("pattern", [AttentionPattern(True), AttentionPattern(False), AttentionPattern(True, 6)])
def test_rows_that_verify_different_numbers_of_drafts_are_one_batch(pattern: AttentionPattern) -> None:
    metadata = run_and_compare([16, 13, 16, 9], [40, 33, 16, 38], pattern)
    assert [(group.num_rows, group.query_len, group.num_tokens) for group in metadata.groups] == [(4, 16, 54)]


def test_rows_are_grouped_as_long_as_they_are_not_padded_much() -> None:
    assert split_groups(np.array([1, 1, 1]), np.array([100, 110, 120])) == [3]
    assert split_groups(np.array([1, 1, 4]), np.array([100, 110, 110])) == [3]
    assert split_groups(np.array([1, 1, 40]), np.array([100, 110, 110])) == [2, 1]
    assert split_groups(np.array([1, 1, 1]), np.array([100, 110, 2000])) == [2, 1]


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_of_several_pieces_are_as_they_are_alone(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes that serve: 7 rows of 2 MB are gathered as 4 and 3, both to the thread's own memory, and one alone
    to a buffer from the heap."""
    generator, num_rows, heads, head_dim = torch.Generator().manual_seed(1), 7, 4, 64
    backend, pieces = TorchBackend(8), list[tuple[int, bool]]()
    layer = KVLayer(torch.randn(260, 8, 2, heads, head_dim, generator=generator))
    query = torch.randn(num_rows, heads, head_dim, generator=generator)
    tables = torch.stack([torch.randperm(260, generator=generator)[:125] for _ in range(num_rows)])
    pattern = AttentionPattern(True, sinks=sinks)
    of_heads = torch.randn(heads, generator=generator) if sinks else None
    empty = torch_backend._scratch.empty

    def noted(num_blocks: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        found = empty(num_blocks, num_columns, dtype)
        pieces.append((num_blocks // 125, found is not None))
        return found

    def attend(rows: slice) -> torch.Tensor:
        lens = np.array([1000] * len(query[rows]))
        metadata = backend.prepare(AttentionBatch(np.ones_like(lens), lens, tables[rows]), pattern, torch.float32)
        return backend.attend(query[rows], layer, metadata, of_heads)

    monkeypatch.setattr(torch_backend._scratch, "empty", noted)
    together = attend(slice(None))
    assert pieces == [(4, True), (3, True)]
    alone = [attend(slice(row, row + 1)) for row in range(num_rows)]
    torch.testing.assert_close(together, torch.cat(alone))
    assert pieces[2:] == [(1, False)] * num_rows

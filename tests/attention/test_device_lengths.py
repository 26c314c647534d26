"""Backends that know only bounds of the rows' lengths give what they give when they know the lengths themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBackend, AttentionBatch, AttentionPattern, DeviceLengths, KVLayer
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.attention.triton_backend import TritonBackend
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.paged_attention import paged_attention_reference
from dflash_kernels.paged_attention_launch import HeadShape
from tests.support.paged import BLOCK_SIZE, NUM_BLOCKS, block_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
PATTERNS = [AttentionPattern(causal, window) for causal in (True, False) for window in (None, 1, 5, 1000)]
PATTERNS += [AttentionPattern(True, window, sinks=True) for window in (None, 5)]
SINKS = torch.tensor([0.5, -1.0, 2.0, 1.0])
BACKENDS: list[type[AttentionBackend]] = [TorchBackend, TritonBackend]


@dataclass(frozen=True)
class Rows:
    """Bounds and real lengths of rows whose tokens are `spacing` apart."""

    query_bound: list[int]
    seq_bound: list[int]
    query_lens: list[int]
    seq_lens: list[int]
    query_start: list[int]
    num_tokens: int

    @property
    def real(self) -> list[int]:
        return [row for row, query_len in enumerate(self.query_lens) if query_len]

    def tokens(self, row: int) -> slice:
        return slice(self.query_start[row], self.query_start[row] + self.query_lens[row])

    def layout(self, tables: torch.Tensor) -> AttentionBatch:
        columns = (self.query_start, self.query_lens, self.seq_lens)
        device = DeviceLengths(*(torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns))
        slack = max(self.seq_bound[row] - self.seq_lens[row] for row in self.real)
        tables = tables[: len(self.seq_bound)].int().to(DEVICE)
        return AttentionBatch(np.array(self.query_bound), np.array(self.seq_bound), tables, device, slack)


# A decode step whose drafts are not all known to stand, with a padding row within and one at the end.
DECODE = Rows([4, 4, 4, 4], [30, 13, 9, 4], [4, 3, 0, 0], [27, 13, 0, 0], [0, 4, 8, 12], 16)
# Prefill chunks and decode rows together, padding tokens between them and at the end.
MIXED = Rows([11, 2, 2, 5, 1], [11, 30, 12, 21, 1], [11, 2, 1, 5, 1], [11, 28, 10, 20, 1], [0, 13, 15, 17, 25], 29)


def run(
    backend: AttentionBackend, layout: AttentionBatch, query: torch.Tensor, layer: KVLayer, pattern: AttentionPattern
):
    metadata = backend.prepare(layout, pattern, query.dtype)
    sinks = SINKS.to(DEVICE) if pattern.sinks else None
    return backend.attend(query.to(DEVICE), KVLayer(layer.data.to(DEVICE)), metadata, sinks).cpu()


def noise(num_tokens: int) -> tuple[torch.Tensor, KVLayer, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    layer = KVLayer(torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM, generator=generator))
    query = torch.randn(num_tokens, HEADS, HEAD_DIM, generator=generator)
    return query, layer, torch.from_numpy(block_tables(5))


def assert_rows_equal_reference(
    actual: torch.Tensor,
    rows: Rows,
    query: torch.Tensor,
    layer: KVLayer,
    tables: torch.Tensor,
    pattern: AttentionPattern,
) -> None:
    """The output of each real row is that of the kernels' reference, which is told the lengths."""
    columns = (rows.query_start, rows.query_lens, rows.seq_lens)
    paged = PagedBatch(*(torch.tensor(column) for column in columns), tables)
    causal, window, sinks = pattern.causal, pattern.sliding_window, SINKS if pattern.sinks else None
    expected = paged_attention_reference(query.double(), layer.data.double(), paged, causal, window, sinks).float()
    for row in rows.real:
        torch.testing.assert_close(actual[rows.tokens(row)], expected[rows.tokens(row)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_lengths_of_the_device_count_and_padding_is_finite(
    backend: type[AttentionBackend], pattern: AttentionPattern, rows: Rows
) -> None:
    query, layer, tables = noise(rows.num_tokens)
    actual = run(backend(BLOCK_SIZE), rows.layout(tables), query, layer, pattern)
    assert_rows_equal_reference(actual, rows, query, layer, tables, pattern)
    assert actual.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_row_past_its_bound_and_its_table_harms_no_other(
    backend: type[AttentionBackend], pattern: AttentionPattern
) -> None:
    query, layer, tables = noise(DECODE.num_tokens)
    ended = replace(DECODE, query_lens=[4, 3, 4, 0], seq_lens=[27, 13, 10 * BLOCK_SIZE * tables.shape[1], 0])
    layout = ended.layout(tables)
    layout = replace(layout, max_overestimate=DECODE.layout(tables).max_overestimate)
    layout.block_tables[2, 1:] = -1
    actual = run(backend(BLOCK_SIZE), layout, query, layer, pattern)
    assert_rows_equal_reference(actual, DECODE, query, layer, tables, pattern)
    assert actual.isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_triton_equals_torch_on_rows_whose_lengths_the_host_knows(seed: int) -> None:
    """Several layers of a pass share metadata, also where their heads differ (target and drafter)."""
    rng = np.random.default_rng(seed)
    seq_lens = rng.integers(1, 40, size=4)
    query_lens = np.minimum(rng.integers(1, 8, size=4), seq_lens)
    pattern = AttentionPattern(bool(rng.integers(2)), int(rng.integers(1, 20)) if rng.integers(2) else None)
    layout = AttentionBatch(query_lens, seq_lens, torch.from_numpy(block_tables(4)).to(DEVICE))
    ours, plain = TritonBackend(BLOCK_SIZE), TorchBackend(BLOCK_SIZE)
    metadata = [backend.prepare(layout, pattern, torch.float32) for backend in (ours, plain)]
    generator = torch.Generator().manual_seed(seed)
    for heads, kv_heads in ((2, 1), (3, 3)):
        data = torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, kv_heads, HEAD_DIM, generator=generator)
        query = torch.randn(query_lens.sum(), heads, HEAD_DIM, generator=generator).to(DEVICE)
        actual, expected = (
            backend.attend(query, KVLayer(data.to(DEVICE)), prepared)
            for backend, prepared in zip((ours, plain), metadata, strict=True)
        )
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_metadata_of_rows_with_one_bound_copies_nothing_to_the_device() -> None:
    """So that it can be prepared while a graph is captured."""
    metadata = TritonBackend(BLOCK_SIZE).prepare(DECODE.layout(noise(0)[2]), AttentionPattern(True), torch.float32)
    (prepared,) = metadata.launches_for(HeadShape(HEADS, KV_HEADS, HEAD_DIM, 4))
    assert prepared.tiles is None
    assert prepared.schedule is not None, "made on the device"

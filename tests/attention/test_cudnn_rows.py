"""The pieces in which cuDNN attends a row: each query sees each of its positions once, by few shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_backend.attention import KVLayer, cudnn_rows
from dflash_backend.attention.cudnn_rows import MOST_PAIRS, RowPieces, pays, row_pieces, shapes, square_size
from tests.attention.dense_attention import dense_attention, small_pieces


def lines_of(pieces: RowPieces) -> np.ndarray:
    """How often each query `[end - start]` sees each position `[num_positions]`."""
    num_queries = pieces.end - pieces.start
    seen = np.zeros((num_queries, pieces.num_positions), dtype=int)
    for query in range(num_queries):
        seen[query, pieces.begin : pieces.start + query + 1] += 1
    for piece in pieces.prefix:
        columns = slice(piece.first_position, piece.first_position + piece.num_positions)
        seen[piece.first_query : piece.first_query + piece.num_queries, columns] += 1
    return seen


def test_every_query_sees_what_comes_up_to_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    rng = np.random.default_rng(1)
    for _ in range(200):
        start, count = int(rng.integers(0, 200)), int(rng.integers(1, 150))
        pieces = cudnn_rows.row_pieces(start, start + count)
        assert pieces.begin <= start
        assert pieces.begin + pieces.square >= start + count
        expected = np.arange(pieces.num_positions)[None, :] <= start + np.arange(count)[:, None]
        assert (lines_of(pieces) == expected).all(), (start, count)
        first = start - pieces.begin
        assert all(first + piece.first_query + piece.num_queries <= pieces.num_queries for piece in pieces.prefix)
        assert pieces.num_queries >= pieces.square


@pytest.mark.parametrize(
    ("start", "end", "begin", "square", "prefix"),
    [
        (0, 2048, 0, 2048, []),
        (0, 2049, 0, 2304, []),
        (0, 8192, 0, 8192, []),
        # Chunks of a prompt of 32k.
        (8192, 16384, 8192, 8192, [(8192, 8192)]),
        (24576, 32768, 24576, 8192, [(8192, 16384), (8192, 8192)]),
        # A chunk beside decode rows.
        (8064, 16128, 6144, 10240, [(8192, 4096), (8192, 2048)]),
        (3333, 9000, 2048, 7168, [(4096, 2048), (1024, 2048), (1024, 2048)]),
    ],
)
def test_pieces_of_chunks(start: int, end: int, begin: int, square: int, prefix: list[tuple[int, int]]) -> None:
    pieces = row_pieces(start, end)
    assert (pieces.begin, pieces.square) == (begin, square)
    assert [(piece.num_queries, piece.num_positions) for piece in pieces.prefix] == prefix


def test_shapes_are_few_and_known_at_the_start() -> None:
    """Of all chunks of prompts that are whole, or follow cached blocks, up to 8,192 tokens and 40,960 positions."""
    known = set(shapes(8192, 40960))
    assert len(known) == len(list(shapes(8192, 40960))) == 45
    rng = np.random.default_rng(2)
    squares, others = set(), set()
    for _ in range(3000):
        count = int(rng.integers(1024, 8193))
        start = int(rng.integers(0, 40961 - count)) * int(rng.integers(2))
        pieces = row_pieces(start, start + count)
        squares.add(pieces.square)
        others |= {(piece.num_queries, piece.num_positions, False) for piece in pieces.prefix}
        if not start:
            assert (pieces.square, pieces.square, True) in known
    assert others <= known
    assert len(squares) <= 32, "those that begin before the chunk are longer than it"


def test_a_row_is_left_to_our_kernel_where_padding_costs_more_than_is_won() -> None:
    assert pays(0, 2048)
    assert pays(24576, 24576 + 1024)
    assert not pays(24576, 24576 + 512), "half of the queries would be padding"
    for start, count in ((0, 2049), (8064, 8064), (3333, 5667)):
        ratio = row_pieces(start, start + count).num_pairs / (count * (start + count / 2))
        assert 1 <= ratio <= MOST_PAIRS
        assert pays(start, start + count)


def test_sizes_of_squares() -> None:
    assert [square_size(n) for n in (1, 256, 257, 4096, 4097, 8193, 40000)] == [256, 256, 512, 4096, 4608, 9216, 40960]


def test_plans_are_made_for_the_likeliest_shapes_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def noting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
        asked.append((query.shape[2], key.shape[2], causal, *query.shape[1::2], *key.shape[1::2]))
        return query, query.new_zeros(*query.shape[:3], 1)

    small_pieces(monkeypatch)
    monkeypatch.setattr(cudnn_rows, "attention_of_cudnn", noting)
    query, layer = torch.ones(1, 4, 16), KVLayer(torch.ones(3, 4, 2, 2, 16))
    cudnn_rows.warm_up(query, layer, 32, 64)
    assert [each[:3] for each in asked] == list(shapes(32, 64))
    assert {each[3:] for each in asked} == {(4, 16, 2, 16)}
    assert [each[:3] for each in asked[:5]] == [
        (32, 32, True), (32, 8, False), (32, 16, False), (32, 32, False), (32, 64, False)
    ]  # fmt: skip
    asked.clear()
    monkeypatch.setattr(cudnn_rows, "WARM_UP_S", -1.0)
    cudnn_rows.warm_up(query, layer, 32, 64)
    assert asked == []


def test_results_of_pieces_are_merged_without_rounding_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, over many pieces: as far off as the rounding of each piece, not of each merge."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(cudnn_rows, "attention_of_cudnn", dense_attention)
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(24, 4, 16, generator=generator).bfloat16()
    kv = torch.randn(2064, 2, 2, 16, generator=generator).bfloat16()
    pieces = cudnn_rows._pieces_from(2040, 2040, 2064)
    assert len(pieces.prefix) == 16
    got = cudnn_rows.attend_row(query, kv[: pieces.num_positions], pieces, None)
    written = torch.empty_like(query)
    assert cudnn_rows.attend_row(query, kv[: pieces.num_positions], pieces, written) is written
    expected = torch.cat(
        [dense_attention(query[None, i].float().transpose(0, 1)[None], *(
            kv[: 2041 + i, j].float().transpose(0, 1)[None] for j in range(2)), False)[0][0, :, 0][None]
         for i in range(24)]
    )  # fmt: skip
    assert torch.equal(got, written)
    off = (got.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert off < 3.5e-3, "0.0023; rounded after each merge 0.0048"

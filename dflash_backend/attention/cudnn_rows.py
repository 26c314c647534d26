"""Attention of a row of many queries by cuDNN, which torch brings along.

Its kernels take keys and values that lie behind one another, and their causal mask is for queries and keys that begin
at the same position. For each new shape cuDNN makes a plan, tens of milliseconds of the host. So a row is attended in
pieces of few shapes: a causal square, which may begin before the row's first query and end after its last one, and the
positions before the square, which all queries see, in pieces of powers of two. What queries that do not exist give is
dropped, and the pieces' results are merged by the logarithms of their denominators.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dflash_backend.attention.interface import KVLayer
from dflash_kernels.attention_merge import LOG2_E
from dflash_kernels.shared_prefix import merge_parts

logger = logging.getLogger(__name__)

# Sizes of a square are multiples of this, and of a sixteenth of the next power of two.
SQUARE, SQUARES_PER_POWER = 256, 16
# The smallest piece before the square: positions, and queries that are attended over them.
PIECE = 1024
# Queries are padded to a power of two for such a piece where that adds at most this part of them.
MOST_PADDING = 1 / 8
# What a piece costs besides its pairs of a query and a position: the copies of a merge, as positions that each query
# sees, and a launch, as pairs. By the bytes and the rates of an H200; not measured.
MERGE_POSITIONS, LAUNCH_PAIRS = 300, 1 << 18
# Pairs of a row's pieces over those of the row, up to which cuDNN is faster than our kernel, whose rate is 0.56 of
# cuDNN's (H200).
MOST_PAIRS = 1.5
# Plans are made at the start for so long.
WARM_UP_S = 2.0
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 128, 8


@dataclass(frozen=True)
class PrefixPiece:
    """Queries of a row, counted from its first one, over positions before its square; all of them see all."""

    first_query: int
    num_queries: int
    first_position: int
    num_positions: int


@dataclass(frozen=True)
class RowPieces:
    """How a row's queries at `[start, end)` are attended. begin: the position at which the square begins. square: its
    size. prefix: pieces before it, those of the same queries behind one another. num_pairs: what they cost."""

    start: int
    end: int
    begin: int
    square: int
    prefix: tuple[PrefixPiece, ...]
    num_pairs: float

    @property
    def num_positions(self) -> int:
        """Positions whose keys and values are read, from 0 on; from `end` on they do not count."""
        return self.begin + self.square

    @property
    def num_queries(self) -> int:
        """Queries that are read, from position `begin` on."""
        last = max((piece.first_query + piece.num_queries for piece in self.prefix), default=0)
        return max(self.square, self.start - self.begin + last)


def attention_of_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """query: `[1, num_heads, n, head_dim]`; key, value: `[1, num_kv_heads, m, head_dim]`; causal: query i sees the
    first i + 1 keys. The result as `query`, and the natural logarithms of its denominators, float32 `[1, num_heads, n,
    1]`."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=query.shape[3] ** -0.5
    )
    return found[0], found[1]


@functools.lru_cache(maxsize=1024)
def row_pieces(start: int, end: int) -> RowPieces:
    """The pieces of a row with queries at `[start, end)`, the cheapest of some choices of where the square begins."""
    begins, step = {0}, PIECE
    while step <= start:
        begins.add(start // step * step)
        step *= 2
    found = [_pieces_from(begin, start, end) for begin in sorted(begins, reverse=True)]
    return min(found, key=lambda pieces: pieces.num_pairs)


def _pieces_from(begin: int, start: int, end: int) -> RowPieces:
    square = square_size(end - begin)
    positions = list(_powers(begin))
    prefix, query, pairs = [], 0, square * square / 2 + LAUNCH_PAIRS
    for num_queries in _query_sizes(end - start) if positions else ():
        position = 0
        for num_positions in positions:
            prefix.append(PrefixPiece(query, num_queries, position, num_positions))
            pairs += num_queries * (num_positions + MERGE_POSITIONS) + LAUNCH_PAIRS
            position += num_positions
        query += num_queries
    return RowPieces(start, end, begin, square, tuple(prefix), pairs)


def square_size(num_queries: int) -> int:
    """The size of a square that holds as many."""
    step = max(SQUARE, (1 << (num_queries - 1).bit_length()) // SQUARES_PER_POWER)
    return -(-num_queries // step) * step


def _powers(number: int) -> Iterator[int]:
    """The powers of two that add up to it, the largest first."""
    while number:
        power = 1 << (number.bit_length() - 1)
        yield power
        number -= power


def _query_sizes(num_queries: int) -> Iterator[int]:
    """Powers of two from `PIECE` on that hold as many together."""
    while num_queries > 0:
        larger = max(PIECE, 1 << (num_queries - 1).bit_length())
        is_last = larger == PIECE or larger - num_queries <= MOST_PADDING * num_queries
        yield larger if is_last else larger // 2
        num_queries -= larger if is_last else larger // 2


def pays(start: int, end: int) -> bool:
    """Whether a row with queries at `[start, end)` is attended faster in pieces than by our kernel."""
    num_queries = end - start
    return row_pieces(start, end).num_pairs <= MOST_PAIRS * num_queries * (start + num_queries / 2)


def attend_row(query: torch.Tensor, kv: torch.Tensor, pieces: RowPieces, out: torch.Tensor | None) -> torch.Tensor:
    """The attention of a row's queries `[end - start, num_heads, head_dim]`, of the same shape. kv: keys and values of
    its positions, `[pieces.num_positions, 2, num_kv_heads, head_dim]`; those from `pieces.end` on must be finite. out:
    where to write, contiguous; None for anywhere."""
    query = query.contiguous()  # a plan is for strides too
    num_queries, skipped = len(query), pieces.start - pieces.begin
    if pieces.num_queries != num_queries:
        place = torch.arange(pieces.num_queries, device=query.device) - skipped
        queries = query.index_select(0, place.clamp(min=0, max=num_queries - 1))
    else:
        queries = query
    attended, lse = _attend(queries[: pieces.square], kv[pieces.begin :], causal=True)
    attended, lse = attended[skipped : skipped + num_queries], lse[:, skipped : skipped + num_queries]
    if not pieces.prefix:
        return attended if out is None else out.copy_(attended)
    out = torch.empty_like(query) if out is None else out
    lines, own_lse = attended.reshape(num_queries, -1), _lines(lse)
    for first in sorted({piece.first_query for piece in pieces.prefix}):
        parts = [piece for piece in pieces.prefix if piece.first_query == first]
        rows = slice(first, min(first + parts[0].num_queries, num_queries))
        _merge_prefix(queries[skipped:], kv, parts, lines[rows], own_lse[rows], out[rows].flatten(1))
    return out


def _merge_prefix(
    queries: torch.Tensor,
    kv: torch.Tensor,
    parts: list[PrefixPiece],
    own: torch.Tensor,
    own_lse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attend pieces of the same queries and write to `out` what they and `own` give together: `[n, num_heads *
    head_dim]`, of which there may be fewer than a piece has."""
    together = torch.empty_like(out, dtype=torch.float32) if len(parts) > 1 else out
    for number, part in enumerate(parts):
        asked = queries[part.first_query : part.first_query + part.num_queries]
        seen = kv[part.first_position : part.first_position + part.num_positions]
        attended, lse = _attend(asked, seen, causal=False)
        is_last = number + 1 == len(parts)
        merge_parts(
            own, own_lse, attended[: len(out)].reshape(len(out), -1), _lines(lse[:, : len(out)]),
            out if is_last else together, out_lse=None if is_last else own_lse,
        )  # fmt: skip
        own = together


def _attend(queries: torch.Tensor, kv: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_of_cudnn`, of `[n, num_heads, head_dim]` over `[m, 2, num_kv_heads, head_dim]`: the result as
    `queries`, and logarithms `[num_heads, n]`."""
    key, value = kv.unbind(1)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (queries, key, value))
    attended, lse = attention_of_cudnn(q, k, v, causal)
    return attended[0].transpose(0, 1), lse.view(queries.shape[1], len(queries))


def _lines(lse: torch.Tensor) -> torch.Tensor:
    """Natural logarithms `[num_heads, n]` as `merge_parts` takes them: of two, contiguous `[n, num_heads]`."""
    return (lse.t() * LOG2_E).contiguous()


def shapes(max_tokens: int, max_positions: int) -> Iterator[tuple[int, int, bool]]:
    """Queries, positions and whether they are a square, of all pieces of rows with up to as many queries and
    positions, the likeliest first; but not of squares that begin before a chunk and are longer than it."""
    longest = square_size(min(max_tokens, max_positions))
    sizes = sorted({square_size(number) for number in range(SQUARE, longest + 1, SQUARE)}, reverse=True)
    squares = [(size, size, True) for size in sizes if size >= PIECE]
    queries = sorted({size for n in range(PIECE, longest + 1, PIECE) for size in _query_sizes(n)}, reverse=True)
    positions = [PIECE << i for i in range((max_positions // PIECE).bit_length())]
    pairs = [(size, number, False) for size in queries for number in positions]
    yield from squares[:1]
    yield from pairs[: len(positions)]
    yield from squares[1:]
    yield from pairs[len(positions) :]


def warm_up(query: torch.Tensor, layer: KVLayer, max_tokens: int, max_positions: int) -> None:
    """Compile the merges of pieces and let cuDNN make its plans, for heads as `query` `[n, num_heads, head_dim]` and
    `layer` have them, these as far as `WARM_UP_S` goes; the others are made when they are needed."""
    lines = query.new_zeros(1, query.shape[1] * query.shape[2])
    together, lse = lines.float(), torch.zeros(1, query.shape[1], device=query.device)
    for own, out, out_lse in (
        (lines, lines, None), (lines, together, lse), (together, together, lse), (together, lines, None)
    ):  # fmt: skip
        merge_parts(own, lse, lines, lse, out, out_lse=out_lse)
    began, num_made, todo = time.monotonic(), 0, list(shapes(max_tokens, max_positions))
    for num_queries, num_positions, causal in todo:
        if time.monotonic() - began > WARM_UP_S:
            break
        queries = query.new_zeros(num_queries, *query.shape[1:])
        _attend(queries, layer.data.new_zeros(num_positions, *layer.data.shape[2:]), causal)
        num_made += 1
    logger.info("cuDNN has plans for %d of %d shapes of prompts' attention", num_made, len(todo))

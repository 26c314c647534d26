"""Attention of rows with many queries by packages that are faster there than our kernels: FlashAttention-3 on a Hopper,
else cuDNN through torch on data centres' GPUs, else FlashAttention-2 with KV blocks of multiples of 256.

FlashAttention-3 (as `fa3-fwd` has it, without pages and windows) and cuDNN take keys and values that lie behind one
another, so these are gathered from the blocks first. Decode rows, draft blocks and whatever a CUDA graph runs stay with
our own kernels, and so do short prompts. A package is tried at the start, on random rows, and left alone where it fails
or gives other numbers.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dflash_backend.attention import cudnn_rows
from dflash_backend.attention.interface import AttentionPattern, DeviceLengths, KVLayer, Requirements
from dflash_backend.attention.packed_queries import (
    compact_tokens,
    flash_attn_varlen_func,
    running_sum,
    to_device,
    window_sides,
)
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.paged_attention import paged_attention_reference

logger = logging.getLogger(__name__)

# Positions that a row's queries see in the mean, from which on a package is called: copies and launches cost about
# 110 us a layer, with which a prompt of 2,048 tokens takes as long as by our kernel, and one of 8,192 0.90 of it (an
# H200).
MIN_POSITIONS = 1536
HOPPER_MAJOR = 9
# Compute capabilities on which cuDNN's kernels for prompts beat ours.
CUDNN_CAPABILITIES = {(9, 0), (10, 0)}
# Modules that have FlashAttention-3's `flash_attn_varlen_func`: the distribution fa3-fwd, and FlashAttention's own.
FLASH_ATTENTION_3 = ("fa3_fwd_interface", "flash_attn_interface")
# What FlashAttention-2 wants the size of a KV block to be a multiple of; all take 16-bit types.
BLOCK_MULTIPLE, DTYPES = 256, frozenset({torch.bfloat16, torch.float16})
# The trial's: rows of (queries, positions), heads, KV heads, and how far bf16 may be off. With these rows cuDNN's
# pieces are merged in every way.
TRIAL_ROWS, TRIAL_HEADS, TOLERANCE = ((300, 300), (77, 500), (60, 7300)), (4, 2), 3e-2
TRIAL_SHARPNESS = 2.0


@dataclass(frozen=True)
class LongRows:
    """Rows as a package takes them, R of them with N queries: source, target as in `FlashAttnMetadata`; query_lens,
    seq_lens int32 `[R]`; block_tables int32 `[R, width]`; the pattern. most_queries, most_positions: int64 `[R]`, the
    host's bounds of the lengths. known: whether they are the lengths of all of these rows."""

    source: torch.Tensor
    target: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    most_queries: np.ndarray
    most_positions: np.ndarray
    block_size: int
    pattern: AttentionPattern
    known: bool

    @classmethod
    def of(
        cls,
        rows: PagedBatch,
        index: np.ndarray,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_size: int,
        pattern: AttentionPattern,
        known: bool = False,
    ) -> LongRows:
        """The rows `index` (int64 `[R]`, on the host) of `rows`; query_lens, seq_lens: the host's bounds, int64 of all
        rows."""
        which = to_device(index, rows.seq_lens.device)
        columns = (rows.query_start, rows.query_lens, rows.seq_lens)
        own = DeviceLengths(*(column.index_select(0, which) for column in columns))
        source, target = compact_tokens(own, int(query_lens[index].sum()))
        return cls(
            source=source,
            target=target,
            query_lens=own.query_lens,
            # A row whose request has ended may be longer than its table.
            seq_lens=own.seq_lens.clamp(max=rows.block_tables.shape[1] * block_size),
            block_tables=rows.block_tables.index_select(0, which).int().clamp(min=0),
            most_queries=query_lens[index],
            most_positions=seq_lens[index],
            block_size=block_size,
            pattern=pattern,
            known=known,
        )

    @property
    def queries_of(self) -> Iterator[slice]:
        """The queries of each row, which lie behind one another, where the lengths are known."""
        ends = self.most_queries.cumsum()
        return (slice(int(end - count), int(end)) for count, end in zip(self.most_queries, ends, strict=True))

    @cached_property
    def pieces(self) -> list[tuple[cudnn_rows.RowPieces, torch.Tensor]]:
        """How cuDNN attends each row, and the slots of the positions that it reads."""
        found = []
        for row, (count, end) in enumerate(zip(self.most_queries.tolist(), self.most_positions.tolist(), strict=True)):
            pieces = cudnn_rows.row_pieces(end - count, end)
            found.append((pieces, self._slots(row, pieces.num_positions)))
        return found

    @cached_property
    def groups(self) -> list[KnownRows]:
        """Neighbouring rows, together as long as the longest one at most, with their slots behind one another."""
        found, first, longest = [], 0, int(self.most_positions.max())
        queries = list(self.queries_of)
        for end in range(1, len(queries) + 1):
            is_full = end == len(queries) or int(self.most_positions[first : end + 1].sum()) > longest
            if not is_full:
                continue
            counts, positions = (lens[first:end] for lens in (self.most_queries, self.most_positions))
            query_ends, position_ends = (
                to_device(np.append(0, lens.cumsum()).astype(np.int32), self.source.device)
                for lens in (counts, positions)
            )
            slots = torch.cat([self._slots(row, int(self.most_positions[row])) for row in range(first, end)])
            where = slice(queries[first].start, queries[end - 1].stop)
            found.append(KnownRows(where, query_ends, position_ends, int(counts.max()), int(positions.max()), slots))
            first = end
        return found

    def _slots(self, row: int, num_positions: int) -> torch.Tensor:
        """Slots of a row's first positions: int64 `[num_positions]`; those past its last one have that one's."""
        last = int(self.most_positions[row]) - 1
        position = torch.arange(num_positions, device=self.source.device).clamp(max=last)
        blocks = self.block_tables[row].index_select(0, position // self.block_size).long()
        return blocks * self.block_size + position % self.block_size


@dataclass(frozen=True)
class KnownRows:
    """Some rows whose lengths are known: their queries among those of all; where each one's queries and positions begin
    and the last one's end, int32 `[n + 1]`; the most of each; the slots of their positions."""

    queries: slice
    query_ends: torch.Tensor
    position_ends: torch.Tensor
    max_queries: int
    max_positions: int
    slots: torch.Tensor


@dataclass(frozen=True)
class LongAttention:
    """A package that attends long rows.

    attend: attention of queries `[N, num_heads, head_dim]` that lie behind one another, of the same shape. gathers: it
    is causal without windows, and the host knows its rows' lengths. head_dims: which it takes. pays: whether it is
    worth calling for a row with queries at `[start, end)`. warm_up: see `cudnn_rows.warm_up`.
    """

    name: str
    attend: Callable[[torch.Tensor, KVLayer, LongRows], torch.Tensor]
    gathers: bool = False
    head_dims: Callable[[int], bool] = lambda head_dim: True
    pays: Callable[[int, int], bool] = lambda start, end: True
    warm_up: Callable[[torch.Tensor, KVLayer, int, int], None] = lambda query, layer, most, positions: None

    def takes(self, pattern: AttentionPattern, head_dim: int) -> bool:
        """Whether it attends layers with this pattern and these heads."""
        if pattern.sinks or not self.head_dims(head_dim):
            return False
        return not self.gathers or (pattern.causal and pattern.sliding_window is None)

    def rows(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        known: np.ndarray,
        max_overestimate: int,
        tallest: int,
        window: int | None,
    ) -> np.ndarray:
        """Which rows it attends: int64 `[R]`. Those of more queries than a tile of ours has (`tallest`), whose
        queries see enough positions whatever the real lengths are: never rows of a captured step, whose bounds say
        nothing. known: bool, the rows whose bounds are their lengths."""
        seen = seq_lens - query_lens // 2 - np.where(known, 0, max_overestimate)
        if window is not None:
            seen = np.minimum(seen, window)
        is_long = (query_lens > tallest) & (seen >= MIN_POSITIONS)
        if self.gathers:
            is_long &= known
        rows: np.ndarray = np.flatnonzero(is_long)
        worth = [self.pays(int(seq_lens[row] - query_lens[row]), int(seq_lens[row])) for row in rows]
        return rows[np.array(worth, dtype=bool)]


def by_cudnn(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
    """`LongAttention.attend`, by the attention of cuDNN."""
    out = None if len(rows.pieces) == 1 else torch.empty_like(query)
    for (pieces, slots), where in zip(rows.pieces, rows.queries_of, strict=True):
        kv = layer.gather(slots, 1, query.dtype)[:, 0]
        attended = cudnn_rows.attend_row(query[where], kv, pieces, None if out is None else out[where])
    return attended if out is None else out


def by_flash_attention_3(attend_rows: Callable[..., Any]) -> LongAttention:
    """FlashAttention-3 by its `flash_attn_varlen_func`."""

    def attend(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
        found = []
        for group in rows.groups:
            key, value = layer.gather(group.slots, 1, query.dtype)[:, 0].unbind(1)
            attended = attend_rows(
                query[group.queries], key, value, cu_seqlens_q=group.query_ends, cu_seqlens_k=group.position_ends,
                max_seqlen_q=group.max_queries, max_seqlen_k=group.max_positions,
                softmax_scale=query.shape[2] ** -0.5, causal=True,
            )  # fmt: skip
            # The logarithms come with it in some versions.
            found.append(attended[0] if isinstance(attended, tuple) else attended)
        return found[0] if len(found) == 1 else torch.cat(found)

    return LongAttention("FlashAttention-3", attend, gathers=True)


def by_flash_attention_2(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
    """`LongAttention.attend`, by FlashAttention-2, which reads the blocks."""
    key, value = layer.data.unbind(2)
    attended: torch.Tensor = flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=running_sum(rows.query_lens), cu_seqlens_k=running_sum(rows.seq_lens),
        max_seqlen_q=int(rows.most_queries.max()), max_seqlen_k=rows.block_tables.shape[1] * rows.block_size,
        softmax_scale=query.shape[2] ** -0.5, causal=rows.pattern.causal, window_size=window_sides(rows.pattern),
        block_table=rows.block_tables,
    )  # fmt: skip
    return attended


FLASH_ATTENTION_2 = LongAttention("FlashAttention-2", by_flash_attention_2)
CUDNN = LongAttention(
    "cuDNN",
    by_cudnn,
    gathers=True,
    head_dims=lambda head_dim: head_dim <= cudnn_rows.MAX_HEAD_DIM and head_dim % cudnn_rows.HEAD_DIM_MULTIPLE == 0,
    pays=cudnn_rows.pays,
    warm_up=cudnn_rows.warm_up,
)


def installed(needs: Requirements, block_size: int) -> LongAttention | None:
    """The first package that runs here and gives what it should, for the models of `needs`; None for none."""
    found = next(all_installed(needs, block_size), None)
    if found is not None:
        logger.info("%s attends rows of prompts from %d positions on", found.name, MIN_POSITIONS)
    return found


def all_installed(needs: Requirements, block_size: int) -> Iterator[LongAttention]:
    """As `installed`, every one, in the order of preference. The log says which are here and not used, and why."""
    if needs.device != "cuda" or needs.dtype not in DTYPES:
        return
    if needs.kv_dtype not in (None, needs.dtype):
        return
    for attention in _candidates(block_size):
        problem = trial(attention, needs, block_size, torch.device(needs.device))
        if problem is None:
            yield attention
        else:
            logger.warning("%s is installed and not used: %s", attention.name, problem)


def _candidates(block_size: int) -> Iterator[LongAttention]:
    capability = torch.cuda.get_device_capability()
    attend_rows = flash_attention_3() if capability[0] == HOPPER_MAJOR else None
    if attend_rows is not None:
        yield by_flash_attention_3(attend_rows)
    if capability in CUDNN_CAPABILITIES:
        yield CUDNN
    if flash_attn_varlen_func is not None and block_size % BLOCK_MULTIPLE == 0:
        yield FLASH_ATTENTION_2


def flash_attention_3() -> Callable[..., Any] | None:
    """Its `flash_attn_varlen_func`; None where it is not installed or does not load, which the log says."""
    for name in FLASH_ATTENTION_3:
        try:
            found: Callable[..., Any] = importlib.import_module(name).flash_attn_varlen_func
        except ModuleNotFoundError as error:
            if error.name != name:
                logger.warning("FlashAttention-3 (%s) is installed and does not load: %s", name, error)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            logger.warning("FlashAttention-3 (%s) is installed and does not load: %s", name, error)
        else:
            return found
    return None


def trial(attention: LongAttention, needs: Requirements, block_size: int, device: torch.device) -> str | None:
    """Try a package on a few random rows for each head size and pattern of `needs` that it takes; what is wrong, None
    for nothing."""
    taken = [
        (head_dim, pattern)
        for head_dim in sorted(needs.head_dims)
        for pattern in sorted(needs.patterns, key=repr)
        if attention.takes(pattern, head_dim)
    ]
    for head_dim, pattern in taken:
        try:
            off = _trial_error(attention, head_dim, pattern, needs.dtype, block_size, device)
        except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError) as error:
            return f"heads of {head_dim}: {type(error).__name__}: {error}"
        if not off <= TOLERANCE:
            return f"heads of {head_dim}: its numbers differ from ours by {off:.3g}"
    return None if taken else "it takes no layer of these models"


def _trial_error(
    attention: LongAttention,
    head_dim: int,
    pattern: AttentionPattern,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
) -> float:
    generator = torch.Generator().manual_seed(head_dim)
    heads, kv_heads = TRIAL_HEADS
    lens, ends = (np.array([row[column] for row in TRIAL_ROWS]) for column in (0, 1))
    blocks = -(-ends // block_size)
    order = torch.randperm(int(blocks.sum()), generator=generator)
    tables = torch.full((len(lens), int(blocks.max())), -1, dtype=torch.int32)
    for row, (count, end) in enumerate(zip(blocks, blocks.cumsum(), strict=True)):
        tables[row, : int(count)] = order[int(end - count) : int(end)]
    cache = torch.randn(int(blocks.sum()), block_size, 2, kv_heads, head_dim, generator=generator)
    query = torch.randn(int(lens.sum()), heads, head_dim, generator=generator)
    # Sharp enough that a few positions decide, so that a piece which is missing or weighs too much shows.
    cache, query = cache.to(dtype), (TRIAL_SHARPNESS * query).to(dtype)
    columns = (lens.cumsum() - lens, lens, ends)
    on_host = [torch.from_numpy(column.astype(np.int32)) for column in columns]
    rows = PagedBatch(on_host[0], on_host[1], on_host[2], tables.clamp(min=0))
    window = pattern.sliding_window
    expected = paged_attention_reference(query.float(), cache.float(), rows, pattern.causal, window)
    start, query_lens, seq_lens = (column.to(device) for column in on_host)
    there = PagedBatch(start, query_lens, seq_lens, tables.to(device))
    long = LongRows.of(there, np.arange(len(lens)), lens, ends, block_size, pattern)
    attended = attention.attend(query.to(device)[long.source], KVLayer(cache.to(device)), long)
    if attended.shape != query.shape:
        raise ValueError(f"its result has the shape {tuple(attended.shape)} in place of {tuple(query.shape)}")
    return float((attended.flatten(1).float().cpu() - expected).abs().max())

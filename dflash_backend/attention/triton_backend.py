"""Paged attention by our own Triton kernels: every pattern, head size and dtype, and the backend of `auto` on a GPU.

Under Triton's interpreter (`TRITON_INTERPRET=1`) it runs on a CPU as well, for tests. Without the `triton` package
this module cannot be imported and the backend is not registered.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dflash_backend.attention.interface import (
    KV_DTYPES,
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionPattern,
    Capabilities,
    DeviceLengths,
    KVLayer,
    Requirements,
    SharedPrefixes,
)
from dflash_backend.attention.long_rows import LongAttention, LongRows, installed
from dflash_backend.attention.packed_queries import to_device
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.invariant_attention import (
    PiecesLaunch,
    invariant_attention,
    pieces_variants,
    plan_pieces,
    with_tiles,
)
from dflash_kernels.paged_attention import PreparedLaunch, paged_attention, prepare_launches
from dflash_kernels.paged_attention_launch import (
    HOPPER,
    Gpu,
    HeadShape,
    Launch,
    launch_variants,
    max_block_m,
    plan_launches,
)
from dflash_kernels.shared_prefix import merge_parts, split_rows

logger = logging.getLogger(__name__)

# Triton reads the variable when a kernel's module is imported, and so does this module.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class TritonMetadata(AttentionMetadata):
    """The rows on the device, and their bounds on the host. What follows from them and the shape of a layer's heads
    is planned when the first such layer asks, then kept in `launches`; and so is the output of such layers, in
    `outputs`: tokens that are no row's have to be zeroed only once.

    known: bool, the rows whose bounds are their lengths. long_attention: what attends rows of many queries in place of
    a launch of ours (`long_rows`), and prepares for chunks of up to `warm_up_tokens` where that is not 0.
    prefix: the groups of rows that share a prefix, as rows of their own; `rows` are then what is left of them. `parts`:
    their results and logarithms, beside one another before they are merged."""

    rows: PagedBatch
    query_lens: np.ndarray
    seq_lens: np.ndarray
    pattern: AttentionPattern
    block_size: int
    max_overestimate: int
    known: np.ndarray
    every_variant: bool = False
    prefix: TritonMetadata | None = None
    of_groups: bool = False
    long_attention: LongAttention | None = None
    warm_up_tokens: int = 0
    launches: dict[HeadShape, list[PreparedLaunch]] = field(default_factory=dict)
    outputs: dict[HeadShape, torch.Tensor] = field(default_factory=dict)
    parts: dict[HeadShape, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    long: dict[HeadShape, LongRows | None] = field(default_factory=dict)

    def launches_for(self, shape: HeadShape) -> list[PreparedLaunch]:
        """The launches for heads of this shape, with what they read on the device.

        Rows with one bound on their queries, as a captured graph has them, need no tiles, so nothing is copied."""
        if shape not in self.launches:
            device = self.rows.seq_lens.device
            causal, window = self.pattern.causal, self.pattern.sliding_window
            if self.every_variant:
                planned = self._variants(shape)
            else:
                planned = plan_launches(
                    self._own_query_lens(shape), self.seq_lens, shape, causal, window,
                    gpu_of(device), self.max_overestimate,
                )  # fmt: skip
            tiled = [(launch, None if launch.tiles is None else to_device(launch.tiles, device)) for launch in planned]
            self.launches[shape] = prepare_launches(tiled, self.rows, shape.group, self.block_size, causal, window)
        return self.launches[shape]

    def long_rows_for(self, shape: HeadShape) -> LongRows | None:
        """The rows that `long_attention` attends, for heads of this shape; None for none."""
        if shape not in self.long:
            index = self._long_index(shape)
            self.long[shape] = None
            if len(index):
                known = bool(self.known[index].all())
                self.long[shape] = LongRows.of(
                    self.rows, index, self.query_lens, self.seq_lens, self.block_size, self.pattern, known
                )
        return self.long[shape]

    def _own_query_lens(self, shape: HeadShape) -> np.ndarray:
        """Bounds of the queries that are left to our kernels."""
        lens = self.query_lens.copy()
        lens[self._long_index(shape)] = 0
        return lens

    def _long_index(self, shape: HeadShape) -> np.ndarray:
        long = self.long_attention
        if long is None or self.every_variant or not long.takes(self.pattern, shape.head_dim):
            return np.zeros(0, dtype=np.int64)
        tallest, window = max_block_m(shape) // shape.group, self.pattern.sliding_window
        return long.rows(self.query_lens, self.seq_lens, self.known, self.max_overestimate, tallest, window)

    def _variants(self, shape: HeadShape) -> list[Launch]:
        """A launch of each kind that rows of up to these bounds can need. Groups of rows have one bound in each step,
        and another in the next."""
        gpu = gpu_of(self.rows.seq_lens.device)
        if not self.of_groups:
            return launch_variants(self.query_lens, shape, gpu)
        tallest = max_block_m(shape) // shape.group
        lengths = {max(1, lines // shape.group) for lines in (16, 64)} | {tallest, tallest + 1}
        return [launch for n in sorted(lengths) for launch in launch_variants(np.array([n]), shape, gpu)]


class TritonBackend(AttentionBackend):
    """Paged attention by our own Triton kernels."""

    name = "triton"
    capabilities = Capabilities(
        causal=True,
        non_causal=True,
        sliding_window=True,
        head_dims=None,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
        emulated=frozenset({"cpu"}),
        capturable=True,
        batch_invariant=frozenset({"cuda", "cpu"}),
        sinks=True,
        kv_dtypes=KV_DTYPES,
        shares_prefixes=True,
        shares_work=True,
    )

    def __init__(self, block_size: int, long_attention: LongAttention | None = None) -> None:
        """long_attention: attends rows of many queries outside of graphs; None for our own kernels."""
        self.block_size = block_size
        self.long_attention = long_attention
        self._every_variant = False
        self._warm_up_tokens = 0
        self._warm: set[HeadShape] = set()

    def choosing_per_launch(self, needs: Requirements) -> AttentionBackend:
        return type(self)(self.block_size, installed(needs, self.block_size))

    def batch_invariant(self) -> AttentionBackend:
        return InvariantTritonBackend(self.block_size)

    @contextmanager
    def every_variant(self, max_tokens: int = 0) -> Iterator[None]:
        self._every_variant, self._warm_up_tokens = True, max_tokens
        try:
            yield
        finally:
            self._every_variant, self._warm_up_tokens = False, 0

    def prepare(self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype) -> TritonMetadata:
        exact = layout.device or exact_rows(layout)
        rows = PagedBatch(exact.query_start, exact.query_lens, exact.seq_lens, layout.block_tables)
        prefix, overestimate = None, layout.max_overestimate
        # With a window a query does not see all of what is shared.
        if layout.shared is not None and pattern.causal and pattern.sliding_window is None:
            rows, groups = split_rows(rows, layout.shared.rows, self.block_size)
            prefix = self._prefix(groups, layout.shared)
            overestimate += layout.shared.num_positions
        return TritonMetadata(
            rows,
            layout.query_lens,
            layout.seq_lens,
            pattern,
            self.block_size,
            overestimate,
            layout.known_rows,
            self._every_variant,
            prefix,
            # What rows share is merged by logarithms that a package may not give.
            long_attention=None if prefix is not None else self.long_attention,
            warm_up_tokens=self._warm_up_tokens,
        )

    def _prefix(self, groups: PagedBatch, shared: SharedPrefixes) -> TritonMetadata:
        """The groups as rows, all with the same bounds, so that a kernel for them needs no map of tiles."""
        num_groups = len(groups.query_lens)
        queries, positions = (np.full(num_groups, most) for most in (shared.num_queries, shared.num_positions))
        pattern = AttentionPattern(causal=False)
        return TritonMetadata(
            groups, queries, positions, pattern, self.block_size, shared.num_positions,
            np.zeros(num_groups, dtype=bool), self._every_variant, of_groups=True,
        )  # fmt: skip

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`. The output is valid until the next layer of the forward pass attends."""
        assert isinstance(metadata, TritonMetadata)
        is_fp8 = layer.scales is not None
        shape = HeadShape(query.shape[1], layer.data.shape[3], query.shape[2], query.itemsize, is_fp8)
        launches, long = metadata.launches_for(shape), metadata.long_rows_for(shape)
        if metadata.prefix is not None:
            return self._attend_parts(query, layer, metadata, shape, sinks)
        if metadata.warm_up_tokens:
            self._warm_up(query, layer, metadata, shape)
        attended = None
        if long is not None:
            # All tokens of the pass, which lie behind one another.
            is_whole = long.known and len(long.source) == len(query)
            queries = query if is_whole else query.index_select(0, long.source)
            attended = self._attend_long(queries, layer, metadata, long)
            if attended is None:
                ours = replace(metadata, long_attention=None, launches={}, outputs={}, long={})
                return self.attend(query, layer, ours, sinks)
            if is_whole:
                return attended.flatten(1)
        pattern, out = metadata.pattern, metadata.outputs.get(shape)
        if out is None:
            # The first one is for what is no row's.
            out = query.new_zeros(query.shape[0] + 1, query.shape[1] * query.shape[2])
            metadata.outputs[shape] = out
        causal, window = pattern.causal, pattern.sliding_window
        if attended is not None and long is not None:
            out.index_copy_(0, long.target, attended.flatten(1))
        return paged_attention(query, layer.data, metadata.rows, launches, causal, window, out[1:], sinks, layer.scales)

    def _attend_long(
        self, queries: torch.Tensor, layer: KVLayer, metadata: TritonMetadata, rows: LongRows
    ) -> torch.Tensor | None:
        """The attention of long rows by the package; None where it fails, after which it gets no more rows."""
        assert metadata.long_attention is not None
        try:
            return metadata.long_attention.attend(queries, layer, rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.long_attention is not None:
                logger.error("%s is not used from now on, since it failed: %s", self.long_attention.name, error)
            self.long_attention = None
            return None

    def _warm_up(self, query: torch.Tensor, layer: KVLayer, metadata: TritonMetadata, shape: HeadShape) -> None:
        long = metadata.long_attention
        if long is None or shape in self._warm or not long.takes(metadata.pattern, shape.head_dim):
            return
        self._warm.add(shape)
        try:
            long.warm_up(query, layer, metadata.warm_up_tokens, int(metadata.seq_lens.max()))
        except RuntimeError as error:  # too little memory among others; what is needed is made when it is
            logger.warning("%s could not prepare for prompts: %s", long.name, error)

    @staticmethod
    def _attend_parts(
        query: torch.Tensor, layer: KVLayer, metadata: TritonMetadata, shape: HeadShape, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """As `attend`, of rows some of which share a prefix."""
        assert metadata.prefix is not None
        num_tokens, width = query.shape[0], query.shape[1] * query.shape[2]
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in (metadata, metadata.prefix):
            if shape not in part.parts:
                out = query.new_empty(num_tokens, width, dtype=torch.float32)
                lse = query.new_full((num_tokens, query.shape[1]), float("-inf"), dtype=torch.float32)
                part.parts[shape] = out, lse
            out, lse = part.parts[shape]
            launches, causal = part.launches_for(shape), part.pattern.causal
            paged_attention(query, layer.data, part.rows, launches, causal, None, out, scales=layer.scales, out_lse=lse)
            results.append((out, lse))
        if shape not in metadata.outputs:
            metadata.outputs[shape] = query.new_empty(num_tokens, width)
        own, prefix = results
        merge_parts(*own, *prefix, metadata.outputs[shape], sinks)
        return metadata.outputs[shape]


def exact_rows(layout: AttentionBatch) -> DeviceLengths:
    """What the device is to know of rows whose lengths the host knows."""
    query_start = np.cumsum(layout.query_lens) - layout.query_lens
    columns = np.stack([query_start, layout.query_lens, layout.seq_lens]).astype(np.int32)
    return DeviceLengths(*to_device(columns, layout.block_tables.device).unbind())


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """What tilings and launches follow from. A CPU stands for a Hopper: the interpreter runs the tiles and splits that
    one would."""
    if device.type != "cuda":
        return HOPPER
    found: Any = torch.cuda.get_device_properties(device)
    program, whole = found.shared_memory_per_block_optin, found.shared_memory_per_multiprocessor
    return Gpu(10 * found.major + found.minor, found.multi_processor_count, program, whole)


@dataclass(frozen=True)
class PiecesMetadata(AttentionMetadata):
    """The rows on the device, and their bounds on the host; `launches` and `outputs` as of `TritonMetadata`."""

    rows: PagedBatch
    query_lens: np.ndarray
    seq_lens: np.ndarray
    pattern: AttentionPattern
    every_variant: bool
    launches: dict[HeadShape, list[PiecesLaunch]] = field(default_factory=dict)
    outputs: dict[HeadShape, torch.Tensor] = field(default_factory=dict)

    def launches_for(self, shape: HeadShape) -> list[PiecesLaunch]:
        """The launches for heads of this shape, with what they read on the device."""
        if shape not in self.launches:
            device = self.rows.seq_lens.device
            if self.every_variant:
                planned = [([launch], tiles) for launch, tiles in pieces_variants(shape, gpu_of(device))]
            else:
                planned = [plan_pieces(self.query_lens, self.seq_lens, shape, gpu_of(device))]
            self.launches[shape] = [
                launch
                for launches, tiles in planned
                for launch in with_tiles(launches, None if tiles is None else to_device(tiles, device))
            ]
        return self.launches[shape]


class InvariantTritonBackend(TritonBackend):
    """Paged attention in pieces at fixed positions, of which there are as many as a row's bound says."""

    capabilities = replace(TritonBackend.capabilities, shares_work=False)

    def prepare(  # type: ignore[override]
        self, layout: AttentionBatch, pattern: AttentionPattern, dtype: torch.dtype
    ) -> PiecesMetadata:
        exact = layout.device or exact_rows(layout)
        rows = PagedBatch(exact.query_start, exact.query_lens, exact.seq_lens, layout.block_tables)
        return PiecesMetadata(rows, layout.query_lens, layout.seq_lens, pattern, self._every_variant)

    def attend(
        self, query: torch.Tensor, layer: KVLayer, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`. The output is valid until the next layer of the forward pass attends."""
        assert isinstance(metadata, PiecesMetadata)
        shape = HeadShape(query.shape[1], layer.data.shape[3], query.shape[2], query.itemsize)
        launches, out = metadata.launches_for(shape), metadata.outputs.get(shape)
        if out is None:
            out = metadata.outputs[shape] = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        pattern = metadata.pattern
        return invariant_attention(
            query, layer.data, metadata.rows, launches, pattern.causal, pattern.sliding_window, out, sinks, layer.scales
        )

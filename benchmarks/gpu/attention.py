"""The attention of one layer alone, at a long context: bytes per second of the KV that it has to read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.floor import CycleSize, attention_work
from benchmarks.gpu.results import AttentionRun
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import graph_of, median_seconds, num_copies
from dflash_backend.attention import AttentionBackend, AttentionBatch, AttentionMetadata, AttentionPattern, KVLayer
from dflash_backend.attention.interface import DeviceLengths

BLOCK_SIZE = 16
# Layers that a measurement goes through in turn, so that none finds its KV in the cache from the time before, at least
# and at most.
NUM_LAYERS = 6, 16


@dataclass(frozen=True)
class AttentionCase:
    """`queries` for each row; causal as in verify, else as in a draft block. captured: the host knows a bound alone, as
    in a captured step, else the lengths themselves."""

    name: str
    batch: int
    context: int
    queries: int
    causal: bool
    captured: bool = False


def cases(k: int, context: int) -> list[AttentionCase]:
    """What a cycle runs at one stream and at eight: verify, a draft block, and a step without drafts."""
    return [
        AttentionCase(name, batch, context, queries, causal)
        for batch in (1, 8)
        for name, queries, causal in (("verify", 1 + k, True), ("draft", 1 + k, False), ("k = 0", 1, True))
    ]


def measure(
    shape: Shape, backend: AttentionBackend, tests: list[AttentionCase], dtype: torch.dtype, device: torch.device
) -> Iterator[AttentionRun]:
    """Each case on layers of random KV, the median over replays of one graph of all layers."""
    decoder = shape.target.decoder
    for case in tests:
        blocks_a_row = -(-case.context // BLOCK_SIZE)
        size = (case.batch * blocks_a_row, BLOCK_SIZE, 2, decoder.num_kv_heads, decoder.head_dim)
        num_bytes = math.prod(size) * dtype.itemsize
        num_layers = min(max(num_copies(device, num_bytes), NUM_LAYERS[0]), NUM_LAYERS[1])
        layers = [KVLayer(torch.randn(size, dtype=dtype, device=device)) for _ in range(num_layers)]
        tokens = case.batch * case.queries
        query = torch.randn(tokens, decoder.num_heads, decoder.head_dim, dtype=dtype, device=device)
        metadata = backend.prepare(row_layout(case, blocks_a_row, device), AttentionPattern(case.causal), dtype)

        work_once = partial(_attend_all, backend, query, layers, metadata)
        with torch.inference_mode():
            seconds = median_seconds(device, graph_of(device, work_once)) / num_layers
        # `context` positions in all, the queries' own among them.
        work = attention_work(
            decoder, CycleSize(case.batch, case.context - case.queries, case.queries - 1, dtype.itemsize)
        )
        yield AttentionRun(
            shape.name, backend.name, case.name, case.batch, case.context, case.queries, seconds, work.bytes / seconds
        )
        del layers, query, metadata, work_once


def _attend_all(
    backend: AttentionBackend, query: torch.Tensor, layers: list[KVLayer], metadata: AttentionMetadata
) -> None:
    for layer in layers:
        backend.attend(query, layer, metadata)


def row_layout(case: AttentionCase, blocks_a_row: int, device: torch.device) -> AttentionBatch:
    """The rows of a case, each over blocks of its own in random order."""
    order = torch.randperm(case.batch * blocks_a_row, generator=torch.Generator().manual_seed(0))

    def of_each_row(number: int) -> torch.Tensor:
        return torch.full((case.batch,), number, dtype=torch.int32, device=device)

    query_start = torch.arange(case.batch, dtype=torch.int32, device=device) * case.queries
    return AttentionBatch(
        query_lens=np.full(case.batch, case.queries, dtype=np.int64),
        seq_lens=np.full(case.batch, case.context, dtype=np.int64),
        block_tables=order.view(case.batch, blocks_a_row).to(device, torch.int32),
        device=DeviceLengths(query_start, of_each_row(case.queries), of_each_row(case.context)),
        max_overestimate=case.context if case.captured else 0,
        exact=None if case.captured else np.ones(case.batch, dtype=bool),
    )

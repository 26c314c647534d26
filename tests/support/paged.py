"""Runs a model over paged KV with scattered blocks, for parity tests that need no engine."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from dflash_backend.attention import AttentionBatch, KVLayer
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.recurrent_state import StateLayout, StatePool, StateRows
from dflash_backend.worker.batch import spans

BLOCK_SIZE = 4
NUM_BLOCKS = 80


def caches(spec: DecoderSpec, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[KVLayer]:
    """Empty KV of every layer, one allocation for each shape, filled with noise: whatever is read without having been
    written shows."""
    generator, layers = torch.Generator().manual_seed(7), {}
    for shape, count in Counter(cache.token_shape for cache in spec.caches).items():
        noise = torch.randn((count, NUM_BLOCKS, BLOCK_SIZE, *shape), generator=generator) * 10
        layers[shape] = iter(noise.to(device, dtype))
    return [KVLayer(next(layers[cache.token_shape])) for cache in spec.caches]


def noisy_pool(spec: DecoderSpec, dtype: torch.dtype = torch.float32, device: str = "cpu") -> StatePool | None:
    """States of two requests, filled with noise as `caches`; None where no layer has one."""
    if spec.delta_net is None:
        return None
    pool = StatePool.allocate(spec, 2, dtype, torch.device(device))
    for tensor in (pool.states, pool.tails):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)) * 10)
    return pool


def block_tables(num_rows: int, seed: int = 3) -> np.ndarray:
    """Disjoint scattered blocks for each row: int64 `[num_rows, NUM_BLOCKS // num_rows]`."""
    order = np.random.default_rng(seed).permutation(NUM_BLOCKS)
    width = NUM_BLOCKS // num_rows
    return order[: num_rows * width].reshape(num_rows, width).astype(np.int64)


def context(
    tables: np.ndarray,
    starts: list[int],
    query_lens: list[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    pool: StatePool | None = None,
) -> PagedContext:
    """A forward pass in which row r runs positions `[starts[r], starts[r] + query_lens[r])`; its state is in slot r of
    `pool`."""
    backend = TorchBackend(BLOCK_SIZE)
    lens = np.array(query_lens, dtype=np.int64)
    rows, positions = spans(np.array(starts, dtype=np.int64), lens)
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    layout = AttentionBatch(lens, lens + np.array(starts, dtype=np.int64), torch.from_numpy(tables).to(device))
    where, to = torch.from_numpy(positions).to(device), torch.from_numpy(slots).to(device)
    states = None
    if pool is not None:
        first = np.cumsum(lens) - lens
        numbers = [
            torch.tensor(list(each), dtype=torch.int32, device=device)
            for each in (range(len(lens)), starts, first.tolist(), query_lens)
        ]
        states = StateRows.of(pool, StateLayout(*numbers, widths=lens, num_tokens=len(positions)))
    return PagedContext(layout, where, to, backend, dtype, states=states)

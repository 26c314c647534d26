"""A step with a single row is laid out, and its context injected, as that row is beside others."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_backend.attention import AttentionBatch, AttentionPattern
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.worker.batch import BatchTraits, DeviceBatch, HostBatch
from dflash_backend.worker.step_ops import CpuStepOps
from dflash_backend.worker.transfers import share
from dflash_kernels.cpu_ops import HAS_CPU_OPS
from tests.worker.random_steps import random_step

needs_cpp = pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")


@needs_cpp
@given(st.integers(0, 1 << 30), st.integers(1, 6))
def test_the_layout_in_cpp_is_that_of_numpy(seed: int, num_rows: int) -> None:
    """Rows of every kind, with tokens past their blocks too."""
    state, rng = random_step(seed % 1000, 5, num_rows=num_rows).state, np.random.default_rng(seed)
    samples = rng.random(num_rows) < 0.7
    start, num_new, num_draft = (
        rng.integers(0, 14, num_rows),
        rng.integers(1, 6, num_rows),
        rng.integers(0, 5, num_rows),
    )
    unverified = rng.integers(0, 2, num_rows)
    columns = rng.permutation(num_rows), start, unverified, num_new, num_draft * samples, rng.integers(0, 6, num_rows)
    rows = np.stack([*columns, samples], axis=1).astype(np.int64)
    batch = HostBatch(list("abcdef"[:num_rows]), rows, BatchTraits(False, True, bool(samples.any())))
    ops = CpuStepOps()
    found, expected = ops.step_of(batch, state), batch.ragged(share, state.k)
    ops.prepare(expected, state)
    for field in fields(DeviceBatch):
        mine, theirs = getattr(found.batch, field.name), getattr(expected.batch, field.name)
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist(), field.name
    for name in ("logits_token", "logits_row", "token_ids", "positions", "slots", "starts", "seq_lens"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist()), name
    assert found.padded == expected.padded
    mine, theirs = found.attention, expected.attention
    assert mine.query_lens.tolist() == theirs.query_lens.tolist()
    assert mine.seq_lens.tolist() == theirs.seq_lens.tolist()
    width = theirs.block_tables.shape[1]
    assert mine.block_tables[:, :width].tolist() == theirs.block_tables.tolist()


@pytest.mark.parametrize("in_cpp", [False, pytest.param(True, marks=needs_cpp)])
@pytest.mark.parametrize("num_accepted", [0, 2, 5])
def test_context_of_a_row_is_that_of_its_accepted_tokens(num_accepted: int, in_cpp: bool) -> None:
    step = random_step(3, 5, padding=False, zombies=False)
    state, index = step.state, 0
    state.num_blocks[index] = state.blocks.shape[1]
    batch = HostBatch(["a"], np.array([[index, 7, 0, 1, 5, 3, 1]]), BatchTraits(False, True))
    ops = CpuStepOps()
    inputs = ops.step_of(batch, state) if in_cpp else batch.ragged(share, state.k)
    if not in_cpp:
        ops.prepare(inputs, state)
    drafts = state.tokens[index, 8:13].tolist()
    own = torch.tensor([*drafts[:num_accepted], -5, *[0] * (5 - num_accepted)])
    inputs.target_tokens = own
    ops.accept(inputs, state)
    pending = ops.pending_context(state) if in_cpp else None
    final = ops.context(inputs, state, torch.arange(6)[:, None], pending)
    assert final is not None
    assert final.positions.tolist() == list(range(7, 8 + num_accepted))
    assert final.slots.tolist() == inputs.slots.tolist()[: 1 + num_accepted]
    assert final.features[:, 0].tolist() == list(range(1 + num_accepted))


@given(st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_a_row_sees_what_it_sees_beside_another(num_queries: int, num_before: int, causal: bool) -> None:
    backend, seq_len = TorchBackend(16), num_queries + num_before
    pattern = AttentionPattern(causal)

    def mask(num_rows: int) -> torch.Tensor:
        tables = torch.zeros(num_rows, 5, dtype=torch.int32)
        batch = AttentionBatch(np.full(num_rows, num_queries), np.full(num_rows, seq_len), tables)
        (group,) = backend.prepare(batch, pattern, torch.float32).groups
        assert group.mask is not None
        return group.mask[0]

    assert torch.equal(mask(1), mask(2))

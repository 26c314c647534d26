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
from dflash_backend.worker.batch import BatchTraits, HostBatch
from dflash_backend.worker.step_ops import HostStepOps
from dflash_backend.worker.transfers import share
from tests.worker.random_steps import random_step

counts = st.integers(0, 9)


@given(counts, counts, counts, st.integers(1, 9), counts, counts, st.booleans())
def test_the_layout(
    index: int, start: int, unverified: int, num_new: int, num_draft: int, num_next_draft: int, samples: bool
) -> None:
    num_draft = num_draft if samples else 0
    columns = (np.array([number]) for number in (index, start, unverified, num_new, num_draft, num_next_draft))
    batch = HostBatch(["a"], *columns, np.array([samples]), BatchTraits(False, num_next_draft > 0, samples))
    alone, beside = batch.ragged(share, 0), batch.ragged(share, 0, row_multiple=2)
    assert (alone.num_rows, beside.num_rows) == (1, 2)
    assert alone.logits_row.tolist() == beside.logits_row.tolist()
    for field in fields(alone.batch):
        mine, theirs = getattr(alone.batch, field.name), getattr(beside.batch, field.name)
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist()[: len(mine)], field.name
    assert (alone.logits_token is None) == (beside.logits_token is None)
    if alone.logits_token is not None and beside.logits_token is not None:
        assert alone.logits_token.tolist() == beside.logits_token.tolist()
    for name in ("query_lens", "seq_lens", "draft_lens"):
        assert getattr(alone.bounds, name).tolist() == getattr(beside.bounds, name).tolist()[:1]
    assert alone.bounds.max_overestimate == beside.bounds.max_overestimate
    known = unverified == num_draft == 0
    assert [each.bounds.exact.tolist() for each in (alone, beside)] == [[known], [known, False]]


@pytest.mark.parametrize("num_accepted", [0, 2, 5])
def test_context_of_a_row_is_that_of_its_accepted_tokens(num_accepted: int) -> None:
    step = random_step(3, 5, padding=False, zombies=False)
    state, index = step.state, 0
    state.num_blocks[index] = state.blocks.shape[1]
    columns = (np.array([number]) for number in (index, 7, 0, 1, 5, 3))
    inputs = HostBatch(["a"], *columns, np.array([True]), BatchTraits(False, True)).ragged(share, state.k)
    ops = HostStepOps()
    ops.prepare(inputs, state)
    drafts = state.tokens[index, 8:13].tolist()
    own = torch.tensor([*drafts[:num_accepted], -5, *[0] * (5 - num_accepted)])
    inputs.target_tokens = own
    ops.accept(inputs, state)
    final = ops.context(inputs, state, torch.arange(6))
    assert final.positions.tolist() == list(range(7, 8 + num_accepted))
    assert final.slots.tolist() == inputs.slots.tolist()[: 1 + num_accepted]
    assert final.features.tolist() == list(range(1 + num_accepted))


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

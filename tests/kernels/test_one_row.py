"""What a CPU does for a single row is what it does for the same row beside a padding row, in numbers and in state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_kernels import one_row
from dflash_kernels.accept import accept_reference
from dflash_kernels.prepare_draft import prepare_draft_reference, store_drafts_reference
from dflash_kernels.prepare_step import prepare_reference

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, K, REQUESTS = 4, 6, 22, 5, 3


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class State:
    """The state of some requests, with tokens of a small vocabulary so that drafts are accepted now and then."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = torch.from_numpy(rng.integers(0, 3, (REQUESTS, MAX_LEN)))
        self.blocks = torch.from_numpy(rng.permutation(REQUESTS * NUM_BLOCKS).reshape(REQUESTS, -1).astype(np.int32))
        self.num_blocks = torch.from_numpy(rng.integers(1, NUM_BLOCKS + 1, REQUESTS).astype(np.int32))
        self.computed = torch.from_numpy(rng.integers(0, MAX_LEN - 2, REQUESTS).astype(np.int32))
        self.confidence = torch.zeros(REQUESTS, K)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and all(
            torch.equal(mine, theirs) for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)
        )

    @property
    def of_blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tokens, self.blocks, self.num_blocks


seeds = st.integers(0, 10_000)
indices = st.integers(0, REQUESTS - 1)


@given(seeds, indices, st.integers(0, MAX_LEN - 1), st.integers(1, 9), st.integers(0, 2))
def test_prepare(seed: int, index: int, start: int, num_tokens: int, num_unverified_drafts: int) -> None:
    state = State(seed)
    row = torch.zeros(num_tokens, dtype=torch.int32)

    def prepared(*padding: int) -> list[torch.Tensor]:
        behind = [0] * len(padding)
        columns = (start, num_unverified_drafts, 0, num_tokens)
        fields = [numbers(index, *padding), *(numbers(column, *behind) for column in columns)]
        return list(prepare_reference(*state.of_blocks, state.computed, BLOCK_SIZE, *fields, row))

    for alone, beside in zip(prepared(), prepared(-1), strict=True):
        assert alone.dtype == beside.dtype
        assert alone.tolist() == beside.tolist()[: len(alone)]


@given(seeds, indices, st.integers(0, MAX_LEN - 1), st.integers(0, K), st.booleans())
def test_accept(seed: int, index: int, start: int, num_draft: int, samples: bool) -> None:
    own = torch.from_numpy(np.random.default_rng(seed + 1).integers(0, 3, K + 3))

    def accepted(state: State, *padding: int) -> list[list[int]]:
        behind = [0] * len(padding)
        logits_start = numbers(1 if samples else -1, *padding)
        columns = (numbers(column, *behind) for column in (start, 1, num_draft))
        results = accept_reference(
            own, state.tokens, state.computed, K, numbers(index, *padding), *columns, logits_start
        )
        return [result[0].tolist() for result in results]

    alone, beside = State(seed), State(seed)
    assert accepted(alone) == accepted(beside, -1)
    assert alone == beside


@pytest.mark.parametrize("sure", [False, True])
@given(seeds, indices, st.integers(1, K))
def test_drafts_are_stored(sure: bool, seed: int, index: int, num_next_draft: int) -> None:
    drafts = torch.arange(100, 100 + num_next_draft)
    confidence = torch.rand(num_next_draft) if sure else None
    alone, beside = State(seed), State(seed)
    for state, padding in ((alone, ()), (beside, (-1,))):
        rows, lens = numbers(index, *padding), numbers(num_next_draft, *(0 for _ in padding))
        store_drafts_reference(state.tokens, state.computed, rows, lens, drafts, confidence, state.confidence)
    assert alone == beside


@given(seeds, indices, st.integers(1, K), st.sampled_from([0, 1]))
def test_what_the_drafter_runs(seed: int, index: int, num_next_draft: int, lookahead_base: int) -> None:
    state = State(seed)
    anchor, width = int(state.computed[index]), num_next_draft + lookahead_base
    beside = prepare_draft_reference(
        *state.of_blocks, state.computed, BLOCK_SIZE, numbers(index), numbers(num_next_draft), width, 77, lookahead_base
    )
    alone = one_row.prepare_draft(*state.of_blocks, BLOCK_SIZE, index, anchor, width, 77)
    assert state == State(seed)  # the placeholders are not written to the request's tokens
    if alone is None:
        assert -1 in beside[2].tolist()[0]
        return
    for mine, theirs in zip(alone, beside[:3], strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist()[0]

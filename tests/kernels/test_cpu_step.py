"""What C++ does around the models on a CPU is what the references do, in numbers and in the requests' state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_kernels import cpu_ops, cpu_step
from dflash_kernels.accept import accept_reference
from dflash_kernels.prepare_draft import prepare_draft_reference, store_drafts_reference

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, K, REQUESTS = 4, 6, 22, 5, 6

pytestmark = pytest.mark.skipif(not cpu_ops.HAS_CPU_OPS, reason="needs a C++ compiler")
seeds = st.integers(0, 1 << 30)


def int32(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32))


class State:
    """The state of some requests, with tokens of a small vocabulary so that drafts are accepted now and then, and rows
    of a step, of which some are padding."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.tokens = torch.from_numpy(rng.integers(0, 3, (REQUESTS, MAX_LEN)))
        self.blocks = int32(rng.permutation(REQUESTS * NUM_BLOCKS).reshape(REQUESTS, -1))
        self.num_blocks = int32(rng.integers(1, NUM_BLOCKS + 1, REQUESTS))
        self.computed = int32(rng.integers(0, MAX_LEN - 2, REQUESTS))
        self.confidence = torch.zeros(REQUESTS, K)
        self.num_rows = int(rng.integers(1, REQUESTS))
        requests = rng.permutation(REQUESTS)[: self.num_rows]
        self.req_idx = int32(np.where(rng.random(self.num_rows) < 0.2, -1, requests))

    def numbers(self, low: int, high: int) -> torch.Tensor:
        return int32(self.rng.integers(low, high, self.num_rows))

    @property
    def of_blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        return self.tokens, self.blocks, self.num_blocks, self.computed, BLOCK_SIZE


def assert_same(seed: int, *ways: Callable[[State], tuple[torch.Tensor, ...]]) -> None:
    """Both ways give the same, and leave the same state."""
    states = State(seed), State(seed)
    results = [way(state) for way, state in zip(ways, states, strict=True)]
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.tolist() == theirs.tolist()
    for name in ("tokens", "computed", "confidence"):
        assert getattr(states[0], name).tolist() == getattr(states[1], name).tolist()


@given(seeds)
def test_accept(seed: int) -> None:
    def accepted(in_cpp: bool) -> Callable[[State], tuple[torch.Tensor, ...]]:
        def of(state: State) -> tuple[torch.Tensor, ...]:
            num_draft = state.numbers(0, K + 1)
            num_own = num_draft.numpy() + 1
            first = num_own.cumsum() - num_own
            logits_start = int32(np.where(state.rng.random(state.num_rows) < 0.2, -1, first))
            own = torch.from_numpy(state.rng.integers(0, 3, int(num_own.sum())))
            starts, num_new = state.numbers(0, MAX_LEN - 1), state.numbers(1, 3)
            if in_cpp:
                none = torch.zeros_like(starts)
                fields = [state.req_idx, none, none, num_new, num_draft, none, none, none, logits_start, starts]
                layout = torch.cat(fields).numpy()
                results = cpu_step.accept(own, state.tokens, state.computed, K, layout, state.num_rows)
            else:
                results = accept_reference(
                    own, state.tokens, state.computed, K, state.req_idx, starts, num_new, num_draft, logits_start
                )
            return (results[state.req_idx >= 0],)  # what padding rows get has no meaning

        return of

    assert_same(seed, accepted(True), accepted(False))


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("sure", [False, True])
@given(seeds)
def test_drafts_are_stored(sure: bool, side_by_side: bool, seed: int) -> None:
    def stored(call: Callable[..., None]) -> Callable[[State], tuple[torch.Tensor, ...]]:
        def of(state: State) -> tuple[torch.Tensor, ...]:
            lens = state.numbers(0, K + 1)
            count = int(lens[state.req_idx >= 0].sum())
            drafts = torch.from_numpy(state.rng.integers(100, 200, count if side_by_side else (state.num_rows, K + 2)))
            confidence = torch.from_numpy(state.rng.random(drafts.shape, dtype=np.float32)) if sure else None
            call(state.tokens, state.computed, state.req_idx, lens, drafts, confidence, state.confidence)
            return ()

        return of

    assert_same(seed, stored(cpu_step.store_drafts), stored(store_drafts_reference))


@pytest.mark.parametrize("lookahead_base", [0, 1])
@given(seeds)
def test_what_the_drafter_runs(lookahead_base: int, seed: int) -> None:
    def prepared(call: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[[State], tuple[torch.Tensor, ...]]:
        def of(state: State) -> tuple[torch.Tensor, ...]:
            width = K + lookahead_base
            return call(*state.of_blocks, state.req_idx, state.numbers(0, K + 1), width, 77, lookahead_base)

        return of

    assert_same(seed, prepared(cpu_step.prepare_draft), prepared(prepare_draft_reference))

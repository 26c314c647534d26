"""The drafts that a budget has room for: the likeliest of all rows, never more, the first ones of each row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflash_kernels.verify_budget import verified_lens_reference

K = 5


def survival_of(confidence: np.ndarray, weight: float, offsets: np.ndarray, effects: np.ndarray) -> np.ndarray:
    chances = 1 / (1 + np.exp(-(offsets + effects[:, None] + weight * confidence)))
    return np.cumprod(chances, axis=1)


@pytest.mark.parametrize("seed", range(20))
def test_the_drafts_of_a_budget_are_the_likeliest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence = rng.normal(0, 3, (4, K)).astype(np.float32)
    num_draft, weight = rng.integers(0, K + 1, 4), rng.uniform(0, 2)
    offsets, effects = (rng.normal(0, 1, size).astype(np.float32) for size in (K, 4))
    survival = survival_of(confidence, weight, offsets, effects)
    for budget in range(int(num_draft.sum()) + 3):
        lens = verified_lens_reference(confidence, num_draft, weight, offsets, effects, budget)
        assert lens.sum() == min(budget, num_draft.sum())
        assert (lens <= num_draft).all()
        best = max(
            sum(survival[row, :length].sum() for row, length in enumerate(other))
            for other in itertools.product(*(range(n + 1) for n in num_draft))
            if sum(other) == lens.sum()
        )
        assert sum(survival[row, :length].sum() for row, length in enumerate(lens)) == pytest.approx(best, abs=1e-5)


def test_equally_likely_drafts_do_not_exceed_the_budget() -> None:
    confidence = np.full((3, K), 100.0, dtype=np.float32)  # chances of 1 all along
    zeros = np.zeros(K, dtype=np.float32), np.zeros(3, dtype=np.float32)
    for budget in range(3 * K + 1):
        lens = verified_lens_reference(confidence, np.array([K] * 3), 1.0, *zeros, budget)
        assert lens.tolist() == [min(K, budget), min(K, max(0, budget - K)), max(0, budget - 2 * K)]


def test_a_request_whose_drafts_fare_well_gets_more() -> None:
    confidence, offsets = np.zeros((3, K), dtype=np.float32), np.zeros(K, dtype=np.float32)
    effects = np.array([0.0, 2.0, -2.0], dtype=np.float32)
    lens = verified_lens_reference(confidence, np.array([K] * 3), 1.0, offsets, effects, 5)
    assert lens.tolist() == [0, 5, 0]

"""The drafts that a budget has room for: the likeliest of all rows, never more, the first ones of each row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dflash_kernels.verify_budget import lay_out, lay_out_reference, verified_lens_reference
from tests.kernels.inputs import DEVICE

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
    confidence = np.full((3, K), 200.0, dtype=np.float32)  # chances of 1 all along
    zeros = np.zeros(K, dtype=np.float32), np.zeros(3, dtype=np.float32)
    for budget in range(3 * K + 1):
        lens = verified_lens_reference(confidence, np.array([K] * 3), 1.0, *zeros, budget)
        assert lens.tolist() == [min(K, budget), min(K, max(0, budget - K)), max(0, budget - 2 * K)]


def test_a_request_whose_drafts_fare_well_gets_more() -> None:
    confidence, offsets = np.zeros((3, K), dtype=np.float32), np.zeros(K, dtype=np.float32)
    effects = np.array([0.0, 2.0, -2.0], dtype=np.float32)
    lens = verified_lens_reference(confidence, np.array([K] * 3), 1.0, offsets, effects, 5)
    assert lens.tolist() == [0, 5, 0]


def random_layout(seed: int, decode_only: bool) -> tuple[list[torch.Tensor], int, int]:
    """What `lay_out` reads but the budget, and the drafts and the logits beside them that there are."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 9))
    real = rng.random(num_rows) < 0.8
    decodes = real & (decode_only | (rng.random(num_rows) < 0.6))
    samples = decodes | (real & (rng.random(num_rows) < 0.5))
    num_new = np.where(decodes, 1, np.where(real, rng.integers(1, 40, num_rows), 0))
    num_draft = np.where(decodes, rng.integers(0, K + 1, num_rows), 0)
    columns = [np.where(real, rng.permutation(12)[:num_rows], -1), num_new, num_draft, np.where(samples, 0, -1)]
    confidence = torch.from_numpy(rng.normal(0, 3, (12, K)).astype(np.float32))
    rows = [torch.from_numpy(column.astype(np.int32)) for column in columns]
    return [confidence, *rows], int(num_draft.sum()), int(samples.sum())


@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_the_layout_equals_its_reference(seed: int, decode_only: bool) -> None:
    (confidence, *rows), num_draft, num_samples = random_layout(seed, decode_only)
    rng = np.random.default_rng(seed)
    for num_drafts in {0, num_draft // 3, num_draft // 2, num_draft, num_draft + 2}:
        numbers = rng.normal(0, 1, 2 + K + len(rows[0])).astype(np.float32)
        numbers[:2] = num_drafts, 0.7
        verified = min(num_drafts, num_draft)
        sizes = int(rows[1].sum()) + verified + 3, num_samples + verified + 2
        expected = lay_out_reference(confidence, torch.from_numpy(numbers), *rows, *sizes)
        found = lay_out(*(each.to(DEVICE) for each in (confidence, torch.from_numpy(numbers), *rows)), *sizes)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.cpu().tolist() == theirs.tolist()
        arrays = [each.numpy() for each in expected]
        num_verified, start, lens, logits_start, token_row, logits_token, logits_row = arrays
        assert num_verified.sum() == verified
        assert (lens == rows[1].numpy() + num_verified).all()
        for row in range(len(start)):
            mine = slice(start[row], start[row] + lens[row])
            assert (token_row[mine] == row).all()
            if logits_start[row] >= 0:
                mine = slice(logits_start[row], logits_start[row] + num_verified[row] + 1)
                assert (logits_row[mine] == row).all()
                end = start[row] + lens[row]
                assert logits_token[mine].tolist() == list(range(end - num_verified[row] - 1, end))
        assert (token_row[lens.sum() :] == -1).all()
        assert (logits_row == -1).sum() == 2


def test_equally_likely_drafts_do_not_exceed_the_budget_on_a_device() -> None:
    confidence = torch.full((3, K), 200.0).to(DEVICE)
    row = torch.arange(3, dtype=torch.int32).to(DEVICE)
    ones, drafts = torch.ones_like(row), torch.full_like(row, K)
    for budget in range(3 * K + 1):
        numbers = torch.zeros(2 + K + 3)
        numbers[:2] = torch.tensor([float(budget), 1.0])
        lens = lay_out(confidence, numbers.to(DEVICE), row, ones, drafts, row * 0, 3 + budget, 3 + budget)[0]
        assert lens.tolist() == [min(K, budget), min(K, max(0, budget - K)), max(0, budget - 2 * K)]

"""Verification accepts what it should, and rejection sampling leaves the target's distribution as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_backend.sampling import verify
from dflash_backend.sampling.filtering import draw
from dflash_backend.sampling.random import Stream
from dflash_backend.sampling.verify import VerifyLayout, verify_greedy, verify_sampled
from tests.sampling.test_filtering import rows

CPU = torch.device("cpu")
VOCAB = 5
SAMPLES = 20_000
MIN_EXPECTED = 8.0  # rarer continuations share a bin of the chi-square tests


def test_greedy_accepts_up_to_the_first_mismatch_in_ragged_rows() -> None:
    layout = VerifyLayout.build(np.array([3, 0, 2, 1]), CPU)
    best = torch.tensor([10, 11, 12, 13, 20, 30, 31, 32, 40, 41])
    drafts = torch.tensor([10, 99, 12, 30, 31, 99])
    accepted, following = verify_greedy(best, drafts, layout)
    assert accepted.tolist() == [1, 0, 2, 0]
    assert following.tolist() == [11, 20, 32, 40]


def first_tokens(num_drafts: int, greedy_drafts: bool) -> tuple[np.ndarray, torch.Tensor]:
    """Counts of the first `num_drafts + 1` tokens over many seeds, and their exact joint distribution.

    The target's distribution depends on the token before, as a real one's does on its prefix; those of the drafts are
    independent of one another. What follows the first rejected draft's replacement is drawn from the target by itself,
    as later steps would.
    """
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(VOCAB, generator=generator).softmax(0)
    later = torch.randn(num_drafts, VOCAB, VOCAB, generator=generator).mul(1.5).softmax(2)
    q = torch.randn(num_drafts, VOCAB, generator=generator).mul(1.5).softmax(1)
    seeds = torch.arange(SAMPLES)
    zeros = torch.zeros_like(seeds)
    if greedy_drafts:
        drafts = q.argmax(dim=1).expand(SAMPLES, -1)
    else:
        drafts = torch.stack(
            [draw(q[i].expand(SAMPLES, -1), seeds, zeros + i, Stream.DRAFT) for i in range(num_drafts)], 1
        )
    target_probs = [first.expand(SAMPLES, -1), *(later[i][drafts[:, i]] for i in range(num_drafts))]
    layout = VerifyLayout.build(np.full(SAMPLES, num_drafts), CPU)
    accepted, following = verify_sampled(
        torch.stack(target_probs, dim=1).reshape(-1, VOCAB),
        None if greedy_drafts else q.repeat(SAMPLES, 1),
        drafts.flatten(),
        zeros,
        rows(SAMPLES),
        layout,
    )
    tokens: list[torch.Tensor] = []
    for i in range(num_drafts + 1):
        token = following
        if i > 0:
            token = torch.where(
                accepted == i, following, draw(later[i - 1][tokens[-1]], seeds, zeros + i, Stream.TARGET)
            )
        if i < num_drafts:
            token = torch.where(accepted > i, drafts[:, i], token)
        tokens.append(token)
    bins, exact = torch.zeros_like(seeds), torch.ones(1)
    for i, token in enumerate(tokens):
        bins = bins * VOCAB + token
        chances = first if i == 0 else later[i - 1].repeat(VOCAB ** (i - 1), 1)
        exact = (exact[:, None] * chances).flatten()
    return np.bincount(bins.numpy(), minlength=len(exact)), exact


def chi_square_p(counts: np.ndarray, exact: torch.Tensor) -> float:
    expected = (exact.double() / exact.double().sum() * counts.sum()).numpy()
    rare = expected < MIN_EXPECTED
    bins = [np.append(each[~rare], each[rare].sum()) if rare.any() else each for each in (counts, expected)]
    return float(stats.chisquare(*bins).pvalue)


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_rejection_sampling_keeps_the_targets_distribution(greedy_drafts: bool, num_drafts: int) -> None:
    """With several drafts, also that each is judged by a random number of its own."""
    assert chi_square_p(*first_tokens(num_drafts, greedy_drafts)) > 0.01


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_without_the_residual_the_distribution_is_wrong(
    greedy_drafts: bool, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: leaving the residual step out is noticed."""
    monkeypatch.setattr(verify, "_residual", lambda weights, *rest: weights)
    assert chi_square_p(*first_tokens(num_drafts, greedy_drafts)) < 1e-6


def test_drafts_that_the_target_never_takes_always_fall() -> None:
    layout = VerifyLayout.build(np.array([1] * 50), CPU)
    p = torch.tensor([0.0, 0.5, 0.5]).repeat(100, 1)
    q = torch.tensor([1.0, 0.0, 0.0]).repeat(50, 1)
    drafts = torch.zeros(50, dtype=torch.int64)
    accepted, following = verify_sampled(p, q, drafts, torch.zeros(50, dtype=torch.int64), rows(50), layout)
    assert accepted.sum().item() == 0
    assert set(following.tolist()) == {1, 2}


def test_equal_distributions_accept_everything() -> None:
    layout = VerifyLayout.build(np.array([2] * 50), CPU)
    p = torch.tensor([0.2, 0.3, 0.5]).repeat(150, 1)
    seeds = torch.arange(50)
    q = p[:100]
    drafts = draw(q, seeds.repeat_interleave(2), torch.tensor([0, 1] * 50), Stream.DRAFT)
    accepted, _ = verify_sampled(p, q, drafts, torch.zeros(50, dtype=torch.int64), rows(50), layout)
    assert accepted.tolist() == [2] * 50

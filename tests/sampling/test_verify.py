"""Verification accepts what it should, and rejection sampling leaves the target's distribution as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_backend.sampling.filtering import draw
from dflash_backend.sampling.random import Stream
from dflash_kernels import accept
from tests.sampling.rejection import accepted

VOCAB = 5
SAMPLES = 20_000
MIN_EXPECTED = 8.0  # rarer continuations share a bin of the chi-square tests


def test_greedy_accepts_up_to_the_first_mismatch_in_ragged_rows() -> None:
    argmax = torch.tensor([10, 11, 12, 13, 20, 30, 31, 32, 40, 41])
    drafts = torch.tensor([10, 99, 12, 30, 31, 99])
    count, following = accepted([3, 0, 2, 1], drafts, argmax)
    assert count.tolist() == [1, 0, 2, 0]
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
    probs = torch.stack(target_probs, dim=1).reshape(-1, VOCAB)
    drawn_from = None if greedy_drafts else q.repeat(SAMPLES, 1)
    count, following = accepted([num_drafts] * SAMPLES, drafts.flatten(), probs.argmax(1), probs, drawn_from)
    tokens: list[torch.Tensor] = []
    for i in range(num_drafts + 1):
        token = following
        if i > 0:
            token = torch.where(count == i, following, draw(later[i - 1][tokens[-1]], seeds, zeros + i, Stream.TARGET))
        if i < num_drafts:
            token = torch.where(count > i, drafts[:, i], token)
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
    """With several drafts, also that each has a random number of its own."""
    assert chi_square_p(*first_tokens(num_drafts, greedy_drafts)) > 0.01


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_without_the_residual_the_distribution_is_wrong(
    greedy_drafts: bool, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: leaving the residual step out is noticed."""
    monkeypatch.setattr(accept, "residual_reference", lambda p, *rest: p)
    assert chi_square_p(*first_tokens(num_drafts, greedy_drafts)) < 1e-6


def test_drafts_that_the_target_never_takes_are_always_rejected() -> None:
    p = torch.tensor([0.0, 0.5, 0.5]).repeat(100, 1)
    q = torch.tensor([1.0, 0.0, 0.0]).repeat(50, 1)
    count, following = accepted([1] * 50, torch.zeros(50, dtype=torch.int64), p.argmax(1), p, q)
    assert count.sum().item() == 0
    assert set(following.tolist()) == {1, 2}


def test_equal_distributions_accept_everything() -> None:
    p = torch.tensor([0.2, 0.3, 0.5]).repeat(150, 1)
    seeds = torch.arange(50)
    q = p[:100]
    drafts = draw(q, seeds.repeat_interleave(2), torch.tensor([0, 1] * 50), Stream.DRAFT)
    assert accepted([2] * 50, drafts, p.argmax(1), p, q)[0].tolist() == [2] * 50

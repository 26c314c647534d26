"""Verification accepts what it should, and rejection sampling leaves the target's distribution as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_backend.speculative import verify
from dflash_backend.speculative.random import Stream
from dflash_backend.speculative.sampling import draw
from dflash_backend.speculative.verify import VerifyLayout, verify_greedy, verify_sampled
from tests.speculative.test_sampling import rows

CPU = torch.device("cpu")
VOCAB = 6
SAMPLES = 40_000


def test_greedy_accepts_up_to_the_first_mismatch_in_ragged_rows() -> None:
    layout = VerifyLayout.build(np.array([3, 0, 2, 1]), CPU)
    best = torch.tensor([10, 11, 12, 13, 20, 30, 31, 32, 40, 41])
    drafts = torch.tensor([10, 99, 12, 30, 31, 99])
    accepted, following = verify_greedy(best, drafts, layout)
    assert accepted.tolist() == [1, 0, 2, 0]
    assert following.tolist() == [11, 20, 32, 40]


def first_two_tokens(greedy_drafts: bool) -> tuple[np.ndarray, torch.Tensor]:
    """Counts of the first two tokens over many seeds, and their exact joint distribution.

    The target's second distribution depends on the first token, as a real one's does on its prefix. One draft is
    judged; when it falls, the second token is drawn from the target by itself, as the next step would.
    """
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(VOCAB, generator=generator).softmax(0)
    second = torch.randn(VOCAB, VOCAB, generator=generator).mul(1.5).softmax(1)
    q = torch.randn(VOCAB, generator=generator).mul(1.5).softmax(0)
    seeds = torch.arange(SAMPLES)
    zeros = torch.zeros_like(seeds)
    if greedy_drafts:
        drafts = q.argmax().expand(SAMPLES)
    else:
        drafts = draw(q.expand(SAMPLES, -1), seeds, zeros, Stream.DRAFT)
    target_probs = torch.stack([first.expand(SAMPLES, -1), second[drafts]], dim=1).reshape(-1, VOCAB)
    layout = VerifyLayout.build(np.ones(SAMPLES, dtype=np.int64), CPU)
    draft_probs = None if greedy_drafts else q.repeat(SAMPLES, 1)
    accepted, following = verify_sampled(target_probs, draft_probs, drafts, zeros, rows(SAMPLES), layout)
    token_1 = torch.where(accepted == 1, drafts, following)
    later = draw(second[token_1], seeds, zeros + 1, Stream.TARGET)
    token_2 = torch.where(accepted == 1, following, later)
    counts = np.bincount((token_1 * VOCAB + token_2).numpy(), minlength=VOCAB**2)
    return counts, (first[:, None] * second).flatten()


def chi_square_p(counts: np.ndarray, exact: torch.Tensor) -> float:
    expected = exact.double() * counts.sum()
    return float(stats.chisquare(counts, (expected / expected.sum() * counts.sum()).numpy()).pvalue)


@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_rejection_sampling_keeps_the_targets_distribution(greedy_drafts: bool) -> None:
    assert chi_square_p(*first_two_tokens(greedy_drafts)) > 0.01


@pytest.mark.parametrize("greedy_drafts", [False, True])
def test_without_the_residual_the_distribution_is_wrong(greedy_drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: leaving the residual step out is noticed."""
    monkeypatch.setattr(verify, "_residual", lambda weights, *rest: weights)
    assert chi_square_p(*first_two_tokens(greedy_drafts)) < 1e-6


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

"""Draft logits become draft tokens in the target's ids, with the distribution that they were drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_backend.drafters.base import DraftSampler
from dflash_backend.sampling.filtering import draw
from dflash_backend.sampling.random import Stream
from dflash_backend.sampling.verify import VerifyLayout, verify_sampled
from dflash_backend.sampling.vocabulary import VocabularyMap
from tests.sampling.test_filtering import rows

TARGET_VOCAB = 7
IDS = torch.tensor([1, 2, 4, 6])
VOCABULARY = VocabularyMap(IDS, TARGET_VOCAB)
SAMPLES = 40_000


def draft_logits(n: int) -> torch.Tensor:
    return torch.randn(n, len(IDS), generator=torch.Generator().manual_seed(1)) * 1.5


def test_greedy_drafts_are_mapped_to_the_targets_ids() -> None:
    logits = draft_logits(6)
    sampler = DraftSampler(None, np.empty(0, dtype=np.int64))
    tokens = sampler.choose(logits, np.zeros(6, dtype=np.int64), np.arange(6), VOCABULARY)
    assert tokens.tolist() == [IDS[i].item() for i in logits.argmax(dim=1)]
    assert sampler.probs is None


def test_sampled_drafts_are_those_of_the_draft_vocabulary_with_their_probabilities_moved() -> None:
    logits, row_index, positions = draft_logits(6), np.array([0, 0, 1, 1, 2, 2]), np.arange(6)
    sampled_rows = np.array([0, 2])
    plain, mapped = (DraftSampler(rows(2, top_k=3), sampled_rows) for _ in range(2))
    tokens = plain.choose(logits.clone(), row_index, positions)
    assert mapped.choose(logits.clone(), row_index, positions, VOCABULARY).tolist() == IDS[tokens].tolist()
    assert mapped.sampled_flat.tolist() == [0, 1, 4, 5]
    assert plain.probs is not None
    assert mapped.probs is not None
    assert mapped.probs.shape == (4, TARGET_VOCAB)
    assert torch.equal(mapped.probs[:, IDS], plain.probs)
    assert mapped.probs.sum(dim=1).tolist() == pytest.approx([1.0] * 4)


def first_token_counts(method: str, vocabulary: VocabularyMap) -> tuple[np.ndarray, torch.Tensor]:
    """Counts of the token that stands at one position over many seeds, and the target's distribution of it."""
    target = torch.randn(TARGET_VOCAB, generator=torch.Generator().manual_seed(3)).softmax(0)
    seeds = torch.arange(SAMPLES)
    zeros = torch.zeros_like(seeds)
    everyone = np.arange(SAMPLES) if method == "probabilistic" else np.empty(0, dtype=np.int64)
    sampler = DraftSampler(rows(SAMPLES), everyone)
    drafts = sampler.choose(draft_logits(1).expand(SAMPLES, -1), np.arange(SAMPLES), zeros.numpy(), vocabulary)
    layout = VerifyLayout.build(np.ones(SAMPLES, dtype=np.int64), torch.device("cpu"))
    accepted, following = verify_sampled(
        target.repeat(2 * SAMPLES, 1), sampler.probs, drafts, zeros, rows(SAMPLES), layout
    )
    assert 0 < accepted.sum() < SAMPLES
    tokens = torch.where(accepted == 1, drafts, following)
    return np.bincount(tokens.numpy(), minlength=TARGET_VOCAB), target


def chi_square_p(counts: np.ndarray, exact: torch.Tensor) -> float:
    expected = exact.double().numpy()
    return float(stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue)


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_a_cut_vocabulary_keeps_the_targets_distribution(method: str) -> None:
    assert chi_square_p(*first_token_counts(method, VOCABULARY)) > 0.01


class MovesNothing(VocabularyMap):
    """Leaves probabilities at the draft's ids."""

    def probabilities(self, draft_probs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(draft_probs, (0, self.target_size - draft_probs.shape[1]))


def test_probabilities_left_at_draft_ids_would_change_the_distribution() -> None:
    """The test above can fail."""
    assert chi_square_p(*first_token_counts("probabilistic", MovesNothing(IDS, TARGET_VOCAB))) < 1e-6


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    logits = draft_logits(1)
    seeds, position = rows(1).seeds, torch.tensor([9])
    sampler = DraftSampler(rows(1), np.array([0]))
    token = sampler.choose(logits, np.array([0]), position.numpy(), VOCABULARY)
    expected = draw(logits.softmax(dim=1), seeds, position, Stream.DRAFT)
    assert token.tolist() == IDS[expected].tolist()

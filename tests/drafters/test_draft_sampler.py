"""Draft logits become draft tokens in the target's ids, with the distribution that they were drawn from."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_backend.drafters.base import DraftSampler
from dflash_backend.sampling.filtering import draw
from dflash_backend.sampling.random import Stream
from dflash_backend.sampling.vocabulary import VocabularyMap
from dflash_backend.worker.step_ops import HostStepOps
from tests.sampling.rejection import accepted
from tests.sampling.test_filtering import rows

TARGET_VOCAB = 7
IDS = torch.tensor([1, 2, 4, 6])
VOCABULARY = VocabularyMap(IDS, TARGET_VOCAB)
SAMPLES = 40_000


def draft_logits(n: int) -> torch.Tensor:
    return torch.randn(n, len(IDS), generator=torch.Generator().manual_seed(1)) * 1.5


OPS = HostStepOps()


def test_greedy_drafts_are_mapped_to_the_targets_ids() -> None:
    logits = draft_logits(6)
    sampler = DraftSampler(OPS)
    tokens = sampler.choose(logits, torch.arange(6), VOCABULARY)
    assert tokens.tolist() == [IDS[i].item() for i in logits.argmax(dim=1)]
    assert sampler.probs is None


def test_sampled_drafts_are_those_of_the_draft_vocabulary_with_their_probabilities_moved() -> None:
    logits, positions, sampled = draft_logits(6), torch.arange(6), torch.tensor([0, 1, 4, 5])
    plain, mapped = (DraftSampler(OPS, rows(4, top_k=3), sampled) for _ in range(2))
    tokens = plain.choose(logits, positions)
    assert tokens[2:4].tolist() == logits[2:4].argmax(dim=1).tolist()
    assert mapped.choose(logits, positions, VOCABULARY).tolist() == IDS[tokens].tolist()
    assert plain.probs is not None
    assert mapped.probs is not None
    assert mapped.probs.shape == (4, TARGET_VOCAB)
    assert torch.equal(mapped.probs[:, IDS], plain.probs)
    assert mapped.probs.sum(dim=1).tolist() == pytest.approx([1.0] * 4)


def test_drafts_chosen_by_a_mask_are_those_chosen_by_their_index() -> None:
    logits, positions, sampled = draft_logits(6), torch.arange(6), torch.tensor([0, 1, 4, 5])
    mask = torch.zeros(6, dtype=torch.bool).index_fill_(0, sampled, True)
    some, every = rows(6), rows(6)
    for field in ("temperature", "top_p", "top_k", "min_p", "seeds"):
        some = dataclasses.replace(some, **{field: getattr(every, field)[sampled]})
    by_index = DraftSampler(OPS, some, sampled).choose(logits, positions)
    assert DraftSampler(OPS, every, sampled=mask).choose(logits, positions).tolist() == by_index.tolist()


def first_token_counts(method: str, vocabulary: VocabularyMap) -> tuple[np.ndarray, torch.Tensor]:
    """Counts of the token at one position over many seeds, and the target's distribution of it."""
    target = torch.randn(TARGET_VOCAB, generator=torch.Generator().manual_seed(3)).softmax(0)
    sampler = DraftSampler(OPS, rows(SAMPLES) if method == "probabilistic" else None)
    zeros = torch.zeros(SAMPLES, dtype=torch.int64)
    drafts = sampler.choose(draft_logits(1).expand(SAMPLES, -1), zeros, vocabulary)
    probs = target.repeat(2 * SAMPLES, 1)
    count, following = accepted([1] * SAMPLES, drafts, probs.argmax(1), probs, sampler.probs)
    assert 0 < count.sum() < SAMPLES
    tokens = torch.where(count == 1, drafts, following)
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
    token = DraftSampler(OPS, rows(1)).choose(logits, position, VOCABULARY)
    expected = draw(logits.softmax(dim=1), seeds, position, Stream.DRAFT)
    assert token.tolist() == IDS[expected].tolist()

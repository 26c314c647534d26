"""The best of several slices of a vocabulary is that of the whole, to the token and to its log-odds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dflash_backend.models.filtered_choice import NUM_CANDIDATES, ROUNDING, filtered_tokens, largest_logits
from dflash_backend.models.interface import Choice, Filters
from dflash_backend.models.vocabulary import argmax_over_ranks
from dflash_backend.parallel.shard import Shard
from dflash_kernels.log_odds import log_odds_reference
from dflash_kernels.logits_filter import lowest_kept_reference
from dflash_kernels.noisy_scores import noisy_scores_reference
from dflash_kernels.sample import sample_reference, scored_sample_reference
from tests.scale import scaled

pytestmark = pytest.mark.usefixtures("single_thread")


def slices(vocab_size: int, size: int) -> list[range]:
    return [Shard(rank, size, True).vocabulary(vocab_size) for rank in range(size)]


@pytest.mark.parametrize(("vocab_size", "size"), [(97, 2), (97, 4), (8, 4), (4, 4), (151_936, 3)])
def test_slices_hold_each_token_once(vocab_size: int, size: int) -> None:
    found = slices(vocab_size, size)
    assert [token for each in found for token in each] == list(range(vocab_size))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sampled", ["none", "some", "all"])
def test_the_best_of_slices_is_the_best_of_all(size: int, sampled: str) -> None:
    generator = torch.Generator().manual_seed(size)
    n, vocab_size = 64, 203
    # Of few values, so that many are equal.
    logits = torch.randint(-3, 4, (n, vocab_size), generator=generator).float()
    if sampled == "none":
        noise = None, None, None
        expected = sample_reference(logits, torch.zeros(n), torch.zeros(n).long(), torch.zeros(n).long())
    else:
        every = torch.arange(n) % (2 if sampled == "some" else 1) == 0
        temperature = torch.where(every, 0.7 + torch.rand(n, generator=generator), 0.0)
        seeds, positions = (torch.randint(1, 1 << 40, (n,), generator=generator) for _ in range(2))
        noise = temperature, seeds, positions
        expected = sample_reference(logits, *noise)
    parts = []
    for own in slices(vocab_size, size):
        ids = torch.arange(own.start, own.stop)
        part = logits[:, own.start : own.stop]
        scores, columns = scored_sample_reference(part, *noise, ids)
        of_logit = part.gather(1, columns[:, None])[:, 0]
        found = [scores, ids[columns], of_logit, part.logsumexp(dim=1)]
        parts.append(torch.stack([each.double() for each in found], dim=1))
    chosen, sure = argmax_over_ranks(torch.stack(parts, dim=1), wants_log_odds=True)
    assert torch.equal(chosen, expected)
    assert sure is not None
    torch.testing.assert_close(sure, log_odds_reference(logits, expected), atol=1e-4, rtol=1e-4)


def test_a_score_has_the_bits_that_it_was_compared_by() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(300, 501, generator=generator)
    temperature = 0.3 + torch.rand(300, generator=generator)
    seeds, positions = (torch.randint(1, 1 << 40, (300,), generator=generator) for _ in range(2))
    all_scores = noisy_scores_reference(logits, temperature, seeds, positions)
    scores, columns = scored_sample_reference(logits, temperature, seeds, positions, torch.arange(501))
    assert torch.equal(scores, all_scores.amax(dim=1))
    assert torch.equal(columns, all_scores.argmax(dim=1))


def test_what_is_no_number_counts_as_the_largest() -> None:
    found = torch.tensor([[[5.0, 1], [float("nan"), 7], [9.0, 8]]], dtype=torch.float64)
    assert argmax_over_ranks(found, wants_log_odds=False)[0].tolist() == [7]


def test_of_equal_scores_the_lowest_id_is_chosen() -> None:
    found = torch.tensor([[[5.0, 1], [5.0, 7]], [[4.0, 2], [5.0, 7]]], dtype=torch.float64)
    assert argmax_over_ranks(found, wants_log_odds=False)[0].tolist() == [1, 7]


def filtered(logits: torch.Tensor, size: int, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    assert choice.filters is not None
    assert choice.temperature is not None
    parts = []
    own_ids = slices(logits.shape[1], size)
    for own in own_ids:
        ids = torch.arange(own.start, own.stop)
        parts.append(largest_logits(logits[:, own.start : own.stop], ids, choice.temperature))
    return filtered_tokens(torch.stack(parts, dim=1), own_ids, choice, choice.filters)


def random_choice(n: int, generator: torch.Generator) -> Choice:
    """Rows with filters of each kind, some with a temperature of 0, some with a temperature alone."""

    def some(values: torch.Tensor, nothing: float) -> torch.Tensor:
        return torch.where(torch.rand(n, generator=generator) < 0.5, values, torch.full((n,), nothing))

    def between(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(n, generator=generator)

    seeds, positions = (torch.randint(1, 1 << 40, (n,), generator=generator) for _ in range(2))
    filters = Filters(some(between(1, 90), 0.0).long(), some(between(0.0, 1.0), 1.0), some(between(0.0, 0.3), 0.0))
    return Choice(some(between(0.2, 1.6), 0.0), seeds, positions, filters=filters)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("vocab_size", [97, 3001])
@pytest.mark.parametrize("kind", ["peaked", "flat", "tied"])
def test_filtered_tokens_are_those_of_all_logits_where_they_are_decided(kind: str, vocab_size: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    n = 2000
    logits = torch.randn(n, vocab_size, generator=generator) * {"peaked": 4.0, "flat": 0.1, "tied": 3.0}[kind]
    if kind == "tied":
        logits = logits.round()
    choice = random_choice(n, generator)
    found, decided = filtered(logits, size, choice)
    assert choice.filters is not None
    lowest = lowest_kept_reference(logits, choice.temperature, *vars(choice.filters).values())
    expected = sample_reference(logits, choice.temperature, choice.seeds, choice.positions, lowest)
    assert torch.equal(found[decided], expected[decided])
    assert decided.float().mean() > {"peaked": 0.5, "flat": 0.2, "tied": 0.1}[kind]
    if vocab_size > NUM_CANDIDATES * size:
        assert not decided.all()


def sums_above(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """The sum of probabilities before each token of the sorted row, float64."""
    of_rank = logits.sort(dim=1, descending=True).values / temperature[:, None]
    shares = of_rank.double().softmax(dim=1)
    return shares.cumsum(dim=1) - shares


def hard_logits(kind: str, n: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(n, vocab_size, generator=generator)
    infinity = torch.tensor(float("inf"))
    if kind == "equal":
        return logits[:, :1].expand(n, vocab_size).contiguous()
    if kind == "tied":
        return (logits * 3.0).round()
    if kind == "neighbours":  # that float32 just tells apart
        return (1000.0 + (logits * 3.0).round() * 2.0**-14).float()
    if kind == "large":
        return logits * 10.0 ** (40.0 * torch.rand(n, 1, generator=generator) - 2.0)
    if kind == "few":  # as penalties and masks leave them
        return logits.where(logits > 1.5, -infinity)
    if kind == "infinite":
        return logits.where(logits < 2.0, infinity)
    return logits * 4.0


@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["peaked", "equal", "tied", "neighbours", "large", "few", "infinite"]),
    vocab_size=st.sampled_from([5, 64, 129, 130, 1000]),
    size=st.sampled_from([2, 3, 4]),
    ulps=st.integers(-2, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@hypothesis_settings(max_examples=scaled(100), deadline=None)
def test_what_is_decided_is_right_however_the_logits_lie(
    seed: int, kind: str, vocab_size: int, size: int, ulps: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = 64
    logits = hard_logits(kind, n, vocab_size, generator).to(dtype)
    choice = random_choice(n, generator)
    assert choice.filters is not None
    assert choice.temperature is not None
    # In half of the rows top-p is a sum of probabilities, or a few ulps beside it.
    above = sums_above(logits, torch.where(choice.temperature > 0.0, choice.temperature, 1.0))
    at = above.gather(1, torch.randint(0, min(8, vocab_size), (n, 1), generator=generator))[:, 0].float()
    for _ in range(abs(ulps)):
        at = torch.nextafter(at, torch.tensor(2.0 if ulps > 0 else -1.0))
    is_hard = (torch.arange(n) % 2 == 0) & (at > 0.0) & (at < 1.0)
    filters = replace(choice.filters, top_p=torch.where(is_hard, at, choice.filters.top_p))
    choice = replace(choice, filters=filters)
    found, decided = filtered(logits, size, choice)
    lowest = lowest_kept_reference(logits, choice.temperature, filters.top_k, filters.top_p, filters.min_p)
    expected = sample_reference(logits, choice.temperature, choice.seeds, choice.positions, lowest)
    assert torch.equal(found[decided], expected[decided])


def test_large_logits_are_divided_as_all_logits_are() -> None:
    """In float32, where neighbours among large numbers become equal or part; top-p lies between both ways to divide."""
    generator = torch.Generator().manual_seed(4)
    n = 1000
    logits = 30_000.0 + (torch.randn(n, 5, generator=generator) * 3.0).round() * 2.0**-9
    temperature = torch.full((n,), 0.7)
    ordered = logits.sort(dim=1, descending=True).values.double()
    exact = (ordered / temperature.double()[:, None]).softmax(dim=1).cumsum(dim=1)[:, 1]
    in_float32 = sums_above(logits, temperature)[:, 2]
    assert ((exact - in_float32).abs() > 10 * ROUNDING).float().mean() > 0.3
    seeds = torch.arange(n)
    filters = Filters(torch.zeros(n).long(), ((exact + in_float32) / 2).float(), torch.zeros(n))
    choice = Choice(temperature, seeds, seeds, filters=filters)
    found, decided = filtered(logits, 2, choice)
    lowest = lowest_kept_reference(logits, temperature, *vars(filters).values())
    expected = sample_reference(logits, temperature, seeds, seeds, lowest)
    assert decided.float().mean() > 0.3
    assert torch.equal(found[decided], expected[decided])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1000, 151_936])
def test_the_sum_of_a_slice_is_as_exact_as_is_relied_on(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, vocab_size, generator=generator) * torch.tensor([0.01, 0.1, 1.0, 2.0, 4.0, 100.0])[:, None]
    logits = logits.to(dtype)
    temperature = torch.tensor([0.01, 0.1, 0.7, 1.0, 1.3, 0.05])
    found = largest_logits(logits, torch.arange(vocab_size), temperature)[:, 0].exp()
    exact = (logits / temperature[:, None]).double()
    expected = (exact - exact.amax(dim=1, keepdim=True)).exp().sum(dim=1)
    assert ((found - expected).abs() / expected).max() < ROUNDING / 2


def one_row(logits: torch.Tensor, **filters: float) -> tuple[int, bool]:
    values = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0} | filters
    top_k, top_p, min_p = (torch.tensor([values[name]]) for name in ("top_k", "top_p", "min_p"))
    of_row = Filters(top_k.long(), top_p, min_p)
    noise = torch.tensor([1.0]), torch.tensor([5]), torch.tensor([7])
    token, decided = filtered(logits[None], 2, Choice(*noise, filters=of_row))
    return int(token), bool(decided)


def test_a_sum_as_close_to_top_p_as_rounding_is_undecided() -> None:
    logits = torch.full((1000,), -50.0)
    logits[[3, 900]] = 0.0
    assert not one_row(logits, top_p=0.5)[1]
    assert one_row(logits, top_p=0.49)[1]
    assert one_row(logits, top_p=0.51)[1]


def test_bfloat16_is_decided_about_as_often_as_float32() -> None:
    """It has ties, and only those at the largest logit that a slice leaves out keep a row from being decided."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(400, 3001, generator=generator) * 4.0
    choice = random_choice(400, generator)
    decided = [filtered(each, 2, choice)[1].float().mean() for each in (logits, logits.bfloat16())]
    assert decided[0] > 0.5
    assert abs(decided[0] - decided[1]) < 0.05


def test_ties_that_a_slice_leaves_out_are_not_decided_without_them() -> None:
    logits = torch.zeros(1000)
    logits[:5] = 1.0
    assert one_row(logits, top_k=5)[1]
    assert not one_row(logits, top_k=6)[1]
    assert not one_row(logits, min_p=0.3)[1]
    assert one_row(logits, min_p=0.4)[1]


def test_a_slice_without_any_token_adds_nothing() -> None:
    """As a mask leaves it. The largest of three tokens has 0.67 of the probability."""
    n = 100
    logits = torch.full((n, 1000), float("-inf"))
    logits[:, :3] = torch.tensor([2.0, 1.0, 0.0])
    filters = Filters(torch.zeros(n).long(), torch.full((n,), 0.5), torch.zeros(n))
    tokens, decided = filtered(logits, 2, Choice(torch.ones(n), torch.arange(n), torch.arange(n), filters=filters))
    assert decided.all()
    assert not tokens.any()


def test_what_is_no_number_is_undecided() -> None:
    logits = torch.randn(1000)
    logits[700] = float("nan")
    assert not one_row(logits, top_k=3)[1]

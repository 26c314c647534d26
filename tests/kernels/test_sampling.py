"""The kernels that choose tokens equal their references: argmax, the filters, and sampling with Gumbel noise."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from dflash_kernels import cpu_ops
from dflash_kernels.argmax import argmax, argmax_reference
from dflash_kernels.gumbel_noise import gumbel_reference
from dflash_kernels.log_odds import log_odds, log_odds_reference
from dflash_kernels.logits_filter import lowest_kept, lowest_kept_reference
from dflash_kernels.sample import noisy_scores, noisy_scores_reference, sample, sample_reference
from tests.kernels.inputs import DEVICE
from tests.support.scale import one_in, scaled

TILE = 64
# Logits of a group, and groups that are searched in place of a row: some rows have more.
GROUP, MOST_KEPT = 8, 6
SIZES = [(3, 63), (2, 64), (5, 65), (3, 500)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("num_rows", "vocab"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_equals_its_reference(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    values = randn(num_rows, vocab).to(dtype)
    assert argmax(values.to(DEVICE), TILE).tolist() == argmax_reference(values).tolist()


def test_the_lowest_of_equal_tokens_is_taken_within_a_tile_and_across_tiles() -> None:
    values = torch.zeros(3, 200, device=DEVICE)
    values[0, [70, 71, 199]] = 1.0
    values[1, 130:] = 2.0
    assert argmax(values, TILE).tolist() == [70, 130, 0]


def test_argmax_is_a_token_even_of_values_that_are_not_numbers() -> None:
    values = torch.full((4, 70), float("-inf"))
    values[1] = float("nan")
    values[2, [65, 66]] = float("nan")
    values[3, 69] = -1e30
    assert argmax(values.to(DEVICE), TILE).tolist() == argmax_reference(values).tolist() == [0, 0, 65, 69]
    assert argmax_reference(values.double()).tolist() == [0, 0, 65, 69]


def test_rows_may_be_part_of_a_wider_tensor() -> None:
    wide = randn(4, 200).to(DEVICE)
    assert torch.equal(argmax(wide[:, :150], TILE), wide[:, :150].argmax(-1))
    assert_same_filter(wide[:, :150].cpu(), filters(4, top_k=7), wide[:, :150])


def filters(num_rows: int, **changes: float) -> list[torch.Tensor]:
    """Temperature, top_k, top_p and min_p, the same for all rows; all tokens are kept unless `changes` say so."""
    values = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    return [
        torch.full((num_rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in values.items()
    ]


def by_hand(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The distribution in plain Python, as docs/clients.md has it: the temperature, then min-p, top-k and top-p."""

    def softmax(scaled: list[float]) -> list[float]:
        weights = [math.exp(value - max(scaled)) for value in scaled]
        return [weight / sum(weights) for weight in weights]

    def without(scaled: list[float], kept: set[int]) -> list[float]:
        return [value if token in kept else -math.inf for token, value in enumerate(scaled)]

    scaled = [logit / temperature for logit in logits]
    probs = softmax(scaled)
    scaled = without(scaled, {token for token, prob in enumerate(probs) if prob >= min_p * max(probs)})
    by_rank = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k > 0:
        scaled = without(scaled, set(by_rank[:top_k]))
    probs, kept, total = softmax(scaled), set(), 0.0
    for token in by_rank:
        if total < top_p:
            kept.add(token)
        total += probs[token]
    return softmax(without(scaled, kept))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"min_p": 0.35},
        {"top_k": 4, "top_p": 0.8},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.12},
    ],
)
def test_the_filters_see_the_probabilities_at_the_temperature(temperature: float, changes: dict[str, float]) -> None:
    """Each filter would keep other tokens if it came before the temperature."""
    logits = [1.3, -0.4, 0.9, 2.2, -1.6, 0.1]
    values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    expected = by_hand(logits, temperature, int(values["top_k"]), values["top_p"], values["min_p"])
    kept = assert_same_filter(torch.tensor([logits]), filters(1, temperature=temperature, **changes))
    assert kept[0].tolist() == [prob > 0.0 for prob in expected]
    assert 0.0 in expected or temperature > 1.0


def assert_same_filter(
    logits: torch.Tensor, parameters: list[torch.Tensor], on_device: torch.Tensor | None = None
) -> torch.Tensor:
    """The tokens that the kernel keeps, bool `[n, vocab]`, which are those of the reference, and of the C++."""
    moved = logits.to(DEVICE) if on_device is None else on_device
    found = lowest_kept(moved, *(each.to(DEVICE) for each in parameters), TILE, GROUP, MOST_KEPT).cpu()
    expected = lowest_kept_reference(logits, *parameters)
    allowed = logits.float() > float("-inf")
    kept = allowed & (logits.float() >= found[:, None])
    reference = allowed if expected is None else allowed & (logits.float() >= expected[:, None])
    assert torch.equal(kept, reference)
    if cpu_ops.HAS_CPU_OPS:
        on_host = cpu_ops.lowest_kept(logits, *parameters)
        assert (on_host is None) == (expected is None)
        if on_host is not None:
            assert torch.equal(allowed & (logits.float() >= on_host[:, None]), reference)
    return kept


def test_no_rows_and_a_vocabulary_of_one_token_are_taken() -> None:
    for num_rows, vocab in ((0, 70), (1, 1)):
        values, integers = randn(num_rows, vocab), torch.ones(num_rows, dtype=torch.int64)
        assert argmax(values.to(DEVICE), TILE).tolist() == [0] * num_rows
        assert assert_same_filter(values, filters(num_rows, top_k=1, top_p=0.5)).tolist() == [[True]] * num_rows
        assert on_device(values, torch.ones(num_rows), integers, integers).tolist() == [0] * num_rows


@pytest.mark.parametrize(("seed", "dtype", "size"), one_in(3, range(4), DTYPES, SIZES))
def test_the_filter_equals_its_reference(size: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    """Every row with filters of its own, or none; with half-precision logits many tokens are equally likely."""
    num_rows, vocab = size
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(num_rows, vocab, generator=generator)).to(dtype)

    def uniform() -> torch.Tensor:
        return torch.rand(num_rows, generator=generator)

    top_k = torch.randint(0, vocab + 2, (num_rows,), generator=generator)
    top_p = torch.where(uniform() < 0.3, 1.0, uniform().clamp(min=0.01))
    min_p = torch.where(uniform() < 0.5, 0.0, 0.2 * uniform())
    assert_same_filter(logits, [0.1 + 2 * uniform(), top_k, top_p, min_p])


def test_a_row_that_filters_nothing_keeps_everything_beside_one_that_does() -> None:
    parameters = filters(3, top_k=1)
    parameters[1][1] = 0
    parameters[0][2] = 0.0  # greedy
    kept = assert_same_filter(randn(3, 90), parameters)
    assert kept.sum(dim=1)[:2].tolist() == [1, 90]


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_equally_likely_tokens_are_kept_or_hidden_together(changes: dict[str, float]) -> None:
    logits = torch.zeros(1, 3 * TILE)
    logits[0, [5, TILE + 1, 2 * TILE]] = -4.0
    logits[0, [7, TILE, 2 * TILE + 3, 3 * TILE - 1]] = 8.0
    kept = assert_same_filter(logits, filters(1, **changes))
    assert kept.nonzero()[:, 1].tolist() == [7, TILE, 2 * TILE + 3, 3 * TILE - 1]


def test_filters_at_either_end_keep_one_token_or_all() -> None:
    logits = randn(1, 200)
    for changes in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-50}, {"min_p": 1.0}):
        assert assert_same_filter(logits, filters(1, **changes)).count_nonzero() == 1
    for changes in ({"top_k": 200}, {"top_k": 5000}, {"top_p": 1.0}):
        assert assert_same_filter(logits, filters(1, **changes)).count_nonzero() == 200


# Differences of logits overflow, to a probability of 0.
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_logits_of_any_size_are_searched() -> None:
    """From the smallest differences to the largest: a search by halves of the values alone would not end soon."""
    logits = torch.tensor([[0.0, 1e-38, -1e-30, 1e-3, 1.0, 1.0000001, -5e4, 3e4, 3e38, -3e38]]).repeat(9, 1)
    assert_same_filter(logits, [torch.ones(9), torch.arange(1, 10), torch.ones(9), torch.zeros(9)])


def on_device(logits: torch.Tensor, *parameters: torch.Tensor | None) -> torch.Tensor:
    """The kernel's choice on the host."""
    moved = [None if each is None else each.to(DEVICE) for each in parameters]
    return sample(logits.to(DEVICE), *moved, *[None] * (5 - len(moved)), TILE).cpu()


def requests(num_rows: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperature, seeds and positions of requests that have nothing in common."""
    generator = torch.Generator().manual_seed(num_rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    return torch.full((num_rows,), temperature), seeds, torch.randint(2**20, (num_rows,), generator=generator)


@pytest.mark.parametrize(("size", "dtype", "filtered"), one_in(2, SIZES, DTYPES, [True, False]))
def test_a_sample_equals_its_reference(size: tuple[int, int], dtype: torch.dtype, filtered: bool) -> None:
    """With a greedy row among them, and ids from a draft vocabulary."""
    num_rows, vocab = size
    logits = (3 * randn(num_rows, vocab)).to(dtype)
    temperature, seeds, positions = requests(num_rows, 1.3)
    temperature[1] = 0.0
    lowest = logits.float().quantile(0.95, dim=1) - 0.01 * torch.arange(num_rows) if filtered else None
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(3))[:vocab]
    for token_ids in (None, ids):
        arguments = temperature, seeds, positions, lowest, token_ids
        expected = sample_reference(logits, *arguments)
        assert on_device(logits, *arguments).tolist() == expected.tolist()
        assert expected[1] == logits[1].argmax()
        if lowest is not None:
            assert (logits.gather(1, expected[:, None]).squeeze(1).float() >= lowest).all()
            # What a filter hides, and nothing else, is not chosen at a temperature at which all are equally likely.
            hot = torch.full_like(temperature, 1e4), *arguments[1:]
            hot[0][1] = 0.0
            kept = logits.gather(1, sample_reference(logits, *hot)[:, None]).squeeze(1).float() >= lowest
            assert kept.all()
            assert (on_device(logits, *hot) == sample_reference(logits, *hot)).all()


def test_samples_have_the_distribution_of_the_logits_that_are_kept() -> None:
    count, temperature = 200_000, 1.7
    logits = 2 * randn(1, 64)
    lowest = logits.quantile(0.3)
    seeds, positions = torch.arange(count), torch.arange(count) % 97
    tokens = sample_reference(
        logits.expand(count, -1), torch.full((count,), temperature), seeds, positions, lowest.expand(count)
    )
    expected = (logits[0].double() / temperature).masked_fill(logits[0] < lowest, float("-inf")).softmax(0) * count
    counts = torch.bincount(tokens, minlength=64)
    assert not counts[expected == 0.0].any()
    kept = expected > 0.0
    assert stats.chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue > 0.001


def test_a_draft_of_the_same_logits_is_the_targets_token_in_a_smaller_vocabulary_too() -> None:
    """The noise belongs to the target's id: a drafter that knows the same logits for its tokens takes the same one."""
    ids = torch.arange(3, 120, 2)
    logits = torch.full((50, 120), -40.0)
    logits[:, ids] = randn(50, len(ids))
    target = on_device(logits, *requests(50))
    draft = on_device(logits[:, ids].contiguous(), *requests(50), None, ids)
    assert ids[draft].tolist() == target.tolist()
    assert len(target.unique()) > 20


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    count = scaled(125, at_least=50)  # `make nightly` has 500
    logits = torch.full((count, 130), float("-inf"))
    logits[:, 67] = -1e30
    assert (on_device(logits, *requests(count)) == 67).all()
    assert (sample_reference(logits, *requests(count)) == 67).all()


def test_the_reference_chooses_the_same_whatever_it_hashes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sample_reference(randn(50, 90), *requests(50))
    monkeypatch.setattr("dflash_kernels.sample.NOISE_AT_A_TIME", 200)
    assert sample_reference(randn(50, 90), *requests(50)).tolist() == expected.tolist()


def test_rounding_seldom_changes_what_is_chosen() -> None:
    """A prefix hit computes the same logits in another order; LOSSLESS must not hang on the last bits."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(20_000, 256, generator=generator)
    rounding = 4e-6 * torch.randn(20_000, 256, generator=generator)
    first, second = (sample_reference(x, *requests(20_000)) for x in (logits, logits + rounding))
    assert (first != second).sum().item() <= 2


def test_noise_depends_on_seed_position_and_token_and_on_nothing_else() -> None:
    """Neighbours in any of the three are independent, and a part of the tokens has the numbers of the whole."""
    count = 60_000
    zeros, numbers = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    columns = [gumbel_reference(numbers, zeros + p, torch.tensor([t]))[:, 0] for p in (3, 4) for t in (0, 1)]
    columns += [gumbel_reference(zeros + s, numbers, torch.tensor([t]))[:, 0] for s in (0, 1) for t in (0, 1)]
    columns += [gumbel_reference(torch.tensor([s]), torch.tensor([p]), numbers)[0] for s in (0, 1) for p in (0, 1)]
    correlation = torch.stack(columns).corrcoef() - torch.eye(len(columns))
    assert correlation.abs().max() < 0.025
    for column in columns:
        assert stats.kstest(column.numpy(), stats.gumbel_r.cdf).pvalue > 0.001
    ids = torch.tensor([70, 3, 900])
    whole = gumbel_reference(numbers[:5], zeros[:5], torch.arange(1000))
    assert torch.equal(whole[:, ids], gumbel_reference(numbers[:5], zeros[:5], ids))


def every_log_odds(logits: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """By Triton, by torch, and by C++ where it has been built."""
    found = [log_odds(logits.to(DEVICE), ids.to(DEVICE), TILE).cpu(), log_odds_reference(logits, ids)]
    return [*found, cpu_ops.log_odds(logits, ids)] if cpu_ops.HAS_CPU_OPS else found


@pytest.mark.parametrize(("num_rows", "vocab"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_odds_equal_their_reference(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (2 * randn(num_rows, vocab)).to(dtype)
    ids = logits.argmax(-1)
    ids[0] = 1
    expected = torch.special.logit(logits.double().softmax(-1).gather(1, ids[:, None])[:, 0]).float().clamp(-8, 8)
    for found in every_log_odds(logits, ids):
        assert torch.allclose(found, expected, atol=1e-3)


def test_log_odds_have_bounds_whatever_the_logits_are() -> None:
    logits = torch.zeros(5, 100)
    logits[0, 7], logits[1, 7] = 50.0, -50.0
    logits[2, 7] = float("-inf")
    logits[3] = float("nan")
    logits[4] = float("-inf")
    logits[4, 7] = 0.0
    ids = torch.full((5,), 7)
    for found in every_log_odds(logits, ids):
        assert found.tolist() == [8.0, -8.0, -8.0, -8.0, 8.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_noisy_scores_are_those_that_sampling_takes_the_largest_of(dtype: torch.dtype) -> None:
    """Past a tile's end too, and the logits themselves where there is no temperature."""
    logits = randn(4, 2100).to(dtype)
    temperature = torch.tensor([0.5, 0.0, 3.0, 1.0])
    seeds, positions = torch.tensor([7, 8, 9, 2**62]), torch.tensor([0, 5, 70_000, 3])
    expected = logits.float() / temperature.where(temperature > 0, 1.0)[:, None]
    expected[[0, 2, 3]] += gumbel_reference(seeds, positions, torch.arange(2100))[[0, 2, 3]]
    inputs = (logits, temperature, seeds, positions)
    on_device = noisy_scores(*(each.to(DEVICE) for each in inputs)).cpu()
    for scores in (noisy_scores_reference(*inputs), on_device):
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-5)
        assert torch.equal(scores[1], logits[1].float())
        assert scores.argmax(dim=-1).tolist() == sample_reference(*inputs).tolist()

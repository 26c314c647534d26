"""The kernels that choose tokens equal their references: argmax, the filtered distribution, and the draw."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_kernels.argmax import argmax, argmax_reference
from dflash_kernels.draw import draw, draw_reference
from dflash_kernels.filtered_softmax import filtered_softmax, filtered_softmax_reference
from tests.kernels.inputs import DEVICE

TILE = 64
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


def test_rows_may_be_part_of_a_wider_tensor() -> None:
    wide = randn(4, 200).to(DEVICE)
    assert torch.equal(argmax(wide[:, :150], TILE), wide[:, :150].argmax(-1))
    parameters = [tensor.to(DEVICE) for tensor in cuts(4)]
    torch.testing.assert_close(
        filtered_softmax(wide[:, :150], *parameters, TILE), filtered_softmax_reference(wide[:, :150], *parameters)
    )


def cuts(num_rows: int, **changes: float) -> list[torch.Tensor]:
    """Temperature, top_k, top_p and min_p, the same for all rows; none cuts anything unless `changes` say so."""
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
def test_the_cuts_see_the_probabilities_at_the_temperature(temperature: float, changes: dict[str, float]) -> None:
    """Each cut would keep other tokens if it came before the temperature."""
    logits = [1.3, -0.4, 0.9, 2.2, -1.6, 0.1]
    values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    expected = by_hand(logits, temperature, int(values["top_k"]), values["top_p"], values["min_p"])
    probs = assert_same_distribution(torch.tensor([logits]), cuts(1, temperature=temperature, **changes))
    assert probs[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert 0.0 in expected or temperature > 1.0


def test_no_rows_and_a_vocabulary_of_one_token_are_taken() -> None:
    for num_rows, vocab in ((0, 70), (1, 1)):
        values, integers = randn(num_rows, vocab), torch.ones(num_rows, dtype=torch.int64)
        assert argmax(values.to(DEVICE), TILE).tolist() == [0] * num_rows
        assert assert_same_distribution(values, cuts(num_rows, top_k=1, top_p=0.5)).tolist() == [[1.0]] * num_rows
        weights = torch.ones(num_rows, vocab, device=DEVICE)
        assert draw(weights, integers.to(DEVICE), integers.to(DEVICE), 1, TILE).tolist() == [0] * num_rows


def assert_same_distribution(logits: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    """The kernel's result, which equals the reference's and hides the same tokens."""
    probs = filtered_softmax(logits.to(DEVICE), *(tensor.to(DEVICE) for tensor in parameters), TILE).cpu()
    expected = filtered_softmax_reference(logits, *parameters)
    torch.testing.assert_close(probs, expected, rtol=2e-5, atol=1e-9)
    assert torch.equal(probs > 1e-30, expected > 1e-30)
    return probs


@pytest.mark.parametrize(("num_rows", "vocab"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_at_a_temperature_equals_its_reference(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (10 * randn(num_rows, vocab)).to(dtype)
    parameters = [torch.linspace(0.3, 3.0, num_rows), *cuts(num_rows)[1:]]
    assert_same_distribution(logits, parameters)


@pytest.mark.parametrize(("num_rows", "vocab"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_filtered_distribution_equals_its_reference(num_rows: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
    """Every row with cuts of its own, or none; with half-precision logits many tokens are equally likely."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(num_rows, vocab, generator=generator)).to(dtype)

    def uniform() -> torch.Tensor:
        return torch.rand(num_rows, generator=generator)

    top_k = torch.randint(0, vocab + 2, (num_rows,), generator=generator)
    top_p = torch.where(uniform() < 0.3, 1.0, uniform().clamp(min=0.01))
    min_p = torch.where(uniform() < 0.5, 0.0, 0.2 * uniform())
    assert_same_distribution(logits, [0.1 + 2 * uniform(), top_k, top_p, min_p])


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_equally_likely_tokens_are_kept_or_hidden_together(changes: dict[str, float]) -> None:
    logits = torch.zeros(1, 3 * TILE)
    logits[0, [5, TILE + 1, 2 * TILE]] = -4.0
    logits[0, [7, TILE, 2 * TILE + 3, 3 * TILE - 1]] = 8.0
    probs = assert_same_distribution(logits, cuts(1, **changes))
    assert probs.nonzero()[:, 1].tolist() == [7, TILE, 2 * TILE + 3, 3 * TILE - 1]
    assert probs.unique().tolist() == [0.0, 0.25]


def test_cuts_at_either_end_keep_one_token_or_all() -> None:
    logits = randn(1, 200)
    for changes in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert assert_same_distribution(logits, cuts(1, **changes)).count_nonzero() == 1
    for changes in ({"top_k": 200}, {"top_k": 5000}, {"top_p": 1.0}):
        assert assert_same_distribution(logits, cuts(1, **changes)).count_nonzero() == 200


# Differences of logits overflow, to a probability of 0.
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_logits_of_any_size_are_searched() -> None:
    """From the smallest differences to the largest: a search by halves of the values alone would not end soon."""
    logits = torch.tensor([[0.0, 1e-38, -1e-30, 1e-3, 1.0, 1.0000001, -5e4, 3e4, 3e38, -3e38]]).repeat(9, 1)
    assert_same_distribution(logits, [torch.ones(9), torch.arange(1, 10), torch.ones(9), torch.zeros(9)])


@pytest.mark.parametrize("changes", [{}, {"top_k": 70}, {"top_k": 150}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_forbidden_tokens_have_probability_zero(changes: dict[str, float]) -> None:
    logits = randn(2, 3 * TILE)
    logits[:, :TILE] = float("-inf")
    logits[1, 2 * TILE :] = float("-inf")
    assert not assert_same_distribution(logits, cuts(2, **changes))[:, :TILE].any()


@pytest.mark.parametrize(("num_rows", "vocab"), SIZES)
@pytest.mark.parametrize("stream", [1, 2, 3])
def test_draw_equals_its_reference(num_rows: int, vocab: int, stream: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = (3 * randn(num_rows, vocab)).softmax(-1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(2**20, (num_rows,), generator=generator)
    drawn = draw(weights.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE), stream, TILE)
    assert drawn.tolist() == draw_reference(weights, seeds, positions, stream).tolist()


def test_many_draws_from_one_distribution_equal_their_reference() -> None:
    weights = randn(1, 90).softmax(-1).expand(120, -1).contiguous()
    seeds, positions = torch.full((120,), 17), torch.arange(120)
    drawn = draw(weights.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE), 1, 128).cpu()
    assert len(drawn.unique()) > 30
    assert torch.equal(drawn, draw_reference(weights, seeds, positions, 1))


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    weights = torch.zeros(20, 130)
    weights[:, 67] = 1e-30
    seeds, positions = torch.arange(20), torch.arange(20)
    assert (draw(weights.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE), 2, TILE) == 67).all()

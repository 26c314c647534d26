"""The kernels that choose tokens equal their references: argmax, softmax at a temperature, and the draw."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.argmax import argmax, argmax_reference
from dflash_kernels.draw import draw, draw_reference
from dflash_kernels.softmax import temperature_softmax, temperature_softmax_reference
from tests.kernels.inputs import DEVICE

TILE = 64
SIZES = [(1, 1), (3, 63), (2, 64), (5, 65), (3, 500), (0, 70)]
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
    temperature = torch.full((4,), 0.7, device=DEVICE)
    assert torch.equal(argmax(wide[:, :150], TILE), wide[:, :150].argmax(-1))
    probs = temperature_softmax(wide[:, :150], temperature, TILE)
    torch.testing.assert_close(probs, temperature_softmax_reference(wide[:, :150], temperature))


@pytest.mark.parametrize(("num_rows", "vocab"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_equals_its_reference(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (10 * randn(num_rows, vocab)).to(dtype)
    temperature = torch.linspace(0.01, 3.0, num_rows)
    probs = temperature_softmax(logits.to(DEVICE), temperature.to(DEVICE), TILE)
    torch.testing.assert_close(probs.cpu(), temperature_softmax_reference(logits, temperature), rtol=2e-5, atol=1e-9)


def test_a_tile_of_forbidden_tokens_has_probability_zero() -> None:
    logits = randn(2, 3 * TILE)
    logits[:, :TILE] = float("-inf")
    logits[1, 2 * TILE :] = float("-inf")
    temperature = torch.tensor([1.0, 0.5])
    probs = temperature_softmax(logits.to(DEVICE), temperature.to(DEVICE), TILE).cpu()
    assert not probs[:, :TILE].any()
    torch.testing.assert_close(probs, temperature_softmax_reference(logits, temperature))


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

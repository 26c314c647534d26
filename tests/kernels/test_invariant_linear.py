"""Products, activations and experts for `batch_invariant`: right, and with the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dflash_kernels import invariant_linear as products
from dflash_kernels.activation import (
    gelu_mul_reference,
    invariant_gelu_mul_reference,
    invariant_silu_mul_reference,
    silu_mul_reference,
)
from dflash_kernels.invariant_linear import equal_heights, invariant_linear_reference, split_rows
from dflash_kernels.moe import experts_mlp_reference, invariant_experts_mlp_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = [1, 2, 3, 5, 17, 64, 100, 255]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "outputs"), [(32, 97), (160, 512), (384, 160), (33, 7)])
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(
    dtype: torch.dtype, bias: bool, size: int, outputs: int
) -> None:
    weight, offset = random(outputs, size).to(dtype), random(outputs, seed=1).to(dtype) if bias else None
    x = random(300, size, seed=2).to(dtype)
    whole = invariant_linear_reference(x, weight, offset)
    tolerance = TOLERANCE[dtype] * size**0.5
    torch.testing.assert_close(whole, F.linear(x, weight, offset), atol=tolerance, rtol=TOLERANCE[dtype])
    for count in COUNTS:
        for first in (0, 13, 45):
            some = invariant_linear_reference(x[first : first + count].clone(), weight, offset)
            assert torch.equal(some, whole[first : first + count]), (count, first)


def test_a_product_begins_at_an_address_that_libraries_take_for_any_other() -> None:
    """Some sum up narrow products by where their rows lie, on some processors."""
    weight, begins = random(97, 33), []

    def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        begins.append(rows.data_ptr() % products.ALIGNMENT)
        return F.linear(rows, weight, bias)

    for first in range(1, 5):
        begins.clear()
        invariant_linear_reference(random(300, 33, seed=2)[first:], weight, None, multiply)
        assert begins
        assert not any(begins)


def test_shapes_are_those_of_a_linear_layer() -> None:
    weight = random(5, 8)
    assert invariant_linear_reference(random(2, 3, 8), weight).shape == (2, 3, 5)
    assert invariant_linear_reference(random(0, 8), weight).shape == (0, 5)


@pytest.mark.parametrize(
    ("count", "heights", "expected"),
    [
        (1, (4, 16, 64), [4]),
        (16, (4, 16, 64), [16]),
        (50, (4, 16, 64), [16, 16, 16, 4]),
        (60, (4, 16, 64), [64]),
        (130, (4, 16, 64), [64, 64, 4]),
        (3, (1,), [1, 1, 1]),
    ],
)
def test_rows_are_cut_into_products_with_little_padding(
    count: int, heights: tuple[int, ...], expected: list[int]
) -> None:
    assert split_rows(count, heights) == expected


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that computes rows from the 33rd on, and products of 16 rows or fewer, in another order."""
    monkeypatch.setattr(products, "_heights", {})

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        one = x @ weight.T
        other = x.flip(1).cumsum(1)[:, -1:] * 1e-6 + one
        if len(x) <= 16:
            return other
        return torch.cat([one[:32], other[32:]]) if len(x) != products.BASE_HEIGHT else one

    monkeypatch.setattr(products.F, "linear", linear)


@pytest.mark.usefixtures("library")
def test_only_heights_with_equal_bits_in_every_place_are_used() -> None:
    assert equal_heights(random(9, 40), None) == (32, products.BASE_HEIGHT)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("inputs", [33, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_show_another_order_of_the_sum_too(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, inputs: int, with_bias: bool
) -> None:
    monkeypatch.setattr(products, "_heights", {})

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Sums in float32, for one row from both ends."""
        terms = x.float()[:, None] * weight.float()
        sums = torch.zeros(terms.shape[:2])
        for term in (terms.flip(2) if len(x) == 1 else terms).unbind(2):
            sums = sums + term
        return (sums if bias is None else sums + bias.float()).to(dtype)

    monkeypatch.setattr(products.F, "linear", linear)
    bias = random(40).to(dtype) if with_bias else None
    assert equal_heights(random(40, inputs).to(dtype), bias) == products.HEIGHTS[1:]


def test_a_library_whose_rows_differ_by_place_multiplies_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_heights", {})
    monkeypatch.setattr(products.F, "linear", lambda x, weight, bias=None: x @ weight.T + torch.arange(len(x))[:, None])
    assert equal_heights(random(9, 40), None) == (1,)


Gate = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("gated", "reference"),
    [(invariant_silu_mul_reference, silu_mul_reference), (invariant_gelu_mul_reference, gelu_mul_reference)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_is_activated_alike_wherever_it_lies(dtype: torch.dtype, gated: Gate, reference: Gate) -> None:
    x, before = random(3001, 2 * 37).to(dtype), torch.get_num_threads()
    torch.set_num_threads(2)  # which share out the whole in the middle of a row
    whole = gated(x)
    torch.testing.assert_close(whole, reference(x), atol=5e-4, rtol=1.6e-2 if dtype != torch.float32 else 1e-5)
    parts = [gated(part.clone()) for part in x.split(250)]
    torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_whatever_other_tokens_go_to_its_experts(dtype: torch.dtype) -> None:
    x, gate_up, down = random(90, 24).to(dtype), random(6, 2 * 19, 24, seed=1), random(6, 24, 19, seed=2)
    gate_up, down = gate_up.to(dtype) / 5, down.to(dtype) / 5
    experts = random(90, 6, seed=3).topk(3).indices
    weights = torch.rand(90, 3, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = invariant_experts_mlp_reference(x, gate_up, down, weights, experts)
    expected = experts_mlp_reference(x, gate_up, down, weights, experts)
    torch.testing.assert_close(whole, expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for count in COUNTS[:-2]:
        some = slice(9, 9 + count)
        own = invariant_experts_mlp_reference(x[some], gate_up, down, weights[some], experts[some])
        assert torch.equal(own, whole[some]), count

"""The kernel of the MLP's gate equals its reference."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.silu_mul import silu_mul, silu_mul_reference
from tests.kernels.inputs import DEVICE, HALF_DTYPES, random


@pytest.mark.parametrize("inner", [1, 40, 64, 1025, 2500])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_the_product_is_that_of_float64(num_rows: int, inner: int) -> None:
    gate_up = 5 * random(num_rows, 2 * inner)
    torch.testing.assert_close(silu_mul(gate_up).double(), silu_mul_reference(gate_up.double()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_is_rounded_where_the_reference_rounds(dtype: torch.dtype) -> None:
    gate_up = (5 * random(3, 2 * 500)).to(dtype)
    actual, expected = silu_mul(gate_up), silu_mul_reference(gate_up)
    assert (actual == expected).float().mean() > 0.99
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates_far_from_zero_are_closed_or_open() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE)
    assert silu_mul(gate_up).tolist() == [[0.0, 600.0]]


def test_rows_may_lie_apart() -> None:
    gate_up = 5 * random(3, 90)[:, 5:85]
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up))

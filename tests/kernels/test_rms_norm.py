"""The RMSNorm kernels equal their references, with and without the residual add."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.inputs import HALF_DTYPES, random

EPS = 1e-5
SIZES = [1, 31, 64, 80, 300, 1024]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_the_norm_is_that_of_float64(num_rows: int, size: int) -> None:
    x, weight = random(num_rows, size), random(size, seed=1)
    expected = rms_norm_reference(x.double(), weight.double(), EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_the_norm_of_the_sum_is_that_of_float64_and_the_sum_is_exact(num_rows: int, size: int) -> None:
    x, residual, weight = random(num_rows, size), random(num_rows, size, seed=2), random(size, seed=1)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + before)
    assert torch.equal(residual, before)
    expected = rms_norm_reference(total.double(), weight.double(), EPS)
    torch.testing.assert_close(normed.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_in_half_precision_the_norm_reads_the_sum_as_it_is_stored(dtype: torch.dtype) -> None:
    """Norms of the sum before its rounding would round to another number for every fourth or so."""
    x, residual, weight = (random(4, 300, seed=seed).to(dtype) for seed in range(3))
    normed, total = add_rms_norm(x, residual, weight[0], EPS)
    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight[0], EPS)
    assert torch.equal(total, expected_total)
    assert (normed == expected_normed).float().mean() > 0.99
    torch.testing.assert_close(normed, expected_normed)


def test_rows_may_lie_apart() -> None:
    x, residual, weight = random(3, 100)[:, 7:71], random(3, 80, seed=2)[:, :64], random(64, seed=1)
    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, EPS)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected_normed)
    torch.testing.assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    x, weight = random(7, 300), random(300, seed=1)
    together = rms_norm(x, weight, EPS)
    assert torch.equal(together, torch.cat([rms_norm(row[None], weight, EPS) for row in x]))

"""Products by oneDNN are those of torch's own, whatever the shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dflash_backend.models import cpu_product
from dflash_backend.models.cpu_product import CpuWeight
from dflash_backend.models.linear import Linear

pytestmark = pytest.mark.skipif(not cpu_product.HAS_ONEDNN, reason="this torch has no oneDNN")


def operands(num_rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows + inputs + outputs)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (num_rows, outputs))
    return x, weight, torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("max_packed_bytes", [cpu_product.MAX_PACKED_BYTES, 0], ids=["packed", "plain"])
@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), [(1, 8, 8), (17, 160, 768), (300, 37, 211), (64, 480, 1)])
def test_it_is_the_product_plus_the_bias(
    monkeypatch: pytest.MonkeyPatch, max_packed_bytes: int, num_rows: int, inputs: int, outputs: int
) -> None:
    monkeypatch.setattr(cpu_product, "MAX_PACKED_BYTES", max_packed_bytes)
    x, weight, bias = operands(num_rows, inputs, outputs)
    one = CpuWeight(weight)
    for _ in range(2):
        torch.testing.assert_close(one.product(x, None), F.linear(x, weight), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.product(x, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    wide = torch.stack([x, x], dim=1)[:, 0]  # rows that do not follow one another in memory
    torch.testing.assert_close(one.product(wide, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_a_linear_takes_the_faster_of_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows: list[int] = []
    product = CpuWeight.product

    def counted(self: CpuWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows.append(len(x))
        return product(self, x, bias)

    monkeypatch.setattr(CpuWeight, "product", counted)
    x, weight, bias = operands(64, 160, 768)
    linear = Linear(weight, bias)
    for n in (1, 4, 16, 64):
        torch.testing.assert_close(linear(x[:n]), F.linear(x[:n], weight, bias), rtol=1e-4, atol=1e-4)
    assert num_rows == [16, 64]


def test_few_numbers_of_rows_are_multiplied() -> None:
    """Each number of rows has code of its own, which takes as long to generate as half of a product takes."""
    padded = [cpu_product.padded_rows(n) for n in range(1, 8193)]
    assert all(n <= each < n + max(8, n / 8) for n, each in enumerate(padded, 1))
    assert len(set(padded)) < 150


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_stay_with_torch(dtype: torch.dtype) -> None:
    _, weight, _ = operands(1, 160, 768)
    assert CpuWeight.fits(weight)
    assert not CpuWeight.fits(weight.to(dtype))
    assert not CpuWeight.fits(weight.T)

"""Products of FP8 weights and FP8 activations: quantised token by token, the same numbers whatever multiplies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_kernels import scaled_linear as products
from dflash_kernels.fp8_activations import CODE, quantise_activations, quantise_activations_reference
from dflash_kernels.quantised_linear import TILES, every_tile, multiply
from dflash_kernels.quantised_weight import FP8, QuantisedWeight
from dflash_kernels.scaled_linear import (
    ScaledProduct,
    columns_of_scale,
    fits_torch,
    invariant_scaled_linear,
    least_tokens,
    multiply_scaled,
    product_for,
    scaled_linear_reference,
    scales_for_torch,
    trial,
)
from tests.kernels.inputs import DEVICE, multiply_as_tensor_cores_do, random

# Rows, columns, and how many of them share a scale.
SHAPES = {
    "a scale for each row": (80, 144, 1, 144),
    "one scale": (80, 144, 80, 144),
    "blocks": (144, 384, 128, 128),
    "small blocks, the last ones cut": (100, 176, 24, 32),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MANY = 68


def fp8(out: int, inner: int, rows: int, columns: int) -> QuantisedWeight:
    """A weight of random codes, whose scales are unlike."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(out, inner, generator=generator).mul_(32).to(CODE).view(torch.uint8)
    scales = 0.25 + torch.rand(-(-out // rows), -(-inner // columns), generator=generator)
    return QuantisedWeight.of_codes(FP8, codes.to(DEVICE), scales.to(DEVICE), None, rows, columns)


def tokens(count: int, inner: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Activations of unlike sizes, a token of zeros among them."""
    x = random(count, inner, seed=1) * torch.linspace(0.01, 50, count).to(DEVICE)[:, None]
    x *= torch.linspace(0.5, 4, inner).to(DEVICE)
    x[count // 2] = 0
    return x.to(dtype)


def assert_tokens_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Float32 `[num_tokens, out]`, within what sums in another order make of each token's largest number: of one that
    is near 0 by chance nothing less can be asked, since its terms are as large as those of others."""
    sizes = expected.abs().amax(dim=1, keepdim=True)
    error = (found - expected).abs()
    assert bool((error <= 1e-5 * sizes).all()), f"off by {(error / sizes).nan_to_num().amax(1).tolist()} of the largest"


def exact(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """The product of what x is quantised to and the weight, in float64, from their definitions alone."""
    out, inner = weight.shape
    columns = columns_of_scale(weight)
    numbers = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for first in range(0, inner, columns):
            group = x[token, first : first + columns].cpu().float()
            scale = group.abs().max() / 448
            if scale > 0:
                numbers[token, first : first + columns] = (group / scale).to(CODE).double() * scale.double()
    codes, scales = weight.codes.cpu().view(CODE).double(), weight.scales.cpu().double()
    of_weight = codes * scales[torch.arange(inner) // weight.columns][:, torch.arange(out) // weight.rows].T
    return numbers @ of_weight.T


@pytest.mark.parametrize("columns", [144, 32, 100])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_activations_have_the_codes_and_scales_of_the_reference(columns: int, dtype: torch.dtype) -> None:
    x = tokens(5, 144, dtype)
    for form in (CODE, dtype):
        found, scales = quantise_activations(x, columns, form)
        expected, expected_scales = quantise_activations_reference(x, columns, form)
        assert torch.equal(found.float(), expected.float())
        assert torch.equal(scales, expected_scales)
        assert scales.shape == (-(-144 // columns), 5)
        assert found.dtype == form


def test_rows_of_a_wider_tensor_and_of_a_transposed_one_are_those_of_a_copy() -> None:
    wide, weight = tokens(6, 200), fp8(*SHAPES["a scale for each row"])
    for found, expected in zip(
        quantise_activations(wide[:, 8:152], 144), quantise_activations(wide[:, 8:152].contiguous(), 144), strict=True
    ):
        assert torch.equal(found.float(), expected.float())
    x = tokens(5, 144)
    for product in (ScaledProduct(weight, by_torch=False), invariant_scaled_linear):
        assert torch.equal(product(x.t().contiguous().t(), weight), product(x, weight))


def test_a_token_with_a_nan_has_no_other_product_and_leaves_those_of_others() -> None:
    weight, x = fp8(*SHAPES["a scale for each row"]), tokens(5, 144)
    expected = ScaledProduct(weight, by_torch=False)(x, weight)
    x[1, 100] = float("nan")
    for product in (ScaledProduct(weight, by_torch=False), scaled_linear_reference, invariant_scaled_linear):
        found = product(x, weight)
        assert found[1].isnan().all()
        assert_tokens_close(found[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


def test_a_token_has_the_same_codes_alone_and_beside_larger_ones() -> None:
    x = tokens(9, 144)
    together, scales = quantise_activations(x, 144)
    alone, own = quantise_activations(x[2:3], 144)
    assert torch.equal(together[2:3].view(torch.uint8), alone.view(torch.uint8))
    assert torch.equal(scales[:, 2:3], own)


@pytest.mark.parametrize("name", SHAPES)
def test_our_kernel_and_the_reference_give_the_product_of_the_codes(name: str) -> None:
    weight = fp8(*SHAPES[name])
    x, bias = tokens(5, weight.shape[1]), random(weight.shape[0], seed=2)
    expected = exact(x, weight) + bias.cpu().double()
    size = float(expected.abs().max())
    for product in (ScaledProduct(weight, by_torch=False), scaled_linear_reference, invariant_scaled_linear):
        found = product(x.view(5, 1, -1), weight, bias)
        assert found.shape == (5, 1, weight.shape[0])
        torch.testing.assert_close(found[:, 0].cpu().double(), expected, atol=1e-5 * size, rtol=0)


@pytest.mark.parametrize("name", ["a scale for each row", "one scale"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_torch_and_our_kernel_give_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    if DEVICE == "cuda" and dtype != torch.bfloat16:
        pytest.skip("on a GPU torch's products are of bfloat16")
    weight = fp8(*SHAPES[name])
    x, bias = tokens(MANY, weight.shape[1], dtype), random(weight.shape[0], seed=2).to(dtype)
    by_torch, own = (ScaledProduct(weight, by_torch=each)(x, weight, bias).double() for each in (True, False))
    size = float(own.abs().max())
    torch.testing.assert_close(by_torch, own, atol=TOLERANCE[dtype] * size, rtol=0)
    assert float((own - (exact(x, weight) + bias.cpu().double()).to(own.device)).abs().max()) < TOLERANCE[dtype] * size


def test_torch_multiplies_by_weights_of_many_rows_from_fewer_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [least_tokens(outputs) for outputs in (1, 4096, 6143, 6144, 24576)] == [65, 65, 65, 17, 17]
    counts: list[tuple[int, int]] = []

    def by_torch(rows: torch.Tensor, weight: QuantisedWeight, *_: Any) -> torch.Tensor:
        counts.append((len(weight.codes), len(rows)))
        return rows.new_zeros(len(rows), len(weight.codes))

    monkeypatch.setattr(products, "LEAST_TOKENS", ((80, 3), (0, 6)))
    monkeypatch.setattr(products, "multiply_by_torch", by_torch)
    for outputs in (80, 79):
        product = ScaledProduct(fp8(outputs, 32, 1, 32), by_torch=True)
        for count in (2, 3, 5, 6):
            product(tokens(count, 32), fp8(outputs, 32, 1, 32))
    assert counts == [(80, 3), (80, 5), (80, 6), (79, 6)]


def test_launches_of_many_tokens_are_torchs_and_others_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, counts = fp8(*SHAPES["a scale for each row"]), []
    product = product_for(weight, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    monkeypatch.setattr(
        products, "multiply_scaled", lambda *args: counts.append(len(args[0])) or multiply_scaled(*args)
    )
    least = least_tokens(len(weight.codes))
    for count in (1, least - 1, least, MANY):
        product(tokens(count, weight.shape[1], torch.bfloat16 if DEVICE == "cuda" else torch.float32), weight, None)
    assert counts == [least, MANY]


def test_a_product_that_torch_has_not_is_ours(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, small = fp8(72, 144, 1, 144), fp8(*SHAPES["small blocks, the last ones cut"])
    assert not fits_torch(narrow, torch.float32)
    assert not fits_torch(small, torch.float32)
    wrong = fp8(*SHAPES["one scale"])
    monkeypatch.setattr(products, "multiply_scaled", lambda *args: multiply_scaled(*args) * 1.5)
    products._problem_of_shape.cache_clear()
    assert not product_for(wrong, torch.bfloat16).by_torch
    assert "80 x 144 weights in FP8 is not used: its numbers are off by" in caplog.text
    products._problem_of_shape.cache_clear()
    monkeypatch.undo()
    assert trial(wrong, torch.bfloat16) is None
    if DEVICE == "cpu":  # torch has no product of blocks there
        assert "it fails" in (trial(fp8(*SHAPES["blocks"]), torch.bfloat16) or "")


@pytest.mark.parametrize(
    ("capability", "rows", "blocks"),
    [((8, 0), False, False), ((8, 9), True, False), ((9, 0), True, True), ((10, 0), True, False)],
)
def test_each_gpu_has_the_products_that_torch_documents_for_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], rows: bool, blocks: bool
) -> None:
    """Rows from Ada on, blocks of 128 x 128 on Hopper alone, in bfloat16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    of_rows: Any = SimpleNamespace(codes=on_gpu, scales=[0], shape=(256, 256), rows=1, columns=256)
    in_blocks: Any = SimpleNamespace(codes=on_gpu, scales=[0, 0], shape=(256, 256), rows=128, columns=128)
    assert [fits_torch(each, torch.bfloat16) for each in (of_rows, in_blocks)] == [rows, blocks]
    assert not any(fits_torch(each, torch.float16) for each in (of_rows, in_blocks))


@pytest.mark.parametrize("count", [1, 4, MANY, MANY + 2])
def test_torchs_products_of_blocks_get_a_multiple_of_four_tokens(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper it refuses other numbers. A stand-in multiplies what torch would get, by the scales as they lie."""
    heights = []

    def scaled_mm(codes: Any, weight: Any, scales: Any, form: Any, weight_scales: Any, *_: Any, **how: Any) -> Any:
        heights.append(len(codes))
        assert scales.shape == (len(codes), 3)
        assert scales.stride() == (1, len(codes))
        numbers = codes.float() * scales.repeat_interleave(128, dim=1)
        of_weight = weight.float() * weight_scales[:3].repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :144]
        return (numbers @ of_weight).to(how["output_dtype"])

    weight = fp8(*SHAPES["blocks"])
    x = tokens(count, weight.shape[1], torch.bfloat16)
    expected = ScaledProduct(weight, by_torch=False)(x, weight).float()
    monkeypatch.setattr(products.F, "scaled_mm", scaled_mm)
    found = products.multiply_by_torch(x, weight, scales_for_torch(weight), None).float()
    assert heights == [-(-count // 4) * 4]
    torch.testing.assert_close(found, expected, atol=1e-2 * float(expected.abs().max()), rtol=0)
    heights.clear()
    assert trial(weight, torch.bfloat16) is None
    assert heights == [4, 48, 80, 128]


def test_scales_of_blocks_are_laid_out_as_torch_reads_them() -> None:
    weight = fp8(300, 640, 128, 128)
    scales = scales_for_torch(weight)
    assert scales.shape == (8, 3)
    assert scales.stride() == (1, 8)
    assert torch.equal(scales[:5], weight.scales)
    assert not scales[5:].any()


def test_a_token_has_the_same_bits_among_any_others_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_as_tensor_cores_do(monkeypatch)
    for name in ("a scale for each row", "small blocks, the last ones cut"):
        weight = fp8(*SHAPES[name])
        x = tokens(MANY, weight.shape[1], torch.bfloat16)
        together = invariant_scaled_linear(x, weight)
        for token in (0, 17, MANY - 1):
            assert torch.equal(invariant_scaled_linear(x[token : token + 1], weight)[0], together[token])


def test_every_tile_multiplies_scaled_tokens() -> None:
    weight = fp8(*SHAPES["small blocks, the last ones cut"])
    x = tokens(3, weight.shape[1])
    numbers, scales = quantise_activations(x, weight.columns, x.dtype)
    expected = scaled_linear_reference(x, weight)
    for tile in TILES[:2]:
        for splits in (1, 2):
            found = multiply(numbers, weight, None, tile, splits, x_scales=scales)
            assert_tokens_close(found, expected)
    with every_tile():
        assert_tokens_close(ScaledProduct(weight, by_torch=False)(x, weight), expected)

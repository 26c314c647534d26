"""Products by weights that stay quantised equal those by the numbers that their codes stand for."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels import quantised_linear as products
from dflash_kernels.quantised_linear import (
    BY_FLOAT32,
    BY_INTEGERS,
    DIRECTLY,
    INVARIANT_TILE,
    LEAST_DEQUANTISED,
    TILES,
    WIDE_TILE,
    dequantise_rows,
    dequantised_linear,
    every_tile,
    invariant_quantised_linear,
    multiply,
    num_splits,
    quantised_linear,
    quantised_linear_reference,
    rows_of_slice,
    tile_of,
)
from dflash_kernels.quantised_weight import FP8, INT4, INT8, MIDDLE, MXFP4, QuantisedWeight, pack, run_of, unpack
from tests.kernels.inputs import DEVICE, multiply_as_tensor_cores_do, random
from tests.support.scale import one_in

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Rows, columns, and how many of them share a scale.
FP8_SHAPES = {
    "blocks": (200, 384, 128, 128),
    "small blocks, the last ones cut": (100, 176, 24, 32),
    "a scale for each row": (72, 300, 1, 300),
    "one scale": (72, 300, 72, 300),
}
INT4_SHAPES = {"groups of 128": (72, 384, 128), "groups of 32": (40, 160, 32), "one group": (40, 256, 256)}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Uniform from 0.5 to 1.5, float32 of `shape`."""
    return 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """From 0 to 15, uint8 of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8).to(DEVICE)


def fp8(out: int, inner: int, rows: int, columns: int, seed: int = 0) -> QuantisedWeight:
    """A weight in e4m3, all of whose codes occur."""
    codes = torch.randint(0, 256, (out, inner), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = numbers(-(-out // rows), -(-inner // columns), seed=seed) / 64
    return QuantisedWeight.of_codes(FP8, codes.to(DEVICE), scales, None, rows, columns)


def int4(out: int, inner: int, columns: int, zeros: bool = True, seed: int = 0) -> QuantisedWeight:
    """A weight of 4 bits."""
    groups = inner // columns
    points = integers(out, groups, seed=seed + 1) if zeros else None
    scales = (numbers(out, groups, seed=seed) / 8).half()
    return QuantisedWeight.of_codes(INT4, integers(out, inner, seed=seed), scales, points, 1, columns)


def int8(out: int, inner: int, rows: int, columns: int, zeros: bool = True, seed: int = 0) -> QuantisedWeight:
    """A weight of integers of 8 bits, of all values."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-out // rows), -(-inner // columns)
    codes, points = (
        torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in ((out, inner), blocks)
    )
    scales = (numbers(*blocks, seed=seed) / 128).bfloat16()
    return QuantisedWeight.of_codes(INT8, codes.to(DEVICE), scales, points.to(DEVICE) if zeros else None, rows, columns)


def mxfp4(out: int, inner: int, seed: int = 0) -> QuantisedWeight:
    """A weight in MXFP4, whose groups' scales go from 2 ** -6 to 2."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(121, 129, (out, inner // 32), generator=generator, dtype=torch.uint8).to(DEVICE)
    return QuantisedWeight.of_codes(MXFP4, integers(out, inner, seed=seed), scales, None, 1, 32)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what rounding to the dtype, and sums in another order, make."""
    assert found.dtype == expected.dtype
    size = float(expected.float().abs().max())
    torch.testing.assert_close(found, expected, atol=TOLERANCE[found.dtype] * size, rtol=0)


@pytest.mark.parametrize(
    ("name", "reading", "dtype"),
    one_in(3, list(FP8_SHAPES), [BY_INTEGERS, BY_FLOAT32, DIRECTLY], list(TOLERANCE)),
)
def test_fp8_products_equal_the_reference_however_codes_are_read(name: str, reading: int, dtype: torch.dtype) -> None:
    if DEVICE == "cuda":  # the compiler for an older one knows no e4m3
        reading = min(reading, products.reading_on(torch.device(DEVICE)))
    weight = fp8(*FP8_SHAPES[name])
    x, bias = random(21, weight.shape[1], seed=1).to(dtype), random(weight.shape[0], seed=2).to(dtype)
    for splits in (1, 2):
        found = multiply(x, weight, bias, tile_of(16, dtype), splits, reading)
        assert_close(found, quantised_linear_reference(x, weight, bias))


@pytest.mark.parametrize("name", INT4_SHAPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_int4_products_equal_the_reference(name: str, zeros: bool, dtype: torch.dtype) -> None:
    weight = int4(*INT4_SHAPES[name], zeros=zeros)
    x, bias = random(21, weight.shape[1], seed=1).to(dtype), random(weight.shape[0], seed=2).to(dtype)
    for splits in (1, 2):
        found = multiply(x, weight, bias, tile_of(16, dtype), splits)
        assert_close(found, quantised_linear_reference(x, weight, bias))


@pytest.mark.parametrize("inner", [32, 160])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mxfp4_products_equal_the_reference(inner: int, dtype: torch.dtype) -> None:
    weight = mxfp4(72, inner)
    x, bias = random(21, inner, seed=1).to(dtype), random(72, seed=2).to(dtype)
    for splits in (1, 2):
        found = multiply(x, weight, bias, tile_of(16, dtype), splits)
        assert_close(found, quantised_linear_reference(x, weight, bias))


def test_every_code_of_mxfp4_under_every_scale_is_its_number_to_the_bit() -> None:
    """The lowest scale is below the normal numbers of float32, the highest leave them."""
    codes = torch.arange(64, dtype=torch.uint8).remainder(16).expand(255, 64).contiguous().to(DEVICE)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 2).contiguous().to(DEVICE)
    weight = QuantisedWeight.of_codes(MXFP4, codes, scales, None, 1, 32)
    found = quantised_linear(torch.eye(64, device=DEVICE), weight).T
    assert torch.equal(found, weight.dequantised(torch.float32))


@pytest.mark.parametrize(("name", "zeros", "dtype"), one_in(2, list(FP8_SHAPES), [False, True], list(TOLERANCE)))
def test_int8_products_equal_the_reference(name: str, zeros: bool, dtype: torch.dtype) -> None:
    weight = int8(*FP8_SHAPES[name], zeros=zeros)
    x, bias = random(21, weight.shape[1], seed=1).to(dtype), random(weight.shape[0], seed=2).to(dtype)
    for splits in (1, 2):
        found = multiply(x, weight, bias, tile_of(16, dtype), splits)
        assert_close(found, quantised_linear_reference(x, weight, bias))


@pytest.mark.parametrize("tile", [*TILES, INVARIANT_TILE], ids=lambda tile: f"{tile.tokens} tokens, {tile.stages}")
@pytest.mark.parametrize("weight", [fp8(200, 256, 128, 128), int4(136, 256, 128)], ids=["fp8", "int4"])
def test_every_tile_gives_the_same_product(tile: products.Tile, weight: QuantisedWeight) -> None:
    for num_tokens in (1, tile.tokens, tile.tokens + 3):
        x = random(num_tokens, 256, seed=num_tokens).half()
        assert_close(multiply(x, weight, None, tile, 1), quantised_linear_reference(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weight", [fp8(96, 512, 1, 512), int4(96, 512, 64)], ids=["fp8", "int4"])
def test_a_row_has_the_same_bits_among_any_rows_where_that_is_asked_for(
    weight: QuantisedWeight, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        multiply_as_tensor_cores_do(monkeypatch)
    x = random(150, 512).to(dtype)
    whole = invariant_quantised_linear(x, weight)
    for count in (1, 2, 17, 100):
        assert torch.equal(invariant_quantised_linear(x[9 : 9 + count], weight), whole[9 : 9 + count]), count


SCHEMES = {
    "fp8 blocks": fp8(*FP8_SHAPES["blocks"]),
    "fp8 small blocks": fp8(*FP8_SHAPES["small blocks, the last ones cut"]),
    "fp8 rows": fp8(*FP8_SHAPES["a scale for each row"]),
    "int8": int8(100, 176, 24, 32),
    "int4": int4(200, 160, 32),
    "int4 without zero points": int4(72, 256, 128, zeros=False),
    "mxfp4": mxfp4(72, 96),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("first", [0, 40])
def test_the_numbers_of_some_rows_are_those_of_the_reference_to_the_bit(name: str, first: int) -> None:
    weight = SCHEMES[name]
    expected = weight.dequantised(torch.float16)[first:69]
    out = torch.full((69 - first + 1, weight.shape[1]), 7.0, dtype=torch.float16, device=DEVICE)
    dequantise_rows(weight, first, out[:-1])
    assert torch.equal(out[:-1], expected)
    assert bool((out[-1] == 7).all()), "a row past the last was written"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_products_by_slices_of_numbers_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    weight = SCHEMES[name]
    outputs, inputs = weight.shape
    x, bias = random(5, 2, inputs, seed=1).to(dtype), random(outputs, seed=2).to(dtype)
    for offsets in (bias, None):
        expected = quantised_linear_reference(x, weight, offsets)
        for scratch in (1 << 20, 1):
            assert_close(dequantised_linear(x, weight, offsets, scratch), expected)


def test_a_slice_has_whole_blocks_of_rows_and_no_more_bytes_than_it_may() -> None:
    assert rows_of_slice(24576, 8192, 256 << 20) == 24576
    assert rows_of_slice(24576, 8192, 24576 * 8192) == 24576
    assert rows_of_slice(24576, 8192, 24576 * 8192 - 1) == 12288
    assert rows_of_slice(57344, 16384, 256 << 20) == 14336
    assert rows_of_slice(200, 512, 1) == 128
    for outputs in (300, 4096, 151936):
        size = rows_of_slice(outputs, 8192, 64 << 20)
        assert size == outputs or size % 128 == 0


@pytest.mark.parametrize("kind", LEAST_DEQUANTISED)
def test_a_weight_becomes_numbers_from_its_number_of_tokens_on_and_not_with_one_less(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = {FP8: lambda: fp8(24, 64, 1, 64), INT8: lambda: int8(24, 64, 1, 64), INT4: lambda: int4(24, 64, 64)}
    weight, taken = make.get(kind, lambda: mxfp4(24, 64))(), []
    for name in ("multiply", "dequantised_linear"):
        plain = getattr(products, name)
        monkeypatch.setattr(
            products, name, lambda *args, name=name, plain=plain, **how: taken.append(name) or plain(*args, **how)
        )
    least = LEAST_DEQUANTISED[kind]
    for count in (1, least - 1, least):
        x = random(1, count, 64).half()
        assert_close(quantised_linear(x, weight), quantised_linear_reference(x, weight))
    assert taken == ["multiply", "multiply", "dequantised_linear"]
    # Float32 is multiplied as it is, whose sums no rounding of the weight may touch; and tokens that have scales.
    quantised_linear(random(least, 64), weight)
    x_scales = torch.ones(len(weight.scales), least, device=DEVICE)
    quantised_linear(random(least, 64).half(), weight, None, x_scales)
    invariant_quantised_linear(random(least, 64).half(), weight)
    assert taken[3:] == ["multiply"] * 3


def test_weights_that_cannot_become_numbers_stay_codes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(products, "_always_codes", set())
    monkeypatch.setattr(products, "dequantised_linear", fails)
    weight, other = int4(24, 64, 64), fp8(24, 64, 1, 64)
    x = random(LEAST_DEQUANTISED[INT4], 64).half()
    with every_tile():
        assert_close(quantised_linear(x[:1], weight), quantised_linear_reference(x[:1], weight))
    assert "weights in int4 are multiplied as codes for any number of tokens: no kernel image" in caplog.text
    assert_close(quantised_linear(x, weight), quantised_linear_reference(x, weight))
    with pytest.raises(RuntimeError, match="no kernel image"):  # another kind is not concerned
        quantised_linear(x, other)
    monkeypatch.setattr(
        products, "dequantised_linear", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    )
    with pytest.raises(torch.OutOfMemoryError), every_tile():
        quantised_linear(x[:1], other)


def test_columns_are_split_only_where_a_weight_has_few_rows_and_all_tokens_fit_a_tile() -> None:
    small, tall = fp8(64, 4096, 1, 4096), fp8(64 * 256, 128, 1, 128)
    assert num_splits(16, small, TILES[0]) == 8
    assert num_splits(17, small, TILES[0]) == 1
    assert num_splits(16, tall, TILES[0]) == 1
    # Each part has four runs of columns at least.
    assert num_splits(1, fp8(64, 1024, 1, 1024), TILES[0]) == 2


def weight_of(outputs: int, inputs: int) -> QuantisedWeight:
    """Of these sizes, in blocks of 128 x 128, whose codes have the memory of one."""
    codes, scales = torch.zeros((), dtype=torch.uint8), torch.zeros(1, 1)
    shape = -(-inputs // 128), -(-outputs // 128)
    return QuantisedWeight(FP8, codes.expand(outputs, inputs), scales.expand(shape), None, 128, 128)


def test_each_tile_splits_columns_for_as_many_programs_as_were_best_for_it() -> None:
    """Of a layer of Qwen3-8B: queries, keys and values; the output; gate and up; down."""
    shapes = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)
    found = {
        tile: [num_splits(tile.tokens, weight_of(*shape), tile) for shape in shapes]
        for tile in (*TILES, INVARIANT_TILE, WIDE_TILE)
    }
    assert list(found.values()) == [
        [5, 8, 1, 8], [5, 8, 1, 8], [2, 4, 1, 4], [8, 8, 2, 8], [1, 1, 1, 1], [1, 2, 1, 2],
    ]  # fmt: skip
    assert [tile_of(count, torch.bfloat16) for count in (1, 16, 17, 33, 65, 129)] == [
        TILES[index] for index in (0, 0, 1, 2, 3, 3)
    ]


def test_the_tile_of_invariant_products_is_its_own() -> None:
    """What is faster in other products does not change bits that are to stay."""
    assert products.Tile(tokens=64, outputs=64, stages=4, warps=4, programs=1) == INVARIANT_TILE
    assert INVARIANT_TILE not in TILES


def test_shapes_are_those_of_a_linear_layer() -> None:
    weight = fp8(40, 64, 1, 64)
    assert quantised_linear(random(2, 3, 64), weight).shape == (2, 3, 40)
    assert quantised_linear(random(0, 64), weight).shape == (0, 40)


def test_rows_may_lie_apart_and_their_numbers_too() -> None:
    weight, x = fp8(40, 64, 1, 64), random(6, 128)
    for apart in (x[::2, 32:96], x[:, ::2], random(64, 6, seed=1).T):
        assert_close(quantised_linear(apart, weight), quantised_linear_reference(apart, weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_product_that_compiles_runs_every_tile_and_gives_its_own_result(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = fp8(64, 1024, 1, 1024), random(3, 1024).to(dtype)
    expected, run, plain = quantised_linear(x, weight), [], products.multiply

    def noted(
        x: torch.Tensor, weight: QuantisedWeight, bias: None, tile: products.Tile, splits: int, x_scales: None
    ) -> torch.Tensor:
        run.append((tile, splits))
        return plain(x, weight, bias, tile, splits, x_scales=x_scales)

    dequantised: list[int] = []
    by_numbers = products.dequantised_linear
    monkeypatch.setattr(
        products, "dequantised_linear", lambda *args: dequantised.append(len(args[0])) or by_numbers(*args)
    )
    monkeypatch.setattr(products, "multiply", noted)
    with every_tile():
        assert torch.equal(quantised_linear(x, weight), expected)
    tiles = TILES if dtype == torch.float16 else [WIDE_TILE]
    assert set(run) == {(tile, splits) for tile in tiles for splits in (1, 2)}
    assert dequantised == ([1] if dtype == torch.float16 else [])
    run.clear()
    quantised_linear(x, weight)
    assert len(run) == 1


def test_codes_of_four_bits_are_packed_by_halves_of_a_run_and_unpacked_again() -> None:
    codes = integers(6, 128)
    packed = pack(codes, 64)
    assert packed.shape == (2, 6, 32)
    assert int(packed[1, 3, 5]) == int(codes[3, 64 + 5]) + 16 * int(codes[3, 64 + 32 + 5])
    assert torch.equal(unpack(packed), codes)


def test_a_run_is_the_largest_power_of_two_that_divides_a_group() -> None:
    assert [run_of(columns) for columns in (32, 64, 96, 128, 192, 1024)] == [32, 64, 32, 128, 64, 128]


@pytest.mark.parametrize(
    "index", [slice(128, None), slice(0, 128), slice(100, 180), torch.tensor([150, 3, 3])], ids=str
)
@pytest.mark.parametrize(
    "weight", [fp8(200, 64, 128, 32), int4(200, 64, 32), fp8(200, 64, 200, 64), int8(200, 64, 1, 64)], ids=str
)
def test_rows_that_are_taken_have_their_scales(index: torch.Tensor | slice, weight: QuantisedWeight) -> None:
    taken = weight.taken(index.to(DEVICE) if isinstance(index, torch.Tensor) else index)
    expected = weight.dequantised(torch.float32)[index]
    assert torch.equal(taken.dequantised(torch.float32), expected)
    x = random(2, 64)
    assert_close(quantised_linear(x, taken), x @ expected.T)


@pytest.mark.parametrize(
    "parts",
    [
        (fp8(256, 64, 128, 32), fp8(100, 64, 128, 32, seed=1)),
        (fp8(100, 64, 128, 32), fp8(128, 64, 128, 32, seed=1)),
        (fp8(96, 64, 96, 64), fp8(32, 64, 32, 64, seed=1), fp8(32, 64, 1, 64, seed=2)),
        (int4(64, 64, 32), int4(32, 64, 32, zeros=False, seed=1)),
        (int4(64, 64, 64, zeros=False), int4(32, 64, 64, zeros=False, seed=1)),
        (int8(64, 64, 1, 64, zeros=False), int8(32, 64, 32, 64, seed=1)),
    ],
    ids=["whole blocks", "a block is cut", "a scale for each tensor", "zero points of one part", "none", "int8"],
)
def test_parts_below_one_another_keep_their_numbers(parts: tuple[QuantisedWeight, ...]) -> None:
    assert QuantisedWeight.alike(parts)
    stacked = QuantisedWeight.stacked(parts)
    expected = torch.cat([part.dequantised(torch.float32) for part in parts])
    assert stacked.shape == tuple(expected.shape)
    assert torch.equal(stacked.dequantised(torch.float32), expected)
    x = random(2, 64)
    assert_close(quantised_linear(x, stacked), x @ expected.T)


@pytest.mark.parametrize("kind", [INT4, INT8])
def test_zero_points_that_are_all_in_the_middle_are_not_kept(kind: str) -> None:
    codes, scales = integers(8, 64), numbers(8, 2)
    with_zeros = QuantisedWeight.of_codes(kind, codes, scales, torch.full_like(scales, MIDDLE[kind]).byte(), 1, 32)
    assert with_zeros.zeros is None
    without = QuantisedWeight.of_codes(kind, codes, scales, None, 1, 32)
    assert torch.equal(with_zeros.dequantised(torch.float32), without.dequantised(torch.float32))


def test_bytes_are_those_of_codes_scales_and_zero_points() -> None:
    assert fp8(256, 512, 128, 128).num_bytes == 256 * 512 + 2 * 4 * 4
    assert int4(256, 512, 128).num_bytes == 256 * 512 // 2 + 256 * 4 * (2 + 1)

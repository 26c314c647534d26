"""Experts whose weights stay quantised give what the numbers that their codes stand for give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from dflash_kernels import moe, moe_routing, quantised_linear
from dflash_kernels.moe_routing import route
from dflash_kernels.quantised_linear import BY_FLOAT32, BY_INTEGERS, DIRECTLY, Tile
from dflash_kernels.quantised_moe import (
    INVARIANT_TILE,
    TILES,
    WIDE_TILE,
    invariant_quantised_experts_mlp,
    quantised_experts_mlp,
    quantised_experts_mlp_reference,
    tile_of,
)
from dflash_kernels.quantised_weight import QuantisedWeight, WeightStack
from tests.kernels.inputs import DEVICE, multiply_as_tensor_cores_do, random
from tests.kernels.test_quantised_linear import TOLERANCE, fp8, int4, int8, mxfp4
from tests.support.scale import one_in

NUM_EXPERTS, HIDDEN, INNER = 5, 128, 64
Make = Callable[..., QuantisedWeight]
# A weight `[out, in]` of each scheme: `make(out, inner, seed=seed)`.
SCHEMES: dict[str, Make] = {
    "fp8 in blocks": lambda out, inner, seed: fp8(out, inner, 32, 32, seed),
    "fp8 in blocks that experts cut": lambda out, inner, seed: fp8(out, inner, 48, 32, seed),
    "fp8 of rows": lambda out, inner, seed: fp8(out, inner, 1, inner, seed),
    "fp8 of tensors": lambda out, inner, seed: fp8(out, inner, out, inner, seed),
    "int8 of rows": lambda out, inner, seed: int8(out, inner, 1, inner, False, seed),
    "int8 in groups with zero points": lambda out, inner, seed: int8(out, inner, 1, 32, True, seed),
    "int4 in groups": lambda out, inner, seed: int4(out, inner, 32, False, seed),
    "int4 in groups with zero points": lambda out, inner, seed: int4(out, inner, 32, True, seed),
    "mxfp4": lambda out, inner, seed: mxfp4(out, inner, seed),
    "int4 in one group": lambda out, inner, seed: int4(out, inner, inner, True, seed),
}
DTYPES = [torch.float32, torch.float16]


def stack(parts: list[QuantisedWeight]) -> QuantisedWeight:
    """The parts as one weight, each of which goes to its place as it comes."""
    whole = WeightStack(len(parts))
    for part in parts:
        whole.add(part)
    return whole.whole()


class Case:
    """Experts of a scheme, whose scales differ, some tokens, and the router's choice for them."""

    def __init__(
        self,
        make: Make,
        num_tokens: int = 19,
        per_token: int = 2,
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int] = (HIDDEN, INNER),
        make_down: Make | None = None,
    ) -> None:
        hidden, inner = sizes
        of_down = make_down or make
        gates, ups = ([make(inner, hidden, seed=10 * i + j) for i in range(NUM_EXPERTS)] for j in (1, 2))
        self.gate_up = stack([QuantisedWeight.stacked(pair) for pair in zip(gates, ups, strict=True)])
        self.down = stack([of_down(hidden, inner, seed=10 * i + 3) for i in range(NUM_EXPERTS)])
        self.x = (random(num_tokens, hidden) / 8).to(dtype)
        self.weights, self.experts = route(random(num_tokens, NUM_EXPERTS, seed=1).to(dtype), per_token, True)

    @property
    def inputs(self) -> tuple[torch.Tensor, QuantisedWeight, QuantisedWeight, torch.Tensor, torch.Tensor]:
        return self.x, self.gate_up, self.down, self.weights, self.experts

    def expected(self) -> torch.Tensor:
        return quantised_experts_mlp_reference(*self.inputs)

    def some(self, index: slice) -> tuple[torch.Tensor, QuantisedWeight, QuantisedWeight, torch.Tensor, torch.Tensor]:
        """The inputs of some tokens alone."""
        return self.x[index], self.gate_up, self.down, self.weights[index], self.experts[index]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what rounding what is between the two products, and sums in another order, make."""
    assert found.dtype == expected.dtype
    size = float(expected.float().abs().max())
    assert size > 0.1
    torch.testing.assert_close(found, expected, atol=2 * TOLERANCE[found.dtype] * size, rtol=0)


@pytest.mark.parametrize(("name", "dtype"), one_in(2, list(SCHEMES), DTYPES))
def test_experts_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    case = Case(SCHEMES[name], dtype=dtype)
    assert_close(quantised_experts_mlp(*case.inputs), case.expected())


@pytest.mark.parametrize("name", SCHEMES)
def test_the_reference_is_that_of_each_experts_own_numbers(name: str) -> None:
    """One token and one of its experts after the other, whose weights are dequantised before they are put together."""
    make = SCHEMES[name]
    case = Case(make, num_tokens=4)
    outputs = []
    for x, weights, experts in zip(case.x, case.weights, case.experts.tolist(), strict=True):
        total = torch.zeros_like(x)
        for weight, i in zip(weights, experts, strict=True):
            gate, up = (make(INNER, HIDDEN, seed=10 * i + j).dequantised(torch.float32) @ x for j in (1, 2))
            down = make(HIDDEN, INNER, seed=10 * i + 3).dequantised(torch.float32)
            total += weight * (down @ (torch.nn.functional.silu(gate) * up))
        outputs.append(total)
    assert_close(case.expected(), torch.stack(outputs))


@pytest.mark.parametrize(("reading", "dtype"), one_in(2, [BY_INTEGERS, BY_FLOAT32, DIRECTLY], list(TOLERANCE)))
def test_fp8_experts_are_the_same_however_codes_are_read(reading: int, dtype: torch.dtype) -> None:
    if DEVICE == "cuda":  # the compiler for an older one knows no e4m3
        reading = min(reading, quantised_linear.reading_on(torch.device(DEVICE)))
    case = Case(SCHEMES["fp8 in blocks"], dtype=dtype)
    assert_close(quantised_experts_mlp(*case.inputs, reading=reading), case.expected())


@pytest.mark.parametrize("tile", [*TILES, WIDE_TILE], ids=lambda tile: f"{tile.tokens} x {tile.outputs}")
@pytest.mark.parametrize("name", ["fp8 in blocks", "int4 in groups with zero points"])
def test_every_tile_equals_the_reference(name: str, tile: Tile) -> None:
    # One expert has a full block of entries and a part of one, the others a part.
    case = Case(SCHEMES[name], tile.tokens + 3, dtype=torch.float16)
    case.experts[:, 0] = 3
    assert_close(quantised_experts_mlp(*case.inputs, tile=tile), case.expected())


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (partial(fp8, rows=32, columns=32), (160, 96)),
        (partial(fp8, rows=128, columns=128), (320, 72)),
        (partial(int8, rows=1, columns=32), (96, 160)),
        (partial(int4, columns=32), (96, 160)),
    ],
)
def test_widths_that_fill_no_tile_equal_the_reference(make: Make, sizes: tuple[int, int]) -> None:
    case = Case(make, sizes=sizes)
    assert_close(quantised_experts_mlp(*case.inputs), case.expected())


def test_projections_into_and_out_of_experts_may_be_of_two_schemes() -> None:
    case = Case(SCHEMES["fp8 in blocks"], make_down=SCHEMES["int4 in groups"])
    assert_close(quantised_experts_mlp(*case.inputs), case.expected())


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("per_token", [1, NUM_EXPERTS])
def test_few_tokens_and_any_number_of_experts_for_each(num_tokens: int, per_token: int) -> None:
    case = Case(SCHEMES["fp8 in blocks"], num_tokens, per_token)
    found = quantised_experts_mlp(*case.inputs)
    assert found.shape == (num_tokens, HIDDEN)
    if num_tokens:
        assert_close(found, case.expected())


@pytest.mark.parametrize("experts", [(0, 1), (4, 0), (3, 2)])
def test_all_tokens_may_go_to_the_same_experts_and_the_others_get_none(experts: tuple[int, int]) -> None:
    case = Case(SCHEMES["int4 in groups with zero points"], 37)
    case.experts = torch.tensor([experts] * 37, dtype=torch.int32, device=DEVICE)
    assert_close(quantised_experts_mlp(*case.inputs), case.expected())


def test_the_gate_may_be_gelu() -> None:
    case = Case(SCHEMES["fp8 of rows"])
    found = quantised_experts_mlp(*case.inputs, is_gelu=True)
    assert_close(found, quantised_experts_mlp_reference(*case.inputs, is_gelu=True))
    assert not torch.allclose(found, quantised_experts_mlp(*case.inputs), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp4", "fp8 of rows"])
def test_experts_may_have_biases_and_a_clamped_gate(name: str, dtype: torch.dtype) -> None:
    case = Case(SCHEMES[name], dtype=dtype)
    biases = (random(NUM_EXPERTS, 2 * INNER, seed=3).to(dtype), random(NUM_EXPERTS, HIDDEN, seed=4).to(dtype))
    # Of gates and ups, which are about 1 here, both are cut.
    for clamp in ((1.702, 0.5), (1.3, 7.0)):
        found = quantised_experts_mlp(*case.inputs, biases, clamp)
        numbers = [each.dequantised(torch.float32) for each in (case.gate_up, case.down)]
        expected = moe.experts_mlp_reference(
            case.x.float(),
            numbers[0].view(NUM_EXPERTS, 2 * INNER, HIDDEN),
            numbers[1].view(NUM_EXPERTS, HIDDEN, INNER),
            case.weights.float(),
            case.experts,
            (biases[0].float(), biases[1].float()),
            clamp,
        ).to(dtype)
        assert_close(found, expected)
        reference = quantised_experts_mlp_reference(*case.inputs, biases, clamp)
        torch.testing.assert_close(reference, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "dtype"), [("fp8 in blocks", torch.float16), ("int4 in groups", torch.float32)])
def test_a_token_has_the_same_bits_among_any_tokens_where_that_is_asked_for(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        multiply_as_tensor_cores_do(monkeypatch)
    # Enough tokens for two of the tiles that follow their number.
    case = Case(SCHEMES[name], 200, dtype=dtype)
    assert tile_of(400, NUM_EXPERTS, torch.float16) not in (TILES[0], INVARIANT_TILE)
    sizes, group = [], moe_routing.group

    def noted(experts: torch.Tensor, num_experts: int, block_size: int) -> moe_routing.ExpertBlocks:
        sizes.append(block_size)
        return group(experts, num_experts, block_size)

    monkeypatch.setattr(moe_routing, "group", noted)
    whole = invariant_quantised_experts_mlp(*case.inputs)
    assert_close(whole, case.expected())
    for count in (1, 17):
        own = slice(9, 9 + count)
        assert torch.equal(invariant_quantised_experts_mlp(*case.some(own)), whole[own]), count
    # Numpy multiplies in any tile alike, a GPU does not.
    assert len(set(sizes)) == 1


def test_a_padding_token_of_nan_harms_no_other() -> None:
    case = Case(SCHEMES["fp8 in blocks"], 5)
    expected = quantised_experts_mlp(*case.inputs)
    case.x[2] = float("nan")
    others = [0, 1, 3, 4]
    assert torch.equal(quantised_experts_mlp(*case.inputs)[others], expected[others])


def test_nothing_is_read_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SCHEMES["fp8 in blocks"], 7)
    quantised_experts_mlp(*case.inputs)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the host asked for a value of the device")

    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    quantised_experts_mlp(*case.inputs)


def test_tiles_change_where_those_of_experts_that_are_numbers_do() -> None:
    """So the numbers of tokens that compile all of one at the start compile all of the other."""
    assert [tile.tokens for tile in TILES] == [tile.rows for tile in moe.TILES]
    for num_tokens in (1, 16, 256, 512, 1024, 8192):
        tile = tile_of(num_tokens * 8, 128, torch.bfloat16)
        assert tile.tokens == moe.tile_for(num_tokens * 8, 128).rows
        assert tile_of(num_tokens * 8, 128, torch.float32) == WIDE_TILE
    assert INVARIANT_TILE in TILES


def test_a_stack_has_the_numbers_of_its_parts_in_their_order() -> None:
    for make in SCHEMES.values():
        parts = [make(INNER, HIDDEN, seed=seed) for seed in range(3)]
        expected = torch.cat([part.dequantised(torch.float32) for part in parts])
        whole = stack(parts)
        assert whole.shape == (3 * INNER, HIDDEN)
        assert torch.equal(whole.dequantised(torch.float32), expected)


def test_a_stack_of_weights_of_which_one_has_zero_points_has_them_for_all() -> None:
    parts = [int4(32, 64, 32, zeros=seed == 1, seed=seed) for seed in range(3)]
    expected = torch.cat([part.dequantised(torch.float32) for part in parts])
    assert torch.equal(stack(parts).dequantised(torch.float32), expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("name", ["fp8 in blocks", "int4 in groups with zero points"])
def test_captured_experts_are_right_for_another_routing_and_other_input(name: str) -> None:
    case = Case(SCHEMES[name], 7, dtype=torch.bfloat16)
    for product in (quantised_experts_mlp, invariant_quantised_experts_mlp):
        product(*case.inputs)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(*case.inputs)
        for experts in ((4, 0), (1, 2)):
            case.x.copy_(random(7, HIDDEN, seed=experts[0]).bfloat16() / 8)
            case.experts.copy_(torch.tensor([experts] * 7, dtype=torch.int32))
            graph.replay()
            assert_close(captured, case.expected())

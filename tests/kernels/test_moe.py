"""The kernels of the mixture of experts equal their references, whatever the router says."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.activation import Clamp
from dflash_kernels.invariant_linear import ProductTile
from dflash_kernels.moe import (
    TILES,
    Biases,
    experts_mlp,
    experts_mlp_reference,
    invariant_experts_mlp_reference,
    sum_of_parts,
    tile_for,
)
from dflash_kernels.moe_routing import group, max_blocks, route, route_reference
from tests.kernels.inputs import DEVICE

NUM_EXPERTS = 6
# On a GPU float32 products are summed in another order than torch's.
FLOAT32 = {"atol": 1e-4, "rtol": 1e-4}


class Case:
    """Random experts and tokens, and the router's choice for them. gpt_oss: with its biases and its gate."""

    def __init__(
        self,
        num_tokens: int,
        per_token: int,
        hidden: int = 40,
        inner: int = 24,
        dtype: torch.dtype = torch.float32,
        gpt_oss: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(num_tokens * 10 + per_token)
        experts = max(NUM_EXPERTS, per_token)
        self.x = self._random(num_tokens, hidden).to(DEVICE, dtype)
        self.gate_up = (self._random(experts, 2 * inner, hidden) / hidden**0.5).to(DEVICE, dtype)
        self.down = (self._random(experts, hidden, inner) / inner**0.5).to(DEVICE, dtype)
        self.weights, self.experts = route(self._random(num_tokens, experts).to(DEVICE, dtype), per_token, True)
        self.form: tuple[Biases | None, Clamp | None] = None, None
        if gpt_oss:
            biases = (
                self._random(experts, 2 * inner).to(DEVICE, dtype),
                self._random(experts, hidden).to(DEVICE, dtype),
            )
            self.form = biases, (1.702, 1.0)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def run(self, tile: ProductTile | None = None) -> torch.Tensor:
        return experts_mlp(self.x, self.gate_up, self.down, self.weights, self.experts, *self.form, tile)

    def expected(self) -> torch.Tensor:
        return experts_mlp_reference(self.x, self.gate_up, self.down, self.weights, self.experts, *self.form)


# Tokens and experts of each; widths that fill a tile and widths that do not.
SIZES: list[tuple[int, ...]] = [
    *((num_tokens, per_token) for num_tokens in (0, 1, 3, 19) for per_token in (1, 2, 8)),
    *((5, 2, *widths) for widths in ((64, 64), (128, 192), (33, 70))),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_kernel_equals_reference_over_tokens_experts_and_widths(sizes: tuple[int, ...]) -> None:
    case = Case(*sizes)
    torch.testing.assert_close(case.run(), case.expected(), **FLOAT32)


@pytest.mark.parametrize("sizes", [(3, 2), (19, 8), (5, 2, 64, 64), (5, 2, 33, 70)])
def test_the_experts_of_gpt_oss_have_biases_and_a_clamped_gate(sizes: tuple[int, ...]) -> None:
    case = Case(*sizes, gpt_oss=True)
    torch.testing.assert_close(case.run(), case.expected(), **FLOAT32)
    outputs = []
    for x, weights, experts in zip(case.x, case.weights, case.experts.tolist(), strict=True):
        # By the definition, one token and one of its experts after the other.
        output = torch.zeros_like(x)
        for weight, expert in zip(weights, experts, strict=True):
            assert case.form[0] is not None
            halves = case.gate_up[expert] @ x + case.form[0][0][expert]
            gate, up = halves.chunk(2)
            gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
            gated = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            output += weight * (case.down[expert] @ gated + case.form[0][1][expert])
        outputs.append(output)
    torch.testing.assert_close(case.run(), torch.stack(outputs), **FLOAT32)


@pytest.mark.parametrize("sizes", [(3, 2), (19, 8), (5, 2, 33, 70)])
def test_the_experts_of_gemma_have_gelu_for_their_gate(sizes: tuple[int, ...]) -> None:
    case = Case(*sizes)
    inputs = case.x, case.gate_up, case.down, case.weights, case.experts
    found = experts_mlp(*inputs, is_gelu=True)
    torch.testing.assert_close(found, experts_mlp_reference(*inputs, is_gelu=True), **FLOAT32)
    invariant = invariant_experts_mlp_reference(*(tensor.cpu() for tensor in inputs), is_gelu=True)
    torch.testing.assert_close(invariant, found.cpu(), **FLOAT32)
    x, expert = case.x[0], int(case.experts[0, 0])
    gate, up = (case.gate_up[expert] @ x).chunk(2)
    assert not torch.allclose(found, case.run())
    alone = experts_mlp(
        x[None], case.gate_up, case.down, torch.ones_like(case.weights[:1, :1]), case.experts[:1, :1], is_gelu=True
    )
    gated = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(alone[0], case.down[expert] @ gated, **FLOAT32)


@pytest.mark.parametrize("experts", [(0, 1), (5, 0), (4, 2)])
def test_all_tokens_may_go_to_the_same_experts_and_the_others_get_none(experts: tuple[int, int]) -> None:
    case = Case(37, 2)
    case.experts = torch.tensor([experts] * 37, dtype=torch.int32, device=DEVICE)
    torch.testing.assert_close(case.run(), case.expected(), **FLOAT32)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: str(tile.rows))
def test_every_tile_equals_the_reference(tile: ProductTile) -> None:
    # One expert has a full block of entries and a part of one, the others a part.
    case = Case(tile.rows + 3, 2, hidden=72, inner=136)
    case.experts[:, 0] = 3
    torch.testing.assert_close(case.run(tile), case.expected(), **FLOAT32)


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float64_as_the_reference(dtype: torch.dtype, gpt_oss: bool) -> None:
    case = Case(19, 2, dtype=dtype, gpt_oss=gpt_oss)
    biases = None if case.form[0] is None else tuple(bias.double() for bias in case.form[0])
    exact = experts_mlp_reference(
        case.x.double(),
        case.gate_up.double(),
        case.down.double(),
        case.weights.double(),
        case.experts,
        biases,
        case.form[1],
    )
    error = (case.run().double() - exact).abs().max()
    allowed = (case.expected().double() - exact).abs().max()
    assert case.run().dtype == dtype
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it: twice the error of a number.
    assert error <= 3 * allowed


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_a_tokens_result_is_the_same_to_the_bit_whatever_else_is_in_its_tile(gpt_oss: bool) -> None:
    case = Case(20, 2, gpt_oss=gpt_oss)
    together = case.run()
    alone = torch.cat(
        [
            experts_mlp(case.x[one], case.gate_up, case.down, case.weights[one], case.experts[one], *case.form)
            for one in (slice(i, i + 1) for i in range(0, 20, 4))
        ]
    )
    assert torch.equal(together[::4], alone)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_experts", "per_token"), [(6, 1), (6, 6), (16, 3), (128, 8)])
def test_routing_equals_its_reference(num_experts: int, per_token: int, normalise: bool) -> None:
    logits = torch.randn(9, num_experts, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    weights, experts = route(logits, per_token, normalise)
    expected_weights, expected_experts = route_reference(logits, per_token, normalise)
    assert torch.equal(experts.long(), expected_experts)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-6)


def test_routing_keeps_the_logits_dtype_and_weighs_in_float32() -> None:
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.bfloat16)
    # Where two are equally likely, which of them comes first is not said; these rows have no such pair.
    distinct = torch.stack([row for row in logits if len(row.unique()) == 16])
    weights, experts = route(distinct, 4, True)
    expected_weights, expected_experts = route_reference(distinct, 4, True)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(experts.long(), expected_experts)
    torch.testing.assert_close(weights, expected_weights, atol=0.0, rtol=2**-7)


def test_of_equally_likely_experts_the_first_are_taken() -> None:
    _, experts = route(torch.zeros(2, 6, device=DEVICE), 3, True)
    assert experts.tolist() == [[0, 1, 2]] * 2


def test_a_padding_token_of_nan_has_experts_that_exist_and_harms_no_other() -> None:
    case = Case(5, 2)
    expected = case.run()
    logits = torch.full((5, NUM_EXPERTS), float("nan"), device=DEVICE)
    _, experts = route(logits, 2, True)
    assert ((experts >= 0) & (experts < NUM_EXPERTS)).all()
    case.x[2], case.experts[2] = float("nan"), experts[2]
    others = [0, 1, 3, 4]
    assert torch.equal(case.run()[others], expected[others])


@pytest.mark.parametrize("num_entries", [1, 5, 16, 17, 200, 5000])
def test_each_entry_is_in_one_block_of_its_expert(num_entries: int) -> None:
    generator = torch.Generator().manual_seed(num_entries)
    # Two experts in the middle and the last one get nothing.
    experts = torch.tensor([0, 1, 4])[torch.randint(3, (num_entries, 1), generator=generator)].int()
    blocks = group(experts.to(DEVICE), NUM_EXPERTS, 16)
    of_block = blocks.experts.tolist()
    used = sum(-(-int(count) // 16) for count in experts.flatten().bincount(minlength=NUM_EXPERTS))
    assert of_block[used:] == [-1] * (len(of_block) - used)
    assert of_block[:used] == sorted(of_block[:used])
    entries = blocks.entries.view(-1, 16)[:used].tolist()
    pairs = [(entry, of_block[i]) for i, block in enumerate(entries) for entry in block if entry < num_entries]
    assert sorted(pairs) == list(enumerate(experts.flatten().tolist()))
    assert all(entry <= num_entries for block in entries for entry in block)


def test_the_bound_on_blocks_is_reached_and_never_passed() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_entries in range(1, 60):
        bound = max_blocks(num_entries, NUM_EXPERTS, 4)
        # As many experts as there are, with one entry more than full blocks wherever that is possible.
        hit = min(NUM_EXPERTS, num_entries)
        counts = torch.ones(hit, dtype=torch.int64)
        counts[0] += num_entries - hit
        assert int((-(-counts // 4)).sum()) == bound
        ids = torch.randint(NUM_EXPERTS, (num_entries,), generator=generator)
        assert int((-(-ids.bincount() // 4)).sum()) <= bound


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(1, 16), (16, 16), (64, 16), (256, 16), (512, 32), (1024, 64), (8192, 128)]
)
def test_tiles_grow_with_the_tokens_of_an_expert(num_tokens: int, rows: int) -> None:
    assert tile_for(num_tokens * 8, 128).rows == rows


def test_every_tile_fits_the_shared_memory_of_any_gpu_since_ampere() -> None:
    # The pieces that are under way.
    assert all((tile.rows + tile.columns) * tile.k_bytes * tile.stages <= 96 * 1024 for tile in TILES)
    assert all(tile.rows >= 16 and tile.columns >= 32 and tile.k_bytes >= 64 for tile in TILES)


def test_nothing_is_read_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(7, 2)
    case.run()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the host asked for a value of the device")

    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    case.run()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_captured_graph_holds_for_another_routing() -> None:
    case = Case(7, 2)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    case.experts.copy_(torch.tensor([[5, 0]] * 7, dtype=torch.int32))
    graph.replay()
    torch.testing.assert_close(captured, case.expected(), **FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sum_over_experts_is_rounded_once(dtype: torch.dtype) -> None:
    """Ten parts, each less than half of the last place of their sum: rounded after each, none but the first counts."""
    small = torch.finfo(dtype).eps / 4
    parts = torch.full((2 * 10, 5), small, dtype=dtype, device=DEVICE)
    parts[::10] = 1.0
    exact = parts.double().view(2, 10, 5).sum(1)
    assert float(exact[0, 0]) == 1.0 + 9 * small
    found = sum_of_parts(parts, 2, 10)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps
    assert (found > 1.0 + torch.finfo(dtype).eps / 2).all()

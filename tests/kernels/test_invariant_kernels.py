"""The kernels for `batch_invariant`: right, and with the same bits for a row or a query in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dflash_kernels import invariant_attention as pieces
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.fp8_kv import dequantise_kv_reference, quantise_kv_reference
from dflash_kernels.invariant_attention import PIECE, invariant_attention, pieces_variants, plan_pieces, with_tiles
from dflash_kernels.invariant_linear import invariant_linear, product_tile
from dflash_kernels.moe import experts_mlp_reference, invariant_experts_mlp
from dflash_kernels.paged_attention import paged_attention_reference
from dflash_kernels.paged_attention_launch import HeadShape
from tests.kernels.inputs import DEVICE, HALF_DTYPES, multiply_as_tensor_cores_do, random
from tests.support.scale import by_night

DTYPES = [torch.float32, *HALF_DTYPES]
COUNTS = [1, 3, 17, 64, 100]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Longer than two pieces.
LONGEST = 2 * PIECE + 300
WINDOWS = [None, 1, 70, PIECE + 30]


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_as_tensor_cores_do(monkeypatch)


# Half precision has one of them by day, of the most tiles: the order of sums does not depend on the dtype.
PRODUCTS = [
    (dtype, bias, *size) if dtype == torch.float32 or (bias and size == (160, 130)) else by_night(dtype, bias, *size)
    for dtype in DTYPES
    for bias in (False, True)
    for size in ((32, 97), (160, 130), (33, 7))
]


@pytest.mark.parametrize(("dtype", "bias", "inputs", "outputs"), PRODUCTS)
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(
    dtype: torch.dtype, bias: bool, inputs: int, outputs: int
) -> None:
    weight, offset = random(outputs, inputs).to(dtype), random(outputs, seed=1).to(dtype) if bias else None
    x = random(150, inputs, seed=2).to(dtype)
    whole = invariant_linear(x, weight, offset)
    torch.testing.assert_close(whole, F.linear(x, weight, offset), atol=10 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for count in COUNTS:
        for first in (0, 13, 50):
            some = invariant_linear(x[first : first + count].clone(), weight, offset)
            assert torch.equal(some, whole[first : first + count]), (count, first)


def test_the_tile_of_a_product_follows_its_weight_alone() -> None:
    assert {product_tile(4096, 2).columns, product_tile(150_000, 2).columns} == {64, 128}
    assert invariant_linear(random(2, 3, 8), random(5, 8)).shape == (2, 3, 5)
    assert invariant_linear(random(0, 8), random(5, 8)).shape == (0, 5)


@pytest.mark.parametrize("gpt_oss", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_whatever_other_tokens_go_to_its_experts(dtype: torch.dtype, gpt_oss: bool) -> None:
    x, gate_up, down = random(90, 136).to(dtype), random(6, 2 * 70, 136, seed=1) / 12, random(6, 136, 70, seed=2) / 9
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    experts = random(90, 6, seed=3).topk(3).indices
    weights = random(90, 3, seed=4).abs().to(dtype)
    biases = (random(6, 2 * 70, seed=5).to(dtype), random(6, 136, seed=6).to(dtype)) if gpt_oss else None
    form = biases, (1.702, 1.0) if gpt_oss else None
    whole = invariant_experts_mlp(x, gate_up, down, weights, experts.int(), *form)
    expected = experts_mlp_reference(x, gate_up, down, weights, experts, *form)
    torch.testing.assert_close(whole, expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for count in COUNTS[:-1]:
        some = slice(9, 9 + count)
        own = invariant_experts_mlp(x[some], gate_up, down, weights[some], experts[some].int(), *form)
        assert torch.equal(own, whole[some]), count


class Memory:
    """Rows over scattered blocks that they share with nobody; `width` blocks hold a row."""

    def __init__(
        self, num_rows: int, dtype: torch.dtype, longest: int = LONGEST, block_size: int = 16, fp8: bool = False
    ) -> None:
        self.block_size = block_size
        width = -(-longest // block_size)
        order = np.random.default_rng(3).permutation(num_rows * width)
        self.tables = torch.from_numpy(order.reshape(num_rows, width).astype(np.int32)).to(DEVICE)
        self.cache = random(num_rows * width, block_size, 2, 1, 16).to(dtype)
        self.query = random(num_rows, longest, 2, 16, seed=1).to(dtype)
        self.scales = None
        if fp8:
            self.cache, self.scales = quantise_kv_reference(self.cache)

    def batch(self, rows: list[int], lens: list[int], ends: list[int]) -> tuple[torch.Tensor, PagedBatch]:
        """The last `lens` queries of the first `ends` positions of `rows`."""
        query = torch.cat([self.query[r, end - count : end] for r, count, end in zip(rows, lens, ends, strict=True)])
        starts = np.cumsum(lens) - lens
        columns = (torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in (starts.tolist(), lens, ends))
        return query, PagedBatch(*columns, self.tables[rows])

    def attend(
        self,
        rows: list[int],
        lens: list[int],
        ends: list[int],
        causal: bool = True,
        window: int | None = None,
        bounds: list[int] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Their output, as the host knows their ends, or with these bounds of them."""
        query, batch = self.batch(rows, lens, ends)
        shape = HeadShape(2, 1, 16, query.itemsize)
        launches, table = plan_pieces(np.array(lens), np.array(bounds or ends), shape)
        tiles = None if table is None else torch.from_numpy(table).to(DEVICE)
        tiled = with_tiles(launches, tiles)
        return invariant_attention(query, self.cache, batch, tiled, causal, window, sinks=sinks, scales=self.scales)


def sinks_of(has_sinks: bool) -> torch.Tensor | None:
    """Two heads', which weigh as much as hundreds of keys."""
    return 7 + random(2, seed=5) if has_sinks else None


PIECES = [
    (dtype, window, *form) if dtype == torch.float32 or window == 70 else by_night(dtype, window, *form)
    for dtype in DTYPES
    for window in WINDOWS
    for form in ((True, False), (False, False), (True, True))
]


@pytest.mark.parametrize(("dtype", "window", "causal", "has_sinks"), PIECES)
def test_pieces_are_attention(dtype: torch.dtype, window: int | None, causal: bool, has_sinks: bool) -> None:
    memory, rows = Memory(4, dtype), ([0, 1, 2, 3], [1, 40, 16, 5], [1, PIECE + 20, LONGEST, PIECE])
    query, batch = memory.batch(*rows)
    sinks = sinks_of(has_sinks)
    expected = paged_attention_reference(query.double(), memory.cache.double(), batch, causal, window, sinks)
    tolerance = TOLERANCE[dtype]
    actual = memory.attend(*rows, causal=causal, window=window, sinks=sinks)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 70])
def test_a_query_over_fp8_has_the_same_bits_alone_and_in_a_chunk(window: int | None) -> None:
    memory, sinks = Memory(3, torch.float32, fp8=True), sinks_of(True)
    first, end = PIECE - 20, PIECE + 30
    query, batch = memory.batch([1], [end - first], [end])
    assert memory.scales is not None
    cache = dequantise_kv_reference(memory.cache, memory.scales, torch.float64)
    whole = memory.attend([1], [end - first], [end], window=window, sinks=sinks)
    expected = paged_attention_reference(query.double(), cache, batch, True, window, sinks)
    torch.testing.assert_close(whole.double(), expected, atol=1e-4, rtol=1e-4)
    for at in (first, first + 19, first + 20, end - 1):
        alone = memory.attend([1], [1], [at + 1], window=window, sinks=sinks)
        assert torch.equal(alone[0], whole[at - first]), at


VIEWS = [*((window, False) for window in WINDOWS), (None, True), (70, True)]
# Half precision has one of them in `make test`: the order of sums does not depend on the dtype.
BY_DAY = {torch.float32: [(None, False), (PIECE + 30, False), (70, True)]}
DTYPES_AND_VIEWS = [
    (dtype, *view) if view in BY_DAY.get(dtype, [(70, True)]) else by_night(dtype, *view)
    for dtype in DTYPES
    for view in VIEWS
]


@pytest.mark.parametrize(("dtype", "window", "has_sinks"), DTYPES_AND_VIEWS)
def test_a_query_has_the_same_bits_alone_in_any_chunk_and_beside_any_rows(
    dtype: torch.dtype, window: int | None, has_sinks: bool
) -> None:
    memory, sees = Memory(3, dtype), {"window": window, "sinks": sinks_of(has_sinks)}
    # Where a piece ends, a block of keys, and nothing.
    for first, end in ((PIECE - 20, PIECE + 30), (0, 40), (LONGEST - 40, LONGEST)):
        whole = memory.attend([1], [end - first], [end], **sees)
        for at in (first, first + 19, first + 20, end - 1):
            alone = memory.attend([1], [1], [at + 1], **sees)
            assert torch.equal(alone[0], whole[at - first]), at
        chunk = memory.attend([1], [16], [first + 23], **sees)
        assert torch.equal(chunk, whole[7:23])
        among = memory.attend([0, 1, 2], [5, 16, 1], [5, first + 23, LONGEST], **sees)
        assert torch.equal(among[5:21], whole[7:23])
        bounded = memory.attend([1], [16], [first + 23], **sees, bounds=[LONGEST])
        assert torch.equal(bounded, whole[7:23])


def test_partial_results_that_take_too_much_memory_come_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, rows = Memory(3, torch.float32), ([0, 1, 2], [20, 3, 16], [PIECE + 5, 9, LONGEST])
    together = memory.attend(*rows)
    monkeypatch.setattr(pieces, "MAX_PARTIAL_LINES", 1)
    launches, table = plan_pieces(np.array(rows[1]), np.array(rows[2]), HeadShape(2, 1, 16, 4))
    assert table is not None
    assert len(launches) == table.shape[1] == 6
    assert torch.equal(memory.attend(*rows), together)
    assert torch.equal(memory.attend([0, 1, 2], [16] * 3, [LONGEST] * 3)[32:], together[23:])


@pytest.mark.parametrize(("bound", "end"), [(PIECE - 7, PIECE + 4), (2 * PIECE, 2 * PIECE + 9)])
def test_a_row_that_is_longer_than_its_bound_writes_no_further(
    bound: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has ended meanwhile, whose result is not used; partial results are made for its bound."""
    memory, guards = Memory(2, torch.float32, longest=2 * PIECE + 16), []
    expected = memory.attend([1], [16], [100])
    empty = torch.empty

    def guarded(*sizes: int, **options: Any) -> torch.Tensor:
        whole = empty(sizes[0] + 4096, *sizes[1:], **options).fill_(7)
        guards.append(whole[sizes[0] :])
        return whole[: sizes[0]]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guarded)
        found = memory.attend([0, 1], [16, 16], [end, 100], bounds=[bound, 100])
    assert len(guards) >= 2
    assert all(bool((guard == 7).all()) for guard in guards)
    assert torch.equal(found[16:], expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_every_launch_is_of_a_kind_that_is_compiled_at_the_start(head_dim: int, itemsize: int, group: int) -> None:
    shape = HeadShape(8 * group, 8, head_dim, itemsize)
    ((mapped, _), (plain, _)) = pieces_variants(shape)
    for lens in ([1], [16] * 5, [300, 1, 0, 7], [8192]):
        launches, _ = plan_pieces(np.array(lens), np.full(len(lens), 40_000), shape)
        assert {launch.tiling for launch in launches} == {mapped.tiling} == {plain.tiling}
        assert sum(launch.num_tiles for launch in launches) >= len(lens) - 1

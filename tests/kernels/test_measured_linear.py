"""Products by cuBLASLt's ways: what the library is told, which way is taken, and what leads back to torch's product.

The library is a stand-in that multiplies what lies at the addresses it is given, by the layouts it is told.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dflash_backend.models.ops import InvariantTritonLayerOps, LayerOps, TritonLayerOps
from dflash_kernels import cublas_lt, measured_linear
from dflash_kernels.cublas_lt import CublasLt, CublasLtError, Problem
from dflash_kernels.invariant_linear import invariant_linear
from dflash_kernels.measured_linear import BUDGET_S, MAX_ROWS, MeasuredProducts, Work, measuring, use_measured_products
from tests.kernels.fake_cublas_lt import FakeCublasLt

OUT, INNER = 24, 40
# Of torch's product and of the ways 3, 1 and 2, which is their order: the third is the fastest.
TIMES = (10e-6, 9.9e-6, 9e-6, 5e-6)
TORCHS = "torch's"
Name = str | tuple[int, int]


class Timer:
    """Runs every piece of every work once, as the GPU's does, and says these times. split: the times of ways with their
    sums in this number of parts, in place of those by the number of the way alone. timed: how often which were timed.
    fine: those of ways beside torch's product, in place of all others. pieces: of what was timed beside it."""

    def __init__(self, times: Sequence[float] = TIMES, split: Mapping[tuple[int, int], float] | None = None) -> None:
        self.times = dict(zip((TORCHS, 3, 1, 2), times, strict=False))
        self.split, self.fine = split or {}, dict[Name, float]()
        self.pieces: list[int] = []
        self.timed: list[tuple[int, list[Name]]] = []

    def __call__(self, works: Sequence[Sequence[Work]], repeats: int) -> list[float]:
        for pieces in works:
            for piece in pieces:
                piece()
        names = [self._name(pieces[0]) for pieces in works]
        self.timed.append((repeats, names))
        times: dict[Name, float] = {TORCHS: self.times[TORCHS], **self.split}
        if TORCHS in names:
            self.pieces.append(len(works[0]))
            times |= self.fine
        return [times[each] if each in times else self.times[each[0]] for each in names]

    @staticmethod
    def _name(piece: Any) -> Name:
        if piece.func is F.linear:
            return TORCHS
        config = piece.args[0].candidate.config
        return config["algo"], config["split"]


@pytest.fixture(autouse=True)
def wanted() -> Iterator[None]:
    use_measured_products(True)
    yield
    use_measured_products(False)


def numbers(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def measured(
    library: FakeCublasLt, weight: torch.Tensor, rows: int = 3, times: Sequence[float] = TIMES
) -> MeasuredProducts:
    """Products of which that of so many rows was measured."""
    products = MeasuredProducts(CublasLt(library), Timer(times))
    with measuring():
        products(numbers(rows, weight.shape[1], dtype=weight.dtype), weight)
    library.multiplied.clear()
    return products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_the_library_is_told_where_rows_and_columns_lie(rows: int, dtype: torch.dtype) -> None:
    library, weight = FakeCublasLt(), numbers(OUT, INNER, dtype=dtype)
    products = measured(library, weight, rows)
    x = numbers(rows, INNER, dtype=dtype, seed=1)
    found = products(x, weight)
    assert library.multiplied == [(2, 1, rows)]
    torch.testing.assert_close(found, F.linear(x, weight), rtol=1e-2, atol=1e-2)
    assert found.dtype == dtype
    assert products(x[None], weight).shape == (1, rows, OUT)
    # Workspace of 32 MiB; sums in float32 alone, tensors that begin at a multiple of 16 bytes.
    assert library.asked == [{1: 32 << 20, 3: 2, 5: 16, 6: 16, 7: 16, 8: 16}]


def test_the_structs_have_the_sizes_of_the_librarys_header() -> None:
    assert ctypes.sizeof(cublas_lt.Algo) == 64
    assert ctypes.sizeof(cublas_lt.HeuristicResult) == 96
    assert cublas_lt.HeuristicResult.workspace_size.offset == 64
    assert cublas_lt.HeuristicResult.state.offset == 72


def test_the_fastest_of_the_ways_is_taken_where_it_is_worth_it() -> None:
    weight = numbers(OUT, INNER)
    for times, expected in (
        ((10e-6, 9e-6, 12e-6, 11e-6), [(3, 1, 3)]),
        ((10e-6, 10e-6, 9.75e-6, 9.9e-6), []),
        ((10e-6, 10e-6, 9.65e-6, 9.9e-6), [(1, 1, 3)]),
    ):
        library = FakeCublasLt()
        measured(library, weight, times=times)(numbers(3, INNER), weight)
        assert library.multiplied == expected, times


def test_sums_are_tried_in_other_parts_where_the_library_splits_one() -> None:
    weight, split = numbers(OUT, INNER), {(1, 2): 4e-6, (1, 3): 3e-6, (3, 3): 6e-6, (3, 1): 7e-6}
    # What is timed twice, then the fastest of these five times beside torch's product.
    for parts, first, finalists in (
        ({}, [(3, 1), (1, 1), (2, 1)], [(2, 1), (3, 1), (1, 1)]),
        ({3: 2}, [(3, 2), (1, 1), (2, 1), (3, 1), (3, 3), (3, 4), (1, 2), (1, 3), (1, 4)], [(1, 3), (1, 2), (2, 1)]),
        ({2: 4}, [(3, 1), (1, 1), (2, 4), (3, 2), (3, 3), (3, 4), (1, 2), (1, 3), (1, 4)], [(1, 3), (1, 2), (2, 4)]),
    ):
        library, timer = FakeCublasLt(), Timer(split=split)
        library.parts = parts
        products = MeasuredProducts(CublasLt(library), timer)
        with measuring():
            products(numbers(3, INNER), weight)
        assert timer.timed == [(2, first), (5, [TORCHS, *finalists])], parts
        library.multiplied.clear()
        products(numbers(3, INNER), weight)
        assert library.multiplied == [(*finalists[0], 3)], parts


def test_what_is_timed_beside_torchs_product_decides() -> None:
    library, weight, timer = FakeCublasLt(), numbers(OUT, INNER), Timer()
    timer.fine = {(2, 1): 9.9e-6, (1, 1): 8e-6}
    products = MeasuredProducts(CublasLt(library), timer)
    with measuring():
        products(numbers(3, INNER), weight)
    library.multiplied.clear()
    products(numbers(3, INNER), weight)
    assert library.multiplied == [(1, 1, 3)]


def test_what_measuring_gave_is_said_by_rows() -> None:
    library, split = FakeCublasLt(), {(1, 2): 4e-6}
    library.parts = {3: 2}
    timer = Timer(split=split)
    products = MeasuredProducts(CublasLt(library), timer, clock=lambda: 0.0)
    assert products.describe() == (
        "of 0 products by shape and rows 0 take another way than cuBLAS's first choice, 0 of them with the sum in "
        "other parts than it proposes; measuring took 0.0 s"
    )
    with measuring():
        products(numbers(3, INNER), numbers(OUT, INNER))
        timer.split = {}
        for outputs in (OUT, OUT + 8):
            products(numbers(5, INNER), numbers(outputs, INNER))
        timer.times = dict.fromkeys(timer.times, 20e-6)
        products(numbers(5, INNER), numbers(OUT + 16, INNER))
    # 10 us became 4 for three rows; 10, 10 and 20 became 5, 5 and 20 for five.
    assert products.describe() == (
        "of 4 products by shape and rows 3 take another way than cuBLAS's first choice, 1 of them with the sum in "
        "other parts than it proposes; one of each takes 34.0 us in place of 50.0, those of 3 rows 4.0 us in place of "
        "10.0; measuring took 0.0 s"
    )


def test_each_number_of_rows_is_measured_once_and_only_where_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    library, weight, timer = FakeCublasLt(), numbers(OUT, INNER), Timer()
    products = MeasuredProducts(CublasLt(library), timer)
    products(numbers(3, INNER), weight)
    assert (timer.timed, library.multiplied) == ([], [])
    with measuring():
        for rows in (3, 5, 3):
            products(numbers(rows, INNER), weight)
    assert len(timer.pieces) == 2
    measured_linear._State.products = products
    with caplog.at_level(logging.INFO), measuring():
        pass
    assert "of 2 products by shape and rows 2 take another way than cuBLAS's first choice, 0 of them" in caplog.text
    use_measured_products(False)
    with measuring():
        products(numbers(7, INNER), weight)
    assert len(timer.pieces) == 2


def test_a_way_is_measured_over_other_weights_of_its_shape_that_are_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_linear, "COLD_BYTES", 3 * OUT * INNER * 2)
    weights, timer = [numbers(OUT, INNER, seed=seed) for seed in range(5)], Timer()
    products = MeasuredProducts(CublasLt(FakeCublasLt()), timer)
    for weight in weights:
        products.add(weight)
    products.add(numbers(OUT + 8, INNER))
    with measuring():
        products(numbers(2, INNER), weights[3])
        del weight, weights[0], weights[0], weights[1], weights[1:]
        gc.collect()
        products(numbers(1, INNER), weights[0])
    assert timer.pieces == [3, 1]


def test_what_the_library_is_not_given_is_torchs() -> None:
    library, weight = FakeCublasLt(), numbers(OUT, INNER)
    products = measured(library, weight)
    memory = numbers(4 * INNER)
    bias, odd, apart = numbers(OUT), memory[1 : 1 + 3 * INNER].view(3, INNER), numbers(3, 2 * INNER)[:, :INNER]
    many = numbers(MAX_ROWS + 1, INNER)
    with measuring():
        for x, offset in ((numbers(3, INNER), bias), (odd, None), (apart, None), (many, None), (many[:0], None)):
            torch.testing.assert_close(products(x, weight, offset), F.linear(x, weight, offset), rtol=0, atol=0)
    assert library.multiplied == []


def test_wrong_and_failing_ways_are_left_out() -> None:
    library, weight = FakeCublasLt(), numbers(OUT, INNER)
    library.off, library.fails = {2: 5.0}, {1}
    # One way is left, the first: its time is the second of the times.
    products = measured(library, weight, times=(10e-6, 8e-6))
    products(numbers(3, INNER), weight)
    assert library.multiplied == [(3, 1, 3)]
    library.off = {3: float("nan"), 2: 5.0}
    products = measured(library, weight, times=(10e-6, 8e-6))
    products(numbers(3, INNER), weight)
    assert library.multiplied == []


def test_a_way_that_fails_later_gives_way_to_torchs_product(caplog: pytest.LogCaptureFixture) -> None:
    library, weight, x = FakeCublasLt(), numbers(OUT, INNER), numbers(3, INNER)
    products = measured(library, weight)
    library.fails = {2}
    assert torch.equal(products(x, weight), F.linear(x, weight))
    assert "Products of 3 rows by [24, 40] are torch's from here on: cublasLtMatmul gave status 15" in caplog.text
    library.fails = set()
    assert torch.equal(products(x, weight), F.linear(x, weight))
    assert library.multiplied == []


def test_what_measuring_raises_leads_to_torchs_product(caplog: pytest.LogCaptureFixture) -> None:
    def fails(works: Sequence[Sequence[Work]], repeats: int) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    weight, x = numbers(OUT, INNER), numbers(3, INNER)
    products = MeasuredProducts(CublasLt(FakeCublasLt()), fails)
    with measuring():
        assert torch.equal(products(x, weight), F.linear(x, weight))
    assert "are torch's: CUDA out of memory" in caplog.text


def test_measuring_ends_where_its_time_is_up() -> None:
    library, weight, timer, now = FakeCublasLt(), numbers(OUT, INNER), Timer(), iter(range(0, 99, 3))
    products = MeasuredProducts(CublasLt(library), timer, lambda: float(next(now)))
    with measuring():
        for rows in (1, 2, 3, 4):
            products(numbers(rows, INNER), weight)
    # Each takes 3 s of 5.
    assert BUDGET_S == 5.0
    assert len(timer.pieces) == 2
    assert products.describe().endswith("measuring took 6.0 s, and 2 were met after the 5 s for it")
    assert products.describe().startswith("of 2 products by shape and rows 2 take")
    library.multiplied.clear()
    for rows in (2, 3):
        products(numbers(rows, INNER), weight)
    assert library.multiplied == [(2, 1, 2)]


def test_a_library_of_another_version_and_none_at_all_are_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CublasLtError, match="it is cuBLASLt 120803, and this was written for version 13"):
        CublasLt(FakeCublasLt(version=120803))
    weight = torch.empty(OUT, INNER, dtype=torch.bfloat16)
    assert measured_linear.product_of(weight) is F.linear  # a CPU's

    class OfGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    def missing() -> object:
        raise CublasLtError("this process has not loaded libcublasLt")

    monkeypatch.setattr(measured_linear, "loaded_library", missing)
    on_gpu = weight.as_subclass(OfGpu)
    assert measured_linear.product_of(on_gpu) is F.linear
    assert "Products are torch's, their ways are not measured: this process has not loaded" in caplog.text
    use_measured_products(True)
    monkeypatch.setattr(measured_linear, "loaded_library", FakeCublasLt)
    first = measured_linear.product_of(on_gpu)
    assert isinstance(first, MeasuredProducts)
    assert measured_linear.product_of(on_gpu) is first
    assert measured_linear.product_of(on_gpu.float()) is F.linear


def test_a_targets_products_are_measured_but_not_those_of_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    monkeypatch.setattr(measured_linear, "loaded_library", FakeCublasLt)
    weight = numbers(OUT, INNER).as_subclass(OfGpu)
    measured_ops, invariant, torchs = TritonLayerOps(), InvariantTritonLayerOps(), LayerOps()
    assert isinstance(measured_ops.product_of(weight), MeasuredProducts)
    assert invariant.product_of(weight) is invariant_linear
    assert torchs.product_of(weight) is F.linear
    use_measured_products(False)
    assert measured_ops.product_of(weight) is F.linear


def test_sums_are_split_as_far_as_the_library_can() -> None:
    library = FakeCublasLt()
    problem = Problem(CublasLt(library), OUT, INNER, 1, torch.bfloat16)
    (first, *_) = problem.candidates(1)
    assert (first.config["algo"], first.config["split"], first.describe()) == (3, 1, "algo 3, split 1")
    found = [
        (each.config["split"], each.config["reduction"], each.workspace) for each in problem.splits(first, (1, 2, 4, 8))
    ]
    assert found == [(2, 2, 1 << 20), (4, 2, 3 << 20)]
    assert first.config["split"] == 1


def test_descriptors_are_destroyed_with_their_problem() -> None:
    library = FakeCublasLt()
    problem = Problem(CublasLt(library), OUT, INNER, 1, torch.bfloat16)
    problem.candidates(2)
    del problem
    gc.collect()
    # Of the product, its three matrices and the preference. The handle stays.
    assert (library.destroyed, len(library.made)) == (5, 1)

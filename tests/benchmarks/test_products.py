"""The parts of a GPU's report that are about products: what is timed, what is left out, and what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import cublas_choices, few_rows
from benchmarks.gpu.floor import Ceilings
from benchmarks.gpu.results import KernelRun
from dflash_kernels.cublas_lt import CublasLt
from dflash_kernels.few_row_linear import FewRowProducts, FewRowTile
from dflash_kernels.measured_linear import Work
from tests.kernels.fake_cublas_lt import FakeCublasLt

CEILINGS = Ceilings(copy_bandwidth=4e12, matrix_rate=8e14)
PRODUCTS = [("qkv", 24, 40), ("o", 40, 16), ("head", 48, 40)]
ROOT = Path(__file__).resolve().parents[2]


def measured(monkeypatch: pytest.MonkeyPatch, library: FakeCublasLt | None) -> dict[str, KernelRun]:
    """What is found where the times of works are 1, 2, 3 us and so on, the last of four the shortest."""

    def seconds(works: Sequence[Sequence[Work]], repeats: int) -> list[float]:
        for pieces in works:
            for piece in pieces:
                piece()
        return [1e-6 * (number + 1 if number != 3 else 0.5) for number in range(len(works))]

    monkeypatch.setattr(cublas_choices, "graph_seconds", seconds)
    monkeypatch.setattr(cublas_choices, "seconds_each", lambda device, works: 7e-6)
    lt = None if library is None else CublasLt(library)
    runs = list(cublas_choices.measure(PRODUCTS, torch.device("cpu"), torch.bfloat16, CEILINGS, lt))
    assert {run.section for run in runs} == {cublas_choices.SECTION}
    return {run.name: run for run in runs}


def test_the_first_choice_stands_beside_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeCublasLt(offers=(3, 1))
    runs = measured(monkeypatch, library)
    assert [name for name in runs if name.startswith("qkv")] == ["qkv, 1 rows", "qkv, 4 rows", "qkv, 8 rows"]
    # The ways: 3, 1, and each of both in 2, 3 and 4 parts. At first that of 3 in 3 parts is the best, then the last of
    # those that are timed again: the first, that one, and 1.
    found = runs["qkv, 4 rows"]
    assert found.seconds == 1e-6
    assert list(found.others.items()) == [
        ("first (algo 3, split 1)", 2e-6),
        ("best of 8 (algo 1, split 1)", 0.5e-6),
    ]
    assert found.floor_s == pytest.approx((2 * (24 * 40 + 4 * (24 + 40))) / 4e12)
    # Rows that are not tried.
    assert (runs["qkv, 8 rows"].seconds, runs["qkv, 8 rows"].others) == (7e-6, {})
    # The first is asked with every way to add up, then those in float32 alone.
    assert [asked[3] for asked in library.asked[:2]] == [7, 2]


def test_a_layer_is_the_sum_of_its_products_without_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = measured(monkeypatch, FakeCublasLt())
    layer = runs["a layer, 4 rows"]
    assert layer.seconds == pytest.approx(2e-6)
    assert layer.others == {"best of each": pytest.approx(1e-6)}
    assert runs["a layer, 8 rows"].seconds == pytest.approx(14e-6)
    assert runs["a layer, 8 rows"].others == {}
    assert list(runs)[-3:] == ["a layer, 1 rows", "a layer, 4 rows", "a layer, 8 rows"]


def test_rows_are_worth_padding_to_the_next_step() -> None:
    times = {1: 10.0, 16: 10.1, 32: 10.2, 48: 14.0, 64: 14.2}
    runs = [KernelRun("", f"a layer, {rows} rows", 1e-6 * us, 0.0) for rows, us in times.items()]
    runs.append(KernelRun("", "head, 80 rows", 1e-6, 0.0))
    assert cublas_choices.steps_in(runs) == "32 (10.2), 64 (14.2)"


def test_wrong_and_failing_ways_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeCublasLt(offers=(3, 1))
    library.off, library.fails = {3: 9.0}, {1}
    runs = measured(monkeypatch, library)
    assert (runs["qkv, 4 rows"].seconds, runs["qkv, 4 rows"].others) == (1e-6, {})
    assert measured(monkeypatch, None)["qkv, 4 rows"].seconds == 7e-6


def test_without_the_library_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_choices, "loaded_library", lambda: FakeCublasLt(version=120803))
    assert cublas_choices.library() == "it is cuBLASLt 120803, and this was written for version 13"


def test_parts_that_are_worth_a_try_give_every_multiprocessor_a_program() -> None:
    tile = FewRowTile(64, 128, 4)
    assert few_rows.splits_of(tile, 4096, 4096) == [2, 3, 4, 5, 6, 8, 12, 16]
    assert few_rows.splits_of(tile, 24576, 4096) == [1, 2]
    assert few_rows.splits_of(tile, 64, 256) == [1]


def test_the_best_parts_of_each_tile_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(device: torch.device, works: Sequence[Work], repeats: int) -> float:
        for work in works:
            work()
        # `F.linear` has no parts.
        splits = next((work.args[2] for work in works if len(work.args) == 3), 0)  # type: ignore[attr-defined]
        return 1e-6 * (20 - splits) if repeats == few_rows.ROUGH else 1e-6 * (1 + splits)

    monkeypatch.setattr(few_rows, "seconds_each", seconds)
    monkeypatch.setattr(few_rows, "FEWEST", 4)
    tiles = (FewRowTile(64, 64, 3), FewRowTile(64, 48, 3))
    monkeypatch.setattr(few_rows, "TILES", tiles)
    problems: list[tuple[str, str]] = []
    runs = list(
        few_rows.measure(
            [("o", 128, 256)], torch.device("cpu"), torch.float16, CEILINGS, lambda *each: problems.append(each)
        )
    )
    assert [(run.name, run.seconds) for run in runs] == [("o, 1 rows", 1e-6), ("o, 32 rows", 1e-6)]
    assert runs[0].others == {"64 x 64, 3 stages, 4 warps, 4 parts": pytest.approx(5e-6)}
    (first, _) = problems
    assert first[0] == "o, 1 rows by 64 x 48, 3 stages, 4 warps"
    assert "are not of 64 x 48" in first[1]


def test_a_tile_with_wrong_numbers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FewRowProducts, "__call__", lambda self, x, weight, splits: x.new_zeros(len(x), len(weight)))
    monkeypatch.setattr(few_rows, "TILES", (FewRowTile(64, 64, 3),))
    problems: list[tuple[str, str]] = []
    runs = list(
        few_rows.measure(
            [("o", 128, 256)], torch.device("cpu"), torch.float16, CEILINGS, lambda *each: problems.append(each)
        )
    )
    assert runs[0].others == {}
    assert "its numbers are off by 1 of the largest with 1 parts" in problems[0][1]


@pytest.mark.nightly
def test_parts_on_request_run_over_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.card_report", "--rehearse", "--out", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--only", "products", "--only", "few rows"], cwd=ROOT, env=environ, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| cuBLAS's choices | a layer, 4 rows |" in summary
    assert "| few rows | gate_up, 32 rows |" in summary
    assert "proposals of cuBLASLt: this process has not loaded libcublasLt" in summary

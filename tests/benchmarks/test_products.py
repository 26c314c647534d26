"""The parts of a GPU's report that are about products: what is timed, what is left out, and what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import cublas_choices
from benchmarks.gpu.floor import Ceilings
from benchmarks.gpu.results import KernelRun
from dflash_kernels.cublas_lt import CublasLt
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


@pytest.mark.nightly
def test_parts_on_request_run_over_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.card_report", "--rehearse", "--out", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--only", "products"], cwd=ROOT, env=environ, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| cuBLAS's choices | a layer, 4 rows |" in summary
    assert "proposals of cuBLASLt: this process has not loaded libcublasLt" in summary

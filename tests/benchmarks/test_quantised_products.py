"""The timing of quantised products runs anywhere, and says where it measures nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import quantised_products


def test_it_runs_on_a_cpu_and_says_that_it_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert quantised_products.main(["--device", "cpu", "--tokens", "3", "--weights", "int4"]) == 0
    out = capsys.readouterr().out
    assert "measure nothing" in out
    assert "| tiny | int4 | 3 |" in out
    assert "| experts | int4 | 3 |" in out


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quantised_products.main([]) == 1
    assert "run it on a machine with one" in capsys.readouterr().out

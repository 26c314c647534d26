"""The benchmark of coarse heads measures both ways, and fails where they differ or there is nothing to measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import coarse_head
from dflash_backend.config import asset_path
from dflash_backend.models.decoder import LayeredTarget
from dflash_kernels import cpu_head

needs_codes = pytest.mark.skipif(not cpu_head.MAX_ROWS[torch.float32], reason="needs a C++ compiler and AVX2")
ARGUMENTS = ["--dtype", "float32", "--streams", "1", "2", "--rounds", "2", "--max-tokens", "8"]
ARGUMENTS += ["--target", str(asset_path("demo", "pair", "target"))]


@needs_codes
@pytest.mark.parametrize("off_by", [0, 1])
def test_both_ways_are_measured_and_a_text_that_differs_fails(
    off_by: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_head, "LEAST_OUTPUTS", 1)
    likeliest = LayeredTarget.likeliest

    def changed(self: LayeredTarget, hidden: torch.Tensor, *sampling: torch.Tensor) -> Any:
        tokens = likeliest(self, hidden, *sampling)
        return None if tokens is None else (tokens + off_by) % 1536

    monkeypatch.setattr(LayeredTarget, "likeliest", changed)
    assert coarse_head.main(ARGUMENTS) == off_by
    said = capsys.readouterr().out
    assert said.count("\n|") == 3
    assert "the codes take 0.3 MB" in said
    assert ("texts are the same" in said) is not bool(off_by)


def test_a_target_without_codes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert coarse_head.main(ARGUMENTS) == 1
    assert "this target has no codes here" in capsys.readouterr().out

"""The benchmark of float32 that is kept as bfloat16 measures both ways, and fails where they differ."""

from __future__ import annotations

import pytest
import torch

from benchmarks import float_weights
from dflash_kernels.cpu_ops import FLOAT_HALVES, HAS_CPU_OPS, PackedWeight

pytestmark = pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")


@pytest.mark.parametrize("off_by", [0.0, 1.0])
def test_both_ways_are_measured_and_other_bits_fail(
    off_by: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    product = PackedWeight.product

    def changed(self: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(self, x, bias) + off_by * (self.described[0] == FLOAT_HALVES)

    monkeypatch.setattr(PackedWeight, "product", changed)
    threads = torch.get_num_threads()
    arguments = ["--rows", "2", "7", "--layers", "1", "--rounds", "2", "--threads", str(threads)]
    assert float_weights.main(arguments) == bool(off_by)
    assert capsys.readouterr().out.count("\n|") == 3

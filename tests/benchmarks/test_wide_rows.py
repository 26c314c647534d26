"""The comparison of wide with narrow rows, and its exit status."""

from __future__ import annotations

import time

import pytest

from benchmarks import wide_rows
from dflash_kernels.cpu_ops import HAS_CPU_OPS, PackedWeight


@pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")
@pytest.mark.parametrize(("slower", "status"), [(1.5, 0), (1.7, 1)])
def test_the_exit_status_says_whether_wide_rows_are_slower(
    slower: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    def product(self: PackedWeight, x: object) -> None:
        now[0] += slower if self.shape[1] > self.shape[0] else 1.0

    monkeypatch.setattr(PackedWeight, "product", product)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert wide_rows.main(["--rows", "3", "--rounds", "2", "--hidden", "32", "--inner", "96"]) == status
    assert f"| Q4_0 | 3 | 1000.00 | {1000 * slower:.2f} | {slower:.2f} |" in capsys.readouterr().out

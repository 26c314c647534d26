"""Asking a benchmark or a check for help does not start it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    f"{folder}.{path.stem}"
    for folder in ("benchmarks", "checks")
    for path in (ROOT / folder).glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_says_what_it_does_and_ends(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__", alter_sys=False)
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith("usage:")


def test_the_long_ones_are_here() -> None:
    assert {"checks.prefix", "checks.cancel_cost", "checks.lossless", "benchmarks.run"} <= set(PROGRAMS)

"""The runs of the promises at their full counts: what is kept of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checks import nightly


def test_a_run_goes_on_after_a_miss_and_lines_of_earlier_runs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With programs of Python's own in place of the checks."""
    commands = {"kept": (("platform",), "a promise"), "missed": (("calendar", "no-year"), "another")}
    monkeypatch.setattr(nightly, "COMMANDS", commands)
    for names, status in ((("missed", "kept"), 1), (("kept",), 0)):
        monkeypatch.setattr(sys, "argv", ["nightly", "--only", *names, "--out", str(tmp_path)])
        assert nightly.main() == status
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("# The promises at their full counts\n\n1 of 2 kept, of 2 that there are; ")
    assert "| a promise | `python -m platform` | kept | " in summary
    assert "| another | `python -m calendar no-year` | MISSED (exit " in summary
    assert (tmp_path / "kept.txt").read_text().strip()
    assert "year" in (tmp_path / "missed.txt").read_text()
    assert capsys.readouterr().out.count("kept ...") == 2

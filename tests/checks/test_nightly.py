"""The runs of the promises at their full counts: what is kept of them."""

from __future__ import annotations

import json
import sys
import time
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


def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    """Modules of these names, each a promise."""
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(nightly, "COMMANDS", {name: ((name,), f"of {name}") for name in sources})


def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> tuple[int, str]:
    """The exit status of a run of these, and the summary."""
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["nightly", "--only", *names, "--out", str(out)])
    return nightly.main(), (out / "summary.md").read_text()


def test_what_was_skipped_is_not_kept_and_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, does="print('done')", lacks=f"raise SystemExit({nightly.SKIPPED})")
    status, summary = runs(tmp_path, monkeypatch, "does", "lacks")
    assert status == 0
    assert "\n1 of 2 kept, 1 skipped, of 2 that there are; " in summary
    assert "| of lacks | `python -m lacks` | skipped | " in summary


@pytest.mark.parametrize(
    ("tests", "word"), [("1 skipped", "skipped"), ("2 passed, 1 skipped", "kept, tests skipped: 1")]
)
def test_tests_that_are_all_skipped_show_nothing(
    tests: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, pytest=f"print('..s\\n{tests} in 0.1s')")
    status, summary = runs(tmp_path, monkeypatch, "pytest")
    assert status == 0
    assert f"| of pytest | `python -m pytest` | {word} | " in summary


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "import subprocess, sys\nprint('begun', flush=True)\nsubprocess.run(['sleep', '60'])\n"
    programs(tmp_path, monkeypatch, hangs=wait, does="")
    monkeypatch.setattr(nightly, "LIMITS", {"hangs": 1.0})
    began = time.monotonic()
    status, summary = runs(tmp_path, monkeypatch, "hangs", "does")
    assert time.monotonic() - began < 30
    assert status == 1
    assert "| of hangs | `python -m hangs` | MISSED (ended after its limit) | " in summary
    assert "| of does | `python -m does` | kept | " in summary
    assert (tmp_path / "out" / "hangs.txt").read_text() == "begun\n"


def test_an_outcome_of_another_command_does_not_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, one="", two="", three="")
    assert runs(tmp_path, monkeypatch, "one", "two", "three")[0] == 0
    monkeypatch.setitem(nightly.COMMANDS, "one", (("one", "--more"), "of one"))
    monkeypatch.setattr(nightly, "ENVIRON", {"two": {"TEST_SCALE": "4"}})
    assert set(nightly.kept_outcomes(tmp_path / "out")) == {"three"}
    _, summary = runs(tmp_path, monkeypatch, "two")
    assert "\n2 of 2 kept, of 3 that there are; " in summary
    assert "| of two | `TEST_SCALE=4 python -m two` | kept | " in summary
    path = tmp_path / "out" / nightly.OUTCOMES
    older = [{name: value for name, value in one.items() if name != "command"} for one in json.loads(path.read_text())]
    path.write_text(json.dumps(older))
    assert nightly.kept_outcomes(tmp_path / "out") == {}

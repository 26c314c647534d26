"""The tiers of the tests: what `make test-fast` leaves out `make test` runs, and a skip is allowed or a failure."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.allowed_skips import ALLOWED, is_allowed
from tests.conftest import ONE_AT_A_TIME, SMOKE, SPLIT, refuse_skip
from tests.scale import scaled

ROOT = Path(__file__).parents[1]


def skipped(node_id: str, reason: str) -> pytest.TestReport:
    return pytest.TestReport(node_id, ("f.py", 1, "f"), {}, "skipped", ("f.py", 1, f"Skipped: {reason}"), "setup")


def config(strict: bool) -> Any:
    return SimpleNamespace(getoption=lambda name: strict)


def test_make_test_leaves_no_test_out() -> None:
    """Whatever is not in the fast tier, or in none, is then run by it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^PYTEST = (.*)$", makefile, re.MULTILINE)
    (at_once,) = re.findall(r"^test: setup style .*\n\t@\$\(MAKE\) .* -j 2 (.*)$", makefile, re.MULTILINE)
    assert at_once.split() == ["types", "pytest"]
    assert re.findall(r"^pytest:\n\t(.*)$", makefile, re.MULTILINE) == ["$(PYTEST)"]
    for options in (command, (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.pytest")[2]):
        assert not re.search(r" -[mk]\b|--deselect|--ignore", options)
    assert "--strict-skips" in command


@pytest.mark.parametrize(
    ("node_id", "reason", "allowed"),
    [
        ("tests/server/test_contract.py::test_x", "Triton is not installed", False),
        ("tests/test_real_weights.py::test_x", "DFLASH_REAL_WEIGHTS_TARGET is not set", True),
        ("tests/test_real_weights.py::test_x", "too slow", False),
        ("tests/gpu/test_engine.py::test_x", "needs an NVIDIA GPU", True),
        ("tests/kernels/test_compiles.py", "this build of Triton cannot compile for NVIDIA GPUs", False),
    ],
)
def test_a_skip_that_is_not_allowed_is_a_failure(node_id: str, reason: str, allowed: bool) -> None:
    assert is_allowed(node_id, reason) == allowed
    report = skipped(node_id, reason)
    refuse_skip(config(strict=True), report)
    assert report.failed != allowed
    assert allowed or reason in report.longreprtext


def test_without_strict_skips_every_skip_is_allowed() -> None:
    report = skipped("tests/server/test_contract.py::test_x", "Triton is not installed")
    refuse_skip(config(strict=False), report)
    assert report.skipped


def test_every_path_that_is_named_exists() -> None:
    for start in (*(start for start, _, _ in ALLOWED), *SPLIT, *ONE_AT_A_TIME, *SMOKE):
        assert (ROOT / start.removesuffix("::")).exists(), start


def test_a_scaled_number_is_never_below_what_shows_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.scale.SCALE", 0.1)
    assert [scaled(400, at_least=60), scaled(1000), scaled(3, at_least=5)] == [60, 100, 3]
    monkeypatch.setattr("tests.scale.SCALE", 2.0)
    assert scaled(400, at_least=60) == 800

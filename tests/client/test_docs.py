"""Pages of docs/ say what the program does: settings, options, and the output that they quote."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import pytest

from dflash_backend.checkpoints import TARGET_ARCHITECTURES
from dflash_backend.evaluation.datasets import EMBEDDED_SETS
from dflash_backend.evaluation.hub_sets import HUB_SETS
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_cli.main import main, parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_settings_page_is_what_the_schema_says() -> None:
    writer = runpy.run_path(str(DOCS / "write_settings.py"))
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == writer["page"](), "run `make docs`"


def test_the_evaluation_page_names_every_option_figure_and_set() -> None:
    page = (DOCS / "evaluation.md").read_text(encoding="utf-8")
    commands = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    options = [option for action in commands.choices["eval"]._actions for option in action.option_strings]
    derived = [name for name in SpecDecodingStats().as_dict() if not name.endswith("_per_pos")]
    for name in [*options, *derived, *EMBEDDED_SETS, *HUB_SETS]:
        assert name in ("-h", "--help") or name in page, name


def test_the_checkpoints_page_names_every_architecture() -> None:
    page = (DOCS / "checkpoints.md").read_text(encoding="utf-8")
    assert all(f"`{architecture}`" in page for architecture in TARGET_ARCHITECTURES)


def test_the_checkpoints_page_quotes_inspect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "checkpoints.md").read_text(encoding="utf-8")
    quoted = page[page.index("drafter demo/pair/draft\n") :].partition("```")[0].splitlines()
    monkeypatch.chdir(ROOT)
    assert main(["inspect", "demo/pair/draft"]) == 0
    printed = capsys.readouterr().out.splitlines()
    # Which backends there are, and what for, depends on the machine.
    expected = [line for line in quoted if line != "  ..." and not line.startswith("  backend ")]
    assert len(expected) > 10
    assert [line for line in printed if line in expected] == expected

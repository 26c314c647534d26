"""Tables, JSON and plot say the same, also where there was no draft at all."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.evaluation import Answer, Evaluation, EvaluationError, Question
from dflash_backend.evaluation.report import as_dict, markdown_table, prepare, tables, title, write
from dflash_backend.evaluation.run import QuestionResult
from dflash_backend.spec_stats import SpecDecodingStats

PNG = b"\x89PNG\r\n\x1a\n"


def result(dataset: str, category: str, counts: SpecDecodingStats, answer: str | None = None) -> QuestionResult:
    return QuestionResult(Question("q", dataset, category, prompt="x", answer=answer), (Answer("4", 3, counts),))


TWO_SETS = Evaluation(
    (
        result("own", "own/a", SpecDecodingStats(2, 6, 3, [2, 1, 0]), "4"),
        result("own", "own/b", SpecDecodingStats(1, 3, 3, [1, 1, 1]), "5"),
        result("math", "math", SpecDecodingStats(1, 1, 0, [0])),
    ),
    seconds=1.5,
)
NO_DRAFTS = Evaluation((result("own", "own", SpecDecodingStats()),), seconds=0.5)


def cells(text: str) -> dict[str, list[list[str]]]:
    """The rows of all Markdown tables by their first cell."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| -"):
            first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
            rows.setdefault(first, []).append(rest)
    return rows


def test_table_and_json_agree_for_every_group() -> None:
    rows, data = cells(tables(TWO_SETS, {})), as_dict(TWO_SETS, {})
    assert list(rows)[1:6] == ["overall", "own", "math", "own/a", "own/b"]
    groups = {"overall": data["overall"], **data["datasets"], **data["categories"]}
    header = rows["set"][0]
    for name, (figures, counts, rates) in ((name, rows[name]) for name in groups):
        shown = dict(zip([*header, *rows["set"][1]], [*figures, *counts], strict=True))
        group = groups[name]
        for count in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert shown[count] == str(group[count])
        for figure in ("acceptance_length", "acceptance_rate"):
            assert shown[figure] == f"{group[figure]:.3f}"
        assert shown["mean_length"] == f"{group['mean_acceptance_length']:.3f}"
        assert [rate for rate in rates if rate != "-"] == [f"{rate:.3f}" for rate in group["per_position_rates"]]
    assert dict(zip(header, rows["own"][0], strict=True))["accuracy"] == "1 of 2 (50%)"
    assert data["datasets"]["math"]["accuracy"] is None
    assert data["overall"]["mean_acceptance_length"] == (2.5 + 4 + 1) / 3
    assert data["overall"]["accepted_histogram"] == [1, 1, 1, 1]
    assert "steps by accepted drafts: 0: 25%, 1: 25%, 2: 25%, 3: 25%" in tables(TWO_SETS, {})


def test_without_drafts_nothing_is_divided_by_zero(tmp_path: Path) -> None:
    text = tables(NO_DRAFTS, {})
    assert "no rates by position" in text
    assert as_dict(NO_DRAFTS, {})["overall"]["per_position_rates"] == []
    write(tmp_path, NO_DRAFTS, {})
    assert (tmp_path / "eval.png").read_bytes().startswith(PNG)


def test_the_files_hold_what_is_printed(tmp_path: Path) -> None:
    about = {"engine": "a | b", "limit": None, "max_tokens": [256]}
    prepare(tmp_path / "new" / "folder")
    write(tmp_path / "new" / "folder", TWO_SETS, about)
    folder = tmp_path / "new" / "folder"
    assert json.loads((folder / "eval.json").read_text()) == as_dict(TWO_SETS, about)
    assert tables(TWO_SETS, about) in (folder / "eval.md").read_text()
    assert (folder / "eval.png").read_bytes().startswith(PNG)


def test_tables_fit_a_terminal_of_100_columns() -> None:
    counts = SpecDecodingStats(1_234, 12_345, 6_789, list(range(15)))
    found = Evaluation(tuple(result("mt-bench", "mt-bench/humanities", counts, "4") for _ in range(200)), seconds=1.5)
    text = tables(found, {"engine": "a word " * 40 + "/a/path/of/its/own"})
    assert max(map(len, text.splitlines())) <= 100
    rates = cells(text)["mt-bench/humanities"][2:]
    assert [len(row) for row in rates] == [8, 7]


def test_an_interrupted_evaluation_says_so() -> None:
    partial = Evaluation(TWO_SETS.results, seconds=1.5, num_left_out=7)
    assert "Interrupted: 3 of 10 questions were answered." in tables(partial, {})
    assert as_dict(partial, {})["num_left_out"] == 7
    assert "Interrupted" not in tables(TWO_SETS, {})
    failed = replace(partial, failure="q-3: no server")
    assert "Failed (q-3: no server): 3 of 10 questions were answered." in tables(failed, {})
    assert as_dict(failed, {})["failure"] == "q-3: no server"
    assert "failure" not in as_dict(partial, {})


def test_the_picture_says_what_was_run() -> None:
    about = {"engine": "target t, drafter d", "datasets": ["own", "math"], "temperature": 0.0}
    assert title(TWO_SETS, about).splitlines() == [
        "Acceptance by position: 3 prompts of own, math, greedy",
        "target t, drafter d",
    ]
    assert "temperature 0.5\nmodel m at h:1" in title(
        TWO_SETS, {"server": "h:1", "model": "m", "datasets": [], "temperature": 0.5}
    )


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EvaluationError, match="cannot be made"):
        prepare(tmp_path / "file" / "folder")


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By trying: who may write, and whether there is space, is not seen otherwise."""
    prepare(tmp_path)
    assert not list(tmp_path.iterdir())

    def full(**_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_backend.evaluation.report.tempfile.TemporaryFile", full)
    with pytest.raises(EvaluationError, match="cannot be written to: No space left on device; give another --out"):
        prepare(tmp_path)


def test_a_cell_cannot_break_the_table() -> None:
    assert markdown_table([("a", "b"), ("x|y", "1\n2")]) == "| a    |   b |\n| ---- | --- |\n| x\\|y | 1 2 |"

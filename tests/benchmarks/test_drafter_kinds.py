"""The comparison of drafters, run small."""

import pytest

from benchmarks import drafter_kinds
from dflash_backend.config import asset_path


def test_it_compares_drafters_and_notices_other_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = asset_path("demo", "pair", "draft")
    arguments = [f"one={draft}", f"other={draft}", "--count", "3", "--streams", "2", "--rounds", "1", "--max-tokens"]
    assert drafter_kinds.main([*arguments, "24"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| one", "| other"))]
    assert [row[0] for row in rows] == ["| one", "| other"] * 2
    assert rows[0][1:] == rows[1][1:]
    assert float(rows[0][2]) > 8
    run, turns = drafter_kinds.run_engine, iter(range(100))

    def other_answers(*inputs: object) -> object:
        found = run(*inputs)  # type: ignore[arg-type]
        found.outputs[0] = [next(turns)]
        return found

    monkeypatch.setattr(drafter_kinds, "run_engine", other_answers)
    assert drafter_kinds.main([*arguments, "4"]) == 1
    assert "4 prompts with answers that differ" in capsys.readouterr().out


def test_a_drafter_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drafter_kinds.main(["some/folder"])
    assert "'some/folder' is not NAME=DIR" in capsys.readouterr().err

"""What the GPU benchmark writes: tables that say what was measured, what was promised, and what is synthetic."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import report, run
from benchmarks.gpu.floor import Ceilings
from benchmarks.gpu.results import (
    DFLASH,
    EQUAL,
    NO_DRAFT,
    PLAIN,
    RAGGED,
    AttentionRun,
    Cycle,
    PromptAttention,
    Recorder,
    Results,
    Skipped,
    StartRun,
    StepRun,
)
from benchmarks.gpu.run import Part

FLOOR = {"verify": 4e-3, "accept": 1e-5, "inject": 1e-4, "draft": 1e-3}
PHASES = {"verify": 4.4e-3, "accept": 2e-5, "inject": 1.3e-4, "draft": 1.2e-3}
CYCLE = Cycle("Qwen3-8B", DFLASH, 1, 1030.0, 1024, 15, 50, 6e-3, 6.5 / 6e-3, PHASES, FLOOR)
PLAIN_DECODE = Cycle("Qwen3-8B", NO_DRAFT, 1, 1030.0, 1024, 0, 50, 5e-3, 200.0, {"verify": 4.8e-3}, {"verify": 4e-3})


def results(*cycles: Cycle) -> Results:
    attention = [AttentionRun("Qwen3-8B", "triton", "verify", 1, 32768, 16, 4e-5, 3.3e12)]
    return Results({"acceptance": "synthetic acceptance: so and so"}, {"name": "GPU"}, Ceilings(4.3e12, 7.8e14),
                   list(cycles), attention, [])  # fmt: skip


def test_gap_is_what_no_phase_accounts_for() -> None:
    assert CYCLE.gap_s == pytest.approx(6e-3 - sum(PHASES.values()))
    assert CYCLE.idle_share == pytest.approx(CYCLE.gap_s / 6e-3)
    assert replace(CYCLE, phases={}).gap_s is None
    assert CYCLE.over_floor("inject") == pytest.approx(1.3)


def test_a_gpu_of_less_bandwidth_owes_fewer_tokens() -> None:
    assert report.tokens_bound(replace(results(), ceilings=Ceilings(4.28e12, 8e14))) == 1150
    assert report.tokens_bound(replace(results(), ceilings=Ceilings(2.996e12, 8e14))) == 805
    assert report.tokens_bound(replace(results(), ceilings=None)) == 1150


def test_promises_are_checked_on_both_sides_and_not_without_a_measurement() -> None:
    verdicts = {target.name: target.verdict for target in report.targets(results(CYCLE))}
    assert verdicts["verify over its floor, batch 1"] == "met"
    assert verdicts["inject over its floor, batch 1"] == "met"
    assert verdicts["host gap's share of a cycle, batch 1"] == "met"
    assert verdicts["tokens/s of one stream, synthetic acceptance"] == "missed"  # 1,083 of 1,150
    assert verdicts["whole cycle over its floor, batch 1"] == "met"
    assert verdicts["attention at 32k over copy bandwidth"] == "met"
    assert verdicts["host gap's share of a cycle, batch 32"] == "not measured"
    slow = replace(CYCLE, phases=PHASES | {"verify": 4.7e-3}, cycle_s=7e-3)
    verdicts = {target.name: target.verdict for target in report.targets(results(slow))}
    assert verdicts["verify over its floor, batch 1"] == "missed"
    assert verdicts["whole cycle over its floor, batch 1"] == "missed"


def test_traffic_is_held_to_equal_lengths_and_prompts_to_flash_attention() -> None:
    measured = results(replace(CYCLE, system=RAGGED, cycle_s=6e-3), replace(CYCLE, system=EQUAL, cycle_s=5.5e-3))
    rates = {"triton": 5e14, "torch": 9e14, "FlashAttention-3": 6e14, "FlashAttention-2": 4e14}
    for tokens, factor in ((2048, 1.0), (8192, 0.9)):
        for system, rate in rates.items():
            own = rate * factor if system == "triton" else rate
            measured.prompts.append(PromptAttention("Qwen3-8B", system, tokens, 1e-3, own))
    found = {target.name: target for target in report.targets(measured)}
    assert found["one row of 32k over equal lengths"].measured == pytest.approx(6 / 5.5)
    assert found["prompt's attention over FlashAttention's rate"].measured == pytest.approx(0.75)
    assert found["prompt's attention over FlashAttention's rate"].verdict == "missed"
    empty = {target.name: target.verdict for target in report.targets(results(CYCLE))}
    assert empty["one row of 32k over equal lengths"] == "not measured"
    assert empty["prompt's attention over FlashAttention's rate"] == "not measured"
    assert "| Qwen3-8B | FlashAttention-3 | 8192 | 0 | 1000.0 | 600.0 | 77% | - |" in report.markdown(measured)


def test_steps_with_prompts_stand_beside_their_floor() -> None:
    measured = results(CYCLE)
    measured.steps.append(StepRun("Qwen3-8B", "mixed", 8, 256, 9e-3, 6e-3, 8e-3, 5e-3))
    measured.starts.append(StartRun("Qwen3-8B", 41.5, 10, cached=False))
    text = report.markdown(measured)
    assert "| Qwen3-8B | mixed | 8 | 256 | 9.000 (1.80x) | 6.000 | 8.000 | 5.000 |" in text
    assert "41.5 s from loaded weights to the first request, with every kernel compiled anew, 10 padded steps" in text


def test_every_figure_with_drafts_is_marked_synthetic() -> None:
    other = Cycle("Qwen3-8B", PLAIN, 1, 1024, 1024, 0, 20, 0.02, 50.0)
    text = report.markdown(results(CYCLE, PLAIN_DECODE, other))
    rows = [line for line in text.splitlines() if line.startswith("| Qwen3-8B | DFlash")]
    assert rows
    assert all("synthetic acceptance" in row for row in rows)
    assert "synthetic" not in next(line for line in text.splitlines() if line.startswith("| Qwen3-8B | k = 0"))
    assert "DFlash (synthetic acceptance)" in text
    data = report.as_json(results(CYCLE, PLAIN_DECODE))
    assert ["synthetic acceptance" in cycle["acceptance"] for cycle in data["cycles"]] == [True, False]


def test_tables_json_and_a_plot_are_written_and_say_what_is_missing(tmp_path: Path) -> None:
    measured = results(CYCLE)
    measured.skipped.append(Skipped("references of Qwen3-8B", "transformers is not installed"))
    text = report.write(tmp_path, measured)
    assert "4.400 (1.10x)" in text
    assert "references of Qwen3-8B: transformers is not installed" in text
    assert json.loads((tmp_path / "gpu.json").read_text())["ceilings"]["copy_bandwidth"] == 4.3e12
    assert (tmp_path / "cycle-qwen3-8b.png").stat().st_size > 5000


def test_records_come_back_and_a_line_that_was_truncated_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records"
    recorder = Recorder(path)
    for record in (Ceilings(1.0, 2.0), CYCLE, Skipped("this", "that")):
        recorder.write(record)
    path.write_text(path.read_text() + '{"kind": "cycle", "sha')
    read = run.read_results(path, {})
    assert read.cycles == [CYCLE]
    assert read.ceilings == Ceilings(1.0, 2.0)
    assert read.skipped == [Skipped("this", "that")]


def test_a_part_that_fails_or_does_not_end_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\nimport sys, time\nname = sys.argv[3]\n"
        'open(sys.argv[sys.argv.index("--records") + 1], "a").write(\'{"kind": "skipped", "what": "%s", '
        '"reason": "wrote"}\\n\' % name)\n'
        'time.sleep(60 if name == "slow" else 0)\nsys.exit("it broke" if name == "bad" else 0)\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(fake))
    monkeypatch.setattr(run, "GRACE_S", 0.3)
    records = tmp_path / "records"
    records.touch()
    names = ("slow", "bad", "good", "late")
    run.run_parts([Part(name, "tiny", 1.0 if name != "late" else 0.0) for name in names], records, [], 60.0)
    skipped = {(entry.what, entry.reason) for entry in run.read_results(records, {}).skipped}
    assert {("slow", "wrote"), ("bad", "wrote"), ("good", "wrote")} <= skipped
    assert ("bad of tiny", "failed with status 1: it broke") in skipped
    assert any(what == "slow of tiny" and "ended after 1 s" in reason for what, reason in skipped)
    assert ("late of tiny", "the budget of 60 s was used up") in skipped
    assert not any(what == "good of tiny" for what, _ in skipped)


def test_parts_fit_the_budget_and_the_first_shape_comes_first() -> None:
    parts = run.parts(["a", "b", "c"])
    assert [part.shape for part in parts[:4]] == ["a", "a", "a", "a"]
    assert sum(part.seconds for part in parts) + run.GRACE_S <= run.BUDGET_S
    assert run.BUDGET_S <= 480

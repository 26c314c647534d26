"""`make gpu-report`: shares of the time, parts that fail or hang, the files that it leaves, what its summary says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import card_report, card_summary, card_texts, prompts
from benchmarks.gpu.build import attention_backend
from benchmarks.gpu.card_report import Part, Plan, Report
from benchmarks.gpu.card_tests import TEST_OPTIONS
from benchmarks.gpu.floor import Ceilings
from benchmarks.gpu.profile import summarise
from benchmarks.gpu.quantised_products import FP8_BOTH as FP8_BOTH_PRODUCTS
from benchmarks.gpu.results import (
    DFLASH,
    FP8_BOTH,
    INVARIANT,
    NO_DRAFT,
    SAMPLED,
    CheckRun,
    Cycle,
    Fact,
    KernelRun,
    PartRun,
    ProductRun,
    Recorder,
    Results,
    Skipped,
    StartRun,
    StepRun,
    TextRun,
)
from benchmarks.gpu.shapes import tiny
from dflash_backend.core.admission import RequestError
from tests.gpu import outcomes

SHAPE = "Qwen3-8B"
MOST_FILES = 8


class Scripts(Plan):
    """Runs a script in place of each part, by its name."""

    def command(self, part: Part, seconds: float) -> list[str]:
        scripts = {
            "fails": "import sys; print('before'); print('what went wrong'); sys.exit(3)",
            "hangs": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on'); time.sleep(25)",
            "says": f"""if True:
                import json
                with open({str(self.records)!r}, 'a') as file:
                    print(json.dumps({{'kind': 'fact', 'name': 'share', 'value': '{seconds:.0f}'}}), file=file)""",
        }
        return [sys.executable, "-c", scripts[part.name]]


def run(directory: Path, parts: list[Part], seconds: float = 60.0) -> Results:
    """The records of a run of these parts, with the summary written."""
    records = directory / card_report.RECORDS
    Recorder(records).write_raw("device", {"name": "a card"})
    report = Report(Scripts((), records, dict(os.environ)), directory, {"shape": SHAPE}, seconds)
    report.run(parts)
    report.write()
    results = Results({"shape": SHAPE})
    results.take(records.read_text())
    return results


def test_a_part_that_fails_and_one_that_hangs_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRACE_S", "KILL_S", "LEAST_S"):
        monkeypatch.setattr(card_report, name, 0.2)
    started = time.monotonic()
    parts = [Part("fails", 20.0, beside=True), Part("hangs", 0.4, beside=True), Part("says", 30.0)]
    results = run(tmp_path, parts)
    assert time.monotonic() - started < 20
    ended = {part.part: part.reason for part in results.parts}
    assert sorted(ended) == ["fails", "hangs", "says"]
    assert ended["fails"] == "failed with status 3: before / what went wrong"
    assert "its share of the time" in str(ended["hangs"])
    assert ended["says"] is None
    assert results.facts == [Fact("share", "30")]
    summary = (tmp_path / card_report.SUMMARY).read_text()
    assert "| 0 | failed with status 3: before / what went wrong |" in summary
    assert "- share: 30" in summary
    assert "=== fails\nbefore\nwhat went wrong\n" in (tmp_path / card_report.LOG).read_text()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["log.txt", "records.jsonl", "summary.md"]
    assert len(files) <= MOST_FILES


def test_parts_for_which_no_time_is_left_are_recorded_and_not_started(tmp_path: Path) -> None:
    results = run(tmp_path, [Part("says", 30.0), Part("fails", 30.0)], seconds=10.0)
    assert [(part.part, part.reason) for part in results.parts] == [
        ("says", "no time was left"),
        ("fails", "no time was left"),
    ]
    assert results.facts == []


def test_a_part_gets_its_share_or_what_is_left_of_the_whole() -> None:
    kept = card_report.GRACE_S + card_report.KILL_S
    assert card_report.share(Part("a", 40.0), 470.0) == 40.0
    assert card_report.share(Part("a", 40.0), 30.0 + kept) == 30.0
    assert card_report.share(Part("a", 40.0), 4.0 + kept) is None
    assert card_report.share(Part("a", 40.0), 470.0, times=5.0) == 200.0


def test_texts_and_tests_run_at_the_same_time_and_what_is_timed_alone() -> None:
    together = [[part.name for part in group] for group in card_report.groups(card_report.PARTS)]
    assert together[0] == ["environment"]
    assert together[1] == [*(f"texts {name}" for name in card_texts.GROUPS), "tests"]
    assert all(len(group) == 1 for group in together[2:])
    # The whole fits with what parts were seen to take; should each take its share, the last ones have none.
    assert card_report.SECONDS <= 480
    in_a_row = sum(max(part.seconds for part in group) for group in card_report.groups(card_report.chosen(None)))
    assert in_a_row < 1.5 * card_report.SECONDS


def test_every_way_of_running_is_in_one_group_and_has_what_it_is_compared_with() -> None:
    grouped = [way for group in card_texts.GROUPS.values() for way in group]
    assert sorted(grouped) == sorted(card_texts.WAYS)
    for way in card_texts.WAYS.values():
        assert way.against is None or way.against in card_texts.WAYS
    compared = {name for name, way in card_texts.WAYS.items() if way.against}
    assert {"graphs, overlap", "neither", "n-grams", "fixed k", "batch_invariant", "FP8 KV", "FP8 both"} <= compared


def test_requests_that_fail_leave_the_others_of_their_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Answers short requests and no others."""

        def __init__(self, **settings: object) -> None:
            if settings["dtype"] == "bfloat16":
                raise RuntimeError("CUDA error: out of\n memory")
            assert settings["device"] == "cpu"

        def generate(self, prompts: list[str], params: list[dict[str, object]]) -> list[object]:
            if prompts[0] != card_texts.SHORT_PROMPT:
                raise RequestError("INVALID_ARGUMENT", "no grammar")
            return [SimpleNamespace(token_ids=(1, 2))] * len(prompts)

    monkeypatch.setattr(card_texts, "LLM", Engine)
    recorder = Recorder(tmp_path / "records")
    for way in ("CPU, drafts", "bf16"):
        card_texts.run_way(way, torch.device("cuda"), "cpu", recorder)
    results = Results({})
    results.take((tmp_path / "records").read_text())
    assert [(run.way, run.requests) for run in results.texts] == [("CPU, drafts", "short")]
    assert results.texts[0].answers == [[1, 2]] * len(card_texts.SHORT_TOKENS)
    reasons = {one.what: one.reason for one in results.skipped}
    assert reasons["text, bf16"] == "RuntimeError: CUDA error: out of memory"
    assert reasons["text, CPU, drafts, special"] == "RequestError: no grammar"
    assert len(card_report.problems(results)) == len(reasons) == 6


def test_text_that_parts_says_where_and_only_exact_ways_are_wrong() -> None:
    texts = [
        TextRun("CPU, k = 0", "greedy", [[1, 2, 3], [4, 5]]),
        TextRun("graphs", "greedy", [[1, 2, 3], [4, 6]]),
        TextRun("neither", "greedy", [[1, 2, 3], [4, 5]]),
        TextRun("bf16, k = 0", "greedy", [[1, 2, 3], [4, 5]]),
        TextRun("bf16", "greedy", [[9, 2, 3], [4, 5, 6]]),
        TextRun("FP8 both", "greedy", [[1]]),
        TextRun("graphs", card_texts.LONG, [[7, 8]]),
        TextRun("graphs", card_texts.LONG_AGAIN, [[7, 9]]),
    ]
    found = {(one.way, one.against, one.requests): one for one in card_texts.compare(texts)}
    assert len(found) == 4, "what has no counterpart is not compared"
    assert found["neither", "CPU, k = 0", "greedy"].verdict == "equal"
    wrong = found["graphs", "CPU, k = 0", "greedy"]
    assert (wrong.equal, wrong.count, wrong.parts_at, wrong.verdict) == (1, 2, (1,), "WRONG")
    parts = found["bf16", "bf16, k = 0", "greedy"]
    assert (parts.equal, parts.parts_at, parts.verdict) == (0, (0, 2), "parts")
    assert found["graphs", "graphs", card_texts.LONG_AGAIN].verdict == "WRONG"
    results = Results({"shape": SHAPE}, texts=texts)
    text = card_summary.markdown(results)
    assert "Text, 3 ways: 1 equal, 1 parts, 2 WRONG." in text
    assert "| graphs | CPU, k = 0 | greedy | 1 of 2 | 1 | WRONG |" in text
    assert "Equal in all: neither." in text


def cycle(system: str, batch: int, ms: float, floor_ms: float) -> Cycle:
    return Cycle(
        SHAPE, system, batch, 1030.0, 1024, 15, 48, ms / 1e3, 1.0, {"verify": 1e-3}, {"verify": floor_ms / 1e3}
    )


def test_the_first_table_holds_each_figure_to_its_floor_and_to_what_is_asked_for() -> None:
    results = Results(
        {"shape": SHAPE},
        {"name": "a card"},
        Ceilings(4.28e12, 7.98e14),
        cycles=[
            cycle(DFLASH, 1, 6.31, 4.39),
            cycle(DFLASH, 32, 16.0, 12.4),
            cycle(NO_DRAFT, 1, 4.3, 3.57),
            cycle(SAMPLED, 32, 16.4, 12.4),
            cycle(INVARIANT, 1, 8.81, 4.39),
            cycle(FP8_BOTH, 1, 4.5, 3.0),
        ],
        steps=[StepRun(SHAPE, "mixed", 8, 256, 15.7e-3, 0.01, 0.01, 5.2e-3)],
        kernel_runs=[KernelRun("decode attention", "8 rows of 2048", 38e-6, 16e-6, {"torch": 30.9e-6})],
        products=[
            ProductRun(name, FP8_BOTH_PRODUCTS, 16, 1e-5, 1e-5 * speedup, 1e12)
            for name, speedup in (("qkv", 1.4), ("down", 0.9), ("experts", 0.1))
        ],
        starts=[StartRun(SHAPE, 8.0, 10, True), StartRun(SHAPE, 38.0, 256, True, 50.0, 1 << 30)],
        parts=[PartRun("texts bf16", 80.0, 7, None), PartRun("start", 60.0, 2, "ended")],
        checks=[
            CheckRun("t::a", "passed", 0.1), CheckRun("t::b", "failed", 0.1, "why"),
            CheckRun("all", "ended with status 1", 0.0),
        ],
        skipped=[Skipped("profile", "the profiler saw no kernels")],
    )  # fmt: skip
    found = {target.name: (target.measured, target.verdict) for target, _ in card_summary.goals(results)}

    def check(name: str, measured: float | None, verdict: str) -> None:
        assert found[name][1] == verdict, name
        assert found[name][0] == (None if measured is None else pytest.approx(measured, rel=1e-3)), name

    check("DFlash, 1 rows, over floor", 6.31 / 4.39, "missed")
    check("DFlash, 32 rows, over floor", 16.0 / 12.4, "met")
    check("DFlash, 8 rows, over floor", None, "not measured")
    check("k = 0, 1 rows, over floor", 4.3 / 3.57, "met")
    check("sampled over greedy, 32 rows", 16.4 / 16.0, "met")
    check("batch_invariant over normal, 1 rows", 8.81 / 6.31, "missed")
    check("FP8 with FP8 activations over bf16, 1 rows", 6.31 / 4.5, "met")
    check("mixed of 256 tokens, over floor", 15.7 / 5.2, "missed")
    check("attention, 8 rows of 2048, over floor", 38 / 16, "missed")
    check(f"{FP8_BOTH_PRODUCTS}: slowest product, 16 rows, over bf16", 0.9, "missed")
    check("start: kernels and graphs, s", 38.0, "missed")
    check("second start of a process, s", None, "not measured")
    text = card_summary.markdown(results)
    first = text[:1500]
    assert "Tests: 1 passed, 1 failed, 0 skipped; ended with status 1." in first
    assert "Kernels compiled here: 9." in first
    assert "Text: not compared; 0 kinds of requests were answered." in first
    assert "| DFlash, 1 rows, over floor | 1.44 | 6.31 / 4.39 ms | at most 1.25 | missed |" in text
    assert "| attention, 8 rows of 2048, over floor | 2.38 | 38.0 / 16.0 us | at most 1.75 | missed |" in text
    assert "- t::b: why" in text
    assert "- profile: the profiler saw no kernels" in text
    assert "| start | 60 | 2 | ended |" in text
    results.starts.append(StartRun(SHAPE, 15.0, 256, True, 19.0, 1 << 30))
    found = {target.name: (target.measured, target.verdict) for target, _ in card_summary.goals(results)}
    check("second start of a process, s", 19.0, "met")


def test_of_nothing_there_is_no_figure() -> None:
    text = card_summary.markdown(Results({"shape": SHAPE}))
    rows = [line for line in text.splitlines() if "| at " in line]
    assert len(rows) > 30
    assert all("| - | - |" in row and row.endswith("| not measured |") for row in rows)


def test_a_rehearsal_is_held_to_nothing() -> None:
    texts = [TextRun("CPU, k = 0", "greedy", [[1]]), TextRun("graphs", "greedy", [[0]])]
    starts = [StartRun(SHAPE, 1.0, 256, True, 2.0, 0)]
    text = card_summary.markdown(Results({"shape": SHAPE, "rehearsal": True}, texts=texts, starts=starts))
    assert "no figure here means anything" in text[:300]
    assert "Text: not compared; 2 kinds of requests were answered." in text
    assert not any(word in text for word in ("WRONG", " met |", "asked for"))


def test_gaps_of_a_step_are_what_no_kernel_covers() -> None:
    kernels = [(0, 1000, "a"), (500, 1500, "b"), (2500, 3500, "a"), (3600, 3700, "c")]
    found = summarise("two steps", kernels, 1e-3, 2)
    assert found.kernels == 2
    assert found.busy_s == pytest.approx((1500 + 1000 + 100) / 2e9)
    assert found.gaps_s == pytest.approx((1000 + 100) / 2e9)
    assert found.median_gap_s == pytest.approx(550e-9)
    assert found.longest[0] == ("a", 1.0, pytest.approx(1e-6))


def test_what_is_printed_ends_with_a_whole_line_and_says_where_the_rest_is() -> None:
    text = "".join(f"line {number}\n" for number in range(3000))
    shown = card_report.printed(text, Path("summary.md"))
    assert len(shown) <= card_report.PRINTED
    lines = shown.splitlines()
    assert lines[-1] == "(more in summary.md)"
    assert text.startswith("\n".join(lines[:-1]) + "\n")
    assert card_report.printed("short\n", Path("summary.md")) == "short\n"


def test_a_gpu_without_cudnns_attention_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "scale", lambda device: "cuda")
    monkeypatch.setitem(prompts.CHUNKS, "cuda", ((16, 0),))
    monkeypatch.setattr(prompts, "PACKAGES", {})
    shape, device = tiny(), torch.device("cpu")
    backend = attention_backend(shape, device, torch.float32)
    found = [run.system for run in prompts.measure(shape, [prompts.Way(backend)], torch.float32, device)]
    assert found == [backend.name, "torch"]


def test_files_go_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUT", raising=False)
    by_card = card_report.out_directory(None, "NVIDIA H100 80GB HBM3")
    assert by_card.relative_to(card_report.ROOT) == Path("benchmarks/results/gpu/nvidia-h100-80gb-hbm3")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert card_report.out_directory(None, "x") == tmp_path
    assert card_report.out_directory(Path("here"), "x") == Path("here")


def test_a_name_that_is_no_parts_is_refused() -> None:
    assert [part.name for part in card_report.chosen(["quant"])] == ["quantised cycles", "quantised"]
    on_request = ["products", "measured cycles", "candidates"]
    assert [part.name for part in card_report.PARTS if part not in card_report.chosen(None)] == on_request
    assert [part.name for part in card_report.chosen(["products"])] == ["products"]
    with pytest.raises(ValueError, match="there is no part 'text5'; parts are environment, "):
        card_report.chosen(["text5"])


def test_outcomes_of_tests_are_recorded_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): raise ValueError('one is not two')\n"
        "def test_left(): pytest.skip('no card')\n"
    )
    records = tmp_path / "records.jsonl"
    (tmp_path / "test_packages.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.setenv(outcomes.VARIABLE, str(records))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    options = ["-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "no:xdist"]
    assert pytest.main([*options, *TEST_OPTIONS, str(tmp_path)], plugins=[outcomes]) == 1
    results = Results({})
    results.take(records.read_text())
    found = {run.test.rpartition("::")[2]: run.outcome for run in results.checks}
    expected = {"test_right": "passed", "test_wrong": "failed", "test_left": "skipped", "all": "ended with status 1"}
    expected["test_packages.py"] = "failed"
    assert found == expected
    reasons = {run.test.rpartition("::")[2]: run.reason for run in results.checks}
    assert "one is not two" in reasons["test_wrong"]
    assert "a_package_that_is_not_here" in reasons["test_packages.py"]

"""What a run leaves on disk, made from samples and observations that were recorded."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from load_tests.observation import Observation
from load_tests.report import generator_note, lines, machine_note, summarise, write_report
from load_tests.result import percentile
from load_tests.samples import WrongAnswer
from load_tests.timeline import in_windows, percentiles, server_seconds, server_windows
from tests.load_tests.runs import finished, observation, sample


def test_percentiles_are_those_of_the_measured_requests() -> None:
    run = finished(samples=[sample(1.0, first_s=9.0, measured=False), *(sample(10.0 + at) for at in range(20))])
    latencies = summarise(run)["latencies_s"]
    assert latencies["load / traffic: first token"]["max"] == pytest.approx(0.1)
    assert latencies["load / traffic: whole answer"]["p50"] == pytest.approx(0.25)
    assert latencies["load / traffic: between responses"]["p99"] == pytest.approx(0.05)


def test_the_summary_says_what_was_measured() -> None:
    summary = summarise(finished())
    assert summary["requests"] == {"right": 1000, "wrong": 0, "cancelled": 0, "refused": 0, "error": 0}
    assert summary["tokens_per_s"] == pytest.approx(1000 * 20 / 40)
    # Six of the thousand end after the load.
    assert summary["right_answers_per_s"] == pytest.approx(994 / 40)
    assert summary["acceptance_length"] == pytest.approx(5)
    assert summary["hit_rate"] == pytest.approx(0.9)
    assert summary["ideal_hit_rate"] == pytest.approx(0.905)
    assert summary["load_generator"]["cores"] == pytest.approx(0.1)


def test_throughput_is_of_what_came_while_the_load_lasted() -> None:
    """Users wait for what is in flight at the end; that takes time which is not the run's."""
    late = [sample(39.9, ended_s=40.0 + at) for at in range(20)]
    run = finished(samples=[*(sample(index * 0.04) for index in range(500)), *late])
    run.result.recorder.tokens_by_second[40] += 5000
    assert run.result.requests_per_s == pytest.approx(500 / 40)
    assert run.result.tokens_per_s == pytest.approx(520 * 20 / 40)
    short = finished(samples=[], duration_s=40.5)
    short.result.recorder.tokens_by_second.update({0: 80, 40: 1000})
    assert short.result.tokens_per_s == 2.0


def test_each_second_shows_what_happened_since_the_one_before() -> None:
    seconds = server_seconds([observation(0.0), observation(1.0), observation(3.0)])
    assert [(row.at_s, row.prompt_tokens_per_s, row.hit_rate, row.acceptance_length) for row in seconds] == [
        (1.0, 1000.0, 0.9, 5.0),
        (3.0, 1000.0, 0.9, 5.0),
    ]
    assert seconds[1].server_cores == pytest.approx(1.0)


def test_a_second_without_lookups_has_no_hit_rate() -> None:
    (row,) = server_seconds([observation(5.0), observation(6.0, metrics=observation(5.0).metrics)])
    assert (row.hit_rate, row.acceptance_length) == (None, None)


def test_shares_of_a_long_run_are_taken_over_longer_times() -> None:
    windows = server_windows([observation(float(at)) for at in range(1200)])
    assert {later.at_s - row.at_s for row, later in pairwise(windows)} == {10.0}
    assert {(row.hit_rate, row.acceptance_length) for row in windows} == {(0.9, 5.0)}
    assert len(server_windows([observation(float(at)) for at in range(40)])) == 39


def test_windows_hold_what_was_in_them() -> None:
    times, windows = in_windows([(2.0, 0.1), (2.9, 0.3), (7.95, 0.2), (40.0, 9.9)], 40.0)
    assert times == list(range(40))
    assert {at: window for at, window in zip(times, windows, strict=True) if window} == {2: [0.1, 0.3], 7: [0.2]}
    assert percentiles(windows, 0.5)[2] == pytest.approx(0.2)
    assert math.isnan(percentiles(windows, 0.5)[3])


def test_a_long_run_has_windows_of_several_seconds() -> None:
    times, windows = in_windows([(1195.0, 1.0)], 1200.0)
    assert (times[:2], len(times), windows[-1]) == ([0, 10], 120, [1.0])


def test_a_load_generator_that_is_busy_or_late_says_so() -> None:
    assert "was not the bottleneck" in generator_note(finished().result)
    busy = [observation(float(at), own_cpu_s=0.9 * at) for at in range(41)]
    assert "trust no latency" in generator_note(finished(observations=busy).result)
    late = finished()
    late.result.recorder.lag_by_second = {0: 0.5}
    assert "trust no latency" in generator_note(late.result)


def machine(others: float) -> list[Observation]:
    """The server uses one core, the load generator a tenth, and other programs `others` cores."""
    return [observation(float(at), machine_cpu_s=(1.1 + others) * at) for at in range(41)]


def test_a_machine_that_others_keep_busy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert machine_note(finished(observations=machine(0.2)).result) == ""
    assert "other programs used 2.5 of its 4 cores" in machine_note(finished(observations=machine(2.5)).result)
    assert machine_note(finished().result) == ""
    assert any("starved" in line for line in lines(finished(observations=machine(2.5))))


def test_the_picture_says_what_was_run_and_what_came_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    write_report(dataclasses.replace(finished("chat"), directory=tmp_path))
    (figure,) = drawn
    title = figure.get_suptitle()
    assert title.startswith("chat: PASS (4 users, 40 s, grpc, seed 0)")
    assert "max_num_seqs=32" in title
    right = {axis.get_ylabel() for axis in figure.axes}
    assert {"tokens/s", "answers/s", "requests", "% of the pool"} <= right


def test_every_file_of_a_run_is_written(tmp_path: Path) -> None:
    run = finished()
    wrong = WrongAnswer(1.0, "load", "q", "salt", "prompt", [1, 2], [1, 3], "ab", "ac", "stop", "stop")
    run.result.recorder.keep_wrong(wrong)
    write_report(dataclasses.replace(run, directory=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        "server.csv",
        "requests.csv",
        "wrong.jsonl",
        "summary.json",
        "summary.md",
        "run.png",
    }
    assert json.loads((tmp_path / "summary.json").read_text())["verdict"] == "FAIL"
    assert "| wrong answers | 1 | at most 0 | FAIL |" in (tmp_path / "summary.md").read_text()
    kept = json.loads((tmp_path / "wrong.jsonl").read_text())
    assert (kept["question"], kept["expected_token_ids"], kept["got_token_ids"]) == ("q", [1, 2], [1, 3])
    with (tmp_path / "requests.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == len(run.result.samples)


def test_the_last_line_is_the_verdict() -> None:
    run = finished()
    assert lines(run)[-1] == "verdict: FAIL"


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentile([], 0.5) is None
    assert finished(samples=[]).result.gaps("load", "traffic") == []
    assert finished().result.gaps("never", "traffic") == []

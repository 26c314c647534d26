"""The command line: what it lists, what it refuses, how it compares."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from load_tests import cli
from load_tests.result import RunResult
from load_tests.scenario import Comparison, Run, Scenario
from load_tests.scenarios import SCENARIOS
from load_tests.verdict import Bound
from load_tests.workload import Options
from tests.load_tests.runs import finished, sample


def test_list_names_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in SCENARIOS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["burst", "--set", "max_num_seq=3"], "did you mean 'max_num_seqs'"),
        (["burst", "--set", "max_num_seqs"], "write NAME=VALUE"),
        (["burst", "--settings", "max_num_seqs=0"], "from 1 to 4096"),
        (["burst", "--settings", "'"], "--settings"),
        (["burst", "--compare", "caching=false"], "unknown setting 'caching'"),
        (["burst", "--name", "../x"], "--name"),
        (["burst", "--url", "localhost:8001"], "--metrics-url"),
        (["burst", "--url", "example.org:8001", "--metrics-url", "localhost:8002"], "loopback"),
        (
            ["burst", "--url", "localhost:1", "--metrics-url", "localhost:2", "--compare", "max_num_seqs=2"],
            "leave out --url",
        ),
    ],
)
def test_bad_usage_is_a_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["nonesuch"], ["burst", "--users", "0"], ["burst", "--duration", "nan"], ["burst", "--rate", "1e9"]],
)
def test_numbers_out_of_bounds_and_unknown_scenarios_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


def throughput(num_right: int) -> RunResult:
    return finished(samples=[sample(at * 0.01) for at in range(num_right)]).result


@pytest.mark.parametrize(("second", "missed"), [(40, False), (60, True), (0, True)])
def test_caching_must_be_worth_twice_the_throughput(second: int, missed: bool) -> None:
    scenario = SCENARIOS["shared-prefix"]
    bound = scenario.compare(throughput(100), throughput(second), "enable_prefix_caching=false")
    assert bound.missed is missed


def test_a_scenario_that_is_met_by_a_good_run_of_its_defaults_passes() -> None:
    """A bound that no run decides would make each of them incomplete."""
    assert finished("long-context").verdict == "PASS"


FEW = {"samples": [sample(at * 0.4, num_cached_tokens=90) for at in range(100)]}
BAD = {"samples": [sample(1.0, outcome="error")]}


@pytest.mark.parametrize(
    ("runs", "missed", "status", "num_runs"),
    [
        ([{}, {}, {}], (False, False), 0, 3),
        ([FEW, {}, {}], (False, False), 3, 3),
        ([FEW, BAD, {}], (False, False), 1, 3),
        ([FEW, {}, {}], (False, True), 1, 3),
        ([{}, FEW, {}], (False, False), 3, 3),
        ([{}, {"complete": False}, BAD], (False, False), 130, 2),
        ([BAD], (False,), 1, 1),
        ([{"complete": False}], (False,), 130, 1),
    ],
)
def test_of_several_runs_the_severest_verdict_counts(
    runs: list[dict[str, Any]],
    missed: tuple[bool, ...],
    status: int,
    num_runs: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Comparisons follow a run that is incomplete too, and what they miss is not hidden by it."""
    bounds = [Bound("a ratio", 1.0 + each, "at most", 1.5) for each in missed]
    against = [Comparison(str(at), dict, lambda *_, each=each: each) for at, each in enumerate(bounds)]
    scenario = dataclasses.replace(SCENARIOS["long-context"], against=against)
    monkeypatch.setitem(SCENARIOS, "long-context", scenario)
    made: list[Run] = []

    def run_scenario(scenario: Scenario, options: Options, directory: Path, *_: Any) -> Run:
        run = finished("long-context", **runs[len(made)])
        made.append(dataclasses.replace(run, scenario=scenario, options=options, directory=directory))
        return made[-1]

    monkeypatch.setattr("load_tests.run.run_scenario", run_scenario)
    (tmp_path / "name").mkdir()
    assert cli.main(["long-context", "--name", "name", "--out", str(tmp_path)]) == status
    assert len(made) == num_runs


@pytest.mark.parametrize(
    ("second", "limit", "status"), [({}, {}, 3), ({}, {"max_num_seqs=2": 2.0}, 1), (BAD, {}, 1), (FEW, {}, 3)]
)
def test_a_comparison_follows_a_run_that_is_incomplete(
    second: dict[str, Any], limit: dict[str, float], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = iter([FEW, second])
    scenario = dataclasses.replace(SCENARIOS["long-context"], compare_at_least=limit)
    monkeypatch.setitem(SCENARIOS, "long-context", scenario)

    def run_scenario(scenario: Scenario, options: Options, directory: Path, *_: Any) -> Run:
        run = finished("long-context", **next(runs))
        return dataclasses.replace(run, scenario=scenario, options=options, directory=directory)

    monkeypatch.setattr("load_tests.run.run_scenario", run_scenario)
    (tmp_path / "name").mkdir()
    arguments = ["--name", "name", "--out", str(tmp_path), "--compare", "max_num_seqs=2"]
    assert cli.main(["long-context", *arguments]) == status
    assert (tmp_path / "name" / "comparison.md").is_file()


def test_other_settings_are_compared_without_a_judgement() -> None:
    bound = SCENARIOS["shared-prefix"].compare(throughput(100), throughput(60), "max_num_seqs=8")
    assert not bound.applies
    assert bound.measured == pytest.approx(100 / 60)

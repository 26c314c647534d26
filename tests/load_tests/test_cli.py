"""The command line: what it lists, what it refuses, how it compares."""

from __future__ import annotations

import pytest

from load_tests import cli
from load_tests.result import RunResult
from load_tests.scenarios import SCENARIOS
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


def test_other_settings_are_compared_without_a_judgement() -> None:
    bound = SCENARIOS["shared-prefix"].compare(throughput(100), throughput(60), "max_num_seqs=8")
    assert not bound.applies
    assert bound.measured == pytest.approx(100 / 60)

"""A small load test against a real server, over gRPC and over HTTP; and one that must find wrong answers."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_cli.launcher.server import LauncherError
from dflash_cli.launcher.triton_install import find_triton
from load_tests.reference import Expected, compute, expected_answers
from load_tests.run import Finished, run_scenario
from load_tests.scenarios import SCENARIOS, chat, shared_prefix
from load_tests.workload import Options, Protocol, Question

SETTINGS = {"max_num_seqs": "8", "max_model_len": "1024", "kv_cache_gb": "0.1"}


@pytest.fixture(autouse=True)
def _triton() -> None:
    try:
        find_triton(os.environ)
    except LauncherError as error:
        pytest.skip(str(error))


def run(scenario: str, directory: Path, protocol: Protocol = "grpc", **changes: float) -> Finished:
    values = {"users": 4, "duration_s": 3.0, "rate": 4.0, "prompts": 6, **changes}
    options = Options(**values, protocol=protocol, settings=SETTINGS)  # type: ignore[arg-type]
    return run_scenario(
        SCENARIOS[scenario], options, directory / scenario, expected_dir=directory, say=lambda text: None
    )


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "protocol"), [("chat", "http"), ("burst", "grpc")])
def test_a_small_run_passes_and_leaves_its_reports(scenario: str, protocol: Protocol, tmp_path: Path) -> None:
    finished = run(scenario, tmp_path, protocol)
    assert [bound.line() for bound in finished.bounds if bound.required and not bound.met] == []
    summary = json.loads((finished.directory / "summary.json").read_text())
    # Three seconds are too few to judge some bounds by, and the verdict says so.
    judged = all(bound.required for bound in finished.bounds)
    assert summary["verdict"] == finished.verdict == ("PASS" if judged else "INCOMPLETE")
    assert summary["requests"]["right"] == len(finished.result.samples) > 4
    assert summary["num_kv_blocks"] > 0
    written = {path.name for path in finished.directory.iterdir()}
    assert {"locust.html", "locust_stats.csv", "locust_stats_history.csv", "run.png", "summary.md"} <= written
    assert len(finished.result.observations) >= 3
    assert {"stub", "engine", "server"} == set(finished.result.observations[0].rss_bytes)


@pytest.mark.server
@pytest.mark.slow
def test_an_answer_that_is_not_the_expected_one_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*arguments: object) -> dict[str, Expected]:
        answers = expected_answers(*arguments)  # type: ignore[arg-type]
        name, answer = next(iter(answers.items()))
        return {**answers, name: dataclasses.replace(answer, token_ids=(*answer.token_ids[:-1], 7))}

    monkeypatch.setattr("load_tests.run.expected_answers", spoiled)
    finished = run("burst", tmp_path)
    assert not finished.passed
    (wrong,) = {wrong.question for wrong in finished.result.recorder.wrong}
    assert wrong == "burst-0"
    kept = json.loads((finished.directory / "wrong.jsonl").read_text().splitlines()[0])
    assert kept["expected_token_ids"] != kept["got_token_ids"]


@pytest.mark.server
@pytest.mark.slow
def test_sigterm_ends_a_run_as_sigint_does_with_what_there_is_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "load_tests", "burst", "--duration", "120", "--prompts", "4", "--users", "4"]
    options = ["--settings", "kv_cache_gb=0.1 max_num_seqs=8", "--name", "run", "--out", str(tmp_path)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("phase"):
            break
    time.sleep(2)  # some load, which is what this is about
    process.send_signal(signal.SIGTERM)
    said = process.stdout.read()
    assert process.wait(60) == 130
    assert "verdict: INTERRUPTED" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"] == "INTERRUPTED"


@pytest.mark.slow
def test_expected_answers_are_kept_and_asked_for_again_when_a_question_changes(tmp_path: Path) -> None:
    said: list[str] = []
    questions = [Question("a", "What is 3 + 4?", 4)]
    first = expected_answers("test", 0, questions, {}, tmp_path, said.append)
    assert expected_answers("test", 0, questions, {}, tmp_path, said.append) == first
    expected_answers("test", 0, [Question("a", "What is 3 + 5?", 4)], {}, tmp_path, said.append)
    assert [line.split()[2] for line in said if line.startswith("expected")] == ["computing", "1", "computing"]


def test_expected_answers_are_counted_while_they_are_computed(tmp_path: Path) -> None:
    said: list[str] = []
    questions = [Question(f"q{number}", f"What is {number} + 4?", 4) for number in range(3)]
    expected_answers("test", 0, questions, {}, tmp_path, said.append)
    assert said[-1].startswith("3 of 3 expected answers, ")


def test_a_turn_goes_on_from_the_right_answer_to_the_one_before() -> None:
    options = Options(users=1, duration_s=1.0, rate=0.0, prompts=chat.TURNS)
    questions = chat.questions(options)[:2]
    answers = compute(questions, {"max_model_len": "1024"})
    first, second = (answers[question.id] for question in questions)
    assert second.prompt.startswith(first.prompt + first.text)


def test_questions_that_do_not_fit_the_settings_are_refused_with_a_sentence(tmp_path: Path) -> None:
    from dflash_backend.config import ConfigError

    options = Options(users=1, duration_s=1.0, rate=0.0, prompts=4)
    with pytest.raises(ConfigError, match="max_model_len"):
        expected_answers("test", 0, shared_prefix.questions(options), {"max_model_len": "64"}, tmp_path, print)

"""Small load tests against real servers, run as the command line runs them; and the expected answers."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from dflash_backend.config import ConfigError
from dflash_cli.launcher.server import LauncherError
from dflash_cli.launcher.triton_install import find_triton
from load_tests import expected_answers as module
from load_tests.expected_answers import ExpectedAnswer, compute, expected_answers, generate, key
from load_tests.scenarios import SCENARIOS, chat
from load_tests.workload import Options, Question

SETTINGS = {"max_num_seqs": "8", "max_model_len": "1024", "kv_cache_gb": "0.1"}


@pytest.fixture
def _triton() -> None:
    try:
        find_triton(os.environ)
    except LauncherError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def chat_answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ExpectedAnswer]]:
    """The expected answers of a small chat, and the folder that they are kept in."""
    folder, scenario = tmp_path_factory.mktemp("chat"), SCENARIOS["chat"]
    questions = scenario.questions(Options(users=4, duration_s=3.0, prompts=chat.TURNS))
    settings = {**scenario.settings, **SETTINGS}
    said: list[str] = []
    found = expected_answers("chat", 0, questions, settings, folder, said.append)
    assert said[-1].startswith(f"{len(questions)} of {len(questions)} expected answers, ")
    return folder, found


def command(scenario: str, folder: Path, expected: Path, *options: str) -> list[str]:
    settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    folders = ["--out", str(folder), "--expected", str(expected), "--name", "run"]
    return [sys.executable, "-m", "load_tests", scenario, "--settings", settings, *folders, "--users", "4", *options]


def check_reports(directory: Path) -> None:
    """A run leaves its figures, locust's reports, and what its server's processes used."""
    written = {path.name for path in directory.iterdir()}
    assert {"locust.html", "locust_stats.csv", "locust_stats_history.csv", "run.png", "summary.md"} <= written
    with (directory / "server.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(float(rows[0][f"{role}_rss_mib"]) > 1 for role in ("stub", "engine", "server"))


@pytest.mark.nightly
@pytest.mark.server
@pytest.mark.slow
@pytest.mark.usefixtures("_triton")
def test_a_small_run_misses_nothing_and_leaves_its_reports(
    tmp_path: Path, chat_answers: tuple[Path, dict[str, ExpectedAnswer]]
) -> None:
    options = ("--protocol", "http", "--duration", "3", "--prompts", str(chat.TURNS))
    arguments = command("chat", tmp_path, chat_answers[0], *options)
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, timeout=180)
    # Three seconds are too few for some bounds, and the verdict says so.
    assert done.returncode == 3, done.stdout
    directory = tmp_path / "run"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["verdict"] == "INCOMPLETE"
    assert "FAIL" not in done.stdout
    assert summary["requests"] == {**dict.fromkeys(summary["requests"], 0), "right": summary["requests"]["right"]}
    assert summary["requests"]["right"] > 4
    assert summary["num_kv_blocks"] > 0
    check_reports(directory)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.usefixtures("_triton")
def test_a_wrong_answer_is_found_and_sigterm_ends_a_run_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected answers are computed, kept, and spoiled before the run that reads them."""
    # The nightly test has them computed in a process of its own.
    monkeypatch.setattr(
        module, "_compute_in_process", lambda asked, model, log: compute(asked, partial(generate, model))
    )
    scenario, said = SCENARIOS["burst"], list[str]()
    options = Options(users=4, duration_s=120.0, rate=10.0, prompts=4)
    settings = {**scenario.settings, **SETTINGS}
    asked = scenario.questions(options)
    first = expected_answers("burst", 0, asked, settings, tmp_path / "expected", said.append)
    assert expected_answers("burst", 0, asked, settings, tmp_path / "expected", said.append) == first
    assert [line.split()[2] for line in said if line.startswith("expected")] == ["computing", "4"]
    (kept,) = (tmp_path / "expected").glob("*.json")
    spoiled = json.loads(kept.read_text())
    spoiled["burst-0"]["token_ids"][-1] = 7
    kept.write_text(json.dumps(spoiled))

    arguments = command("burst", tmp_path, tmp_path / "expected", "--duration", "120", "--rate", "10", "--prompts", "4")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(line.startswith("phase") for line in process.stdout)
    children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(2)  # some load, which is what this is about
    process.send_signal(signal.SIGTERM)
    printed = process.stdout.read()
    assert process.wait(60) == 130
    assert "verdict: INTERRUPTED" in printed
    assert "FAIL: wrong answers" in printed
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"] == "INTERRUPTED"
    check_reports(tmp_path / "run")
    wrong = [json.loads(line) for line in (tmp_path / "run" / "wrong.jsonl").read_text().splitlines()]
    assert {one["question"] for one in wrong} == {"burst-0"}
    assert wrong[0]["expected_token_ids"] != wrong[0]["got_token_ids"]
    assert children
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_turn_goes_on_from_the_right_answer_to_the_one_before(
    chat_answers: tuple[Path, dict[str, ExpectedAnswer]],
) -> None:
    first, second, *_ = chat_answers[1].values()
    assert second.prompt.startswith(first.prompt + first.text)


def test_expected_answers_are_computed_again_when_a_question_or_the_model_changes() -> None:
    question = Question("a", "What is 3 + 4?", 4)
    other = dataclasses.replace(question, text="What is 3 + 5?")
    assert len({key([question], {}), key([other], {}), key([question], {"dtype": "bfloat16"})}) == 3


@pytest.mark.parametrize("name", ["quantization", "kv_cache_dtype", "activation_quantization"])
def test_answers_are_computed_with_the_servers_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that rounds in another way has other right answers."""
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(module, "_compute_in_process", lambda questions, model, log: asked.append(model) or {})
    for settings in ({"max_num_seqs": "8"}, {"max_num_seqs": "8", name: "fp8"}):
        expected_answers("test", 0, [Question("a", "What is 3 + 4?", 4)], settings, tmp_path, lambda text: None)
    assert asked == [{}, {name: "fp8"}]
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.nightly
def test_questions_that_do_not_fit_other_settings_are_refused_with_a_sentence(tmp_path: Path) -> None:
    """The settings are others, so the process that computes is asked, and its error comes back."""
    questions = chat.questions(Options(users=1, duration_s=1.0, prompts=1))
    with pytest.raises(ConfigError, match="max_model_len"):
        expected_answers("test", 0, questions, {"max_model_len": "64"}, tmp_path, print)

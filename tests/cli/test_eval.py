"""`dflash-triton eval`: what it prints is what the engine counted, and what is wrong is one sentence and a status."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workload import load_prompts
from dflash_backend import LLM
from dflash_backend.evaluation import ModelRequest
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_cli.commands.progress import Progress
from dflash_cli.launcher.server import TritonServer
from dflash_cli.main import main
from dflash_cli.server_backend import Encode, ServerAnswerer
from dflash_client import Completion, DFlashClient, GenerationResult

LIMIT = 4
FAST = ["--set", "max_model_len=512"]


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """Counts by category of the engine run directly, on the first prompts of each held-out set."""
    llm = LLM(max_model_len=512)
    counts = {}
    for category in ("math", "code", "chat"):
        prompts = [row.prompt for row in load_prompts(LIMIT, (category,))]
        outputs = llm.generate(prompts, max_tokens=256, temperature=0)
        stats = SpecDecodingStats.total(output.stats.spec_decoding for output in outputs if output.stats is not None)
        counts[category] = {"num_tokens": sum(len(output.token_ids) for output in outputs), **stats.as_dict()}
    return counts


def json_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["eval", *FAST, "--json", *options]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_by_default_the_demo_pair_is_measured_on_the_embedded_sets(
    counted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    data = json_of(capsys, "--limit", str(LIMIT))
    assert list(data["categories"]) == ["math", "code", "chat"]
    for category, counts in counted.items():
        assert {name: data["categories"][category][name] for name in counts} == counts
    assert data["overall"]["num_drafts"] == sum(counts["num_drafts"] for counts in counted.values())
    assert data["overall"]["num_prompts"] == 3 * LIMIT
    assert data["categories"]["math"]["num_scored"] == LIMIT
    assert data["categories"]["chat"]["accuracy"] is None
    assert data["seconds"] > 0
    assert data["about"]["num_speculative_tokens"] == 15


def test_the_table_shows_what_the_engine_counted_and_progress_goes_elsewhere(
    counted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *FAST, "--dataset", "math", "--limit", str(LIMIT)]) == 0
    out, err = capsys.readouterr()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "overall" in line]
    math = counted["math"]
    figures, counts, *rates = rows
    assert figures[1:4] == [str(LIMIT), str(math["num_tokens"]), f"{math['acceptance_length']:.3f}"]
    assert counts[1:4] == [str(math[name]) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
    assert [cell for row in rates for cell in row[1:]] == [f"{rate:.3f}" for rate in math["per_position_rates"]]
    assert max(map(len, out.splitlines())) <= 100
    assert re.search(rf"{LIMIT} of {LIMIT} answers, [0-9.]+/s$", err, re.MULTILINE)


def test_ctrl_c_shows_and_writes_what_was_answered(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [sys.executable, "-m", "dflash_cli.main", "eval", *FAST, "--dataset", "math", "--concurrency", "1"]
    with subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if re.search(r"\d+ of 200 answers, ", line):
                break
        process.send_signal(signal.SIGINT)
        text, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "cancelled; this is what was answered until then" in error
    found = json.loads((out / "eval.json").read_text())
    assert 0 < found["overall"]["num_prompts"] == 200 - found["num_left_out"] < 200
    assert f"Interrupted: {found['overall']['num_prompts']} of 200 questions" in text


def test_progress_has_a_rate_and_what_is_left() -> None:
    times, said = iter([-5.0, 0.0, 1.0, 5.0, 6.0, 395.0]), list[str]()
    progress = Progress("answers", said.append, clock=lambda: next(times))
    for done in (0, 1, 10, 11, 1000):
        progress.step(done, 1000)
    assert said == [
        "0 of 1000 answers after 5 s",
        "10 of 1000 answers, 1/s, about 16 min left",
        "1000 of 1000 answers, 2.5/s",
    ]


def test_without_speculation_every_step_yields_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    data = json_of(capsys, "--dataset", "math", "--limit", "1", "--draft", "")
    assert data["overall"]["acceptance_length"] == 1
    assert data["overall"]["per_position_rates"] == []
    assert data["overall"]["accuracy"] == 1


def test_k_is_the_settings_and_rates_have_as_many_positions(capsys: pytest.CaptureFixture[str]) -> None:
    data = json_of(capsys, "--dataset", "math", "--limit", "2", "--set", "num_speculative_tokens=3")
    assert len(data["overall"]["per_position_rates"]) == 3
    assert data["overall"]["draft_tokens_per_step"] == 3


def test_the_same_seed_samples_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dataset", "chat", "--limit", "2", "--max-tokens", "40", "--temperature", "1.2"]
    runs = [json_of(capsys, *options, "--seed", seed)["overall"] for seed in ("5", "5", "6")]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_rows_of_ones_own_are_answered_in_turns_and_reported_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    question = load_prompts(1, ("math",))[0]
    rows = [
        {"prompt": question.prompt, "answer": 17, "category": "sums"},
        {"turns": ["Say hello.", "Say goodbye."], "category": "talk"},
    ]
    own.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "report"
    data = json_of(capsys, "--dataset", str(own), "--max-tokens", "96", "--out", str(out))
    assert data["categories"]["own/sums"]["accuracy"] == 1
    assert data["categories"]["own/talk"]["num_prompts"] == 1
    assert json.loads((out / "eval.json").read_text()) == data
    assert "own/talk" in (out / "eval.md").read_text()
    assert (out / "eval.png").stat().st_size > 1000


def test_settings_come_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_NUM_SPECULATIVE_TOKENS", "2")
    data = json_of(capsys, "--dataset", "math", "--limit", "1", "--max-tokens", "8")
    assert data["about"]["num_speculative_tokens"] == 2
    monkeypatch.setenv("DFLASH_NUM_SPECULATIVE_TOKENS", "many")
    assert main(["eval"]) == 2
    assert "'many' (environment)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--limit", "0"],
        ["--max-tokens", "x"],
        ["--temperature", "-1"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
        ["--concurrency", "0"],
    ],
)
def test_bad_numbers_are_bad_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *argv])
    assert ended.value.code == 2
    assert argv[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--dataset", "maths"], "'maths' is neither a file nor a data set"),
        (["--set", "sede=1"], "did you mean 'seed'"),
        (["--set", "seed=x"], "'x' (command line)"),
        (["--concurrency", "2", "--set", "max_num_seqs=3"], "--concurrency sets max_num_seqs"),
        (["--url", "localhost", "--draft", "x"], "--draft is for an engine in this process"),
        (["--url", "localhost", "--set", "seed=1"], "--set is for an engine in this process"),
        (["--url", "host:port"], "the port 'port'"),
        (["--limit", "2", "--seed", str(2**64 - 1)], "seed"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *argv]) == 2
    assert words in capsys.readouterr().err


def test_what_cannot_be_run_is_one_sentence_and_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    for argv, words in [
        (["--dataset", str(bad)], f"{bad}, line 2: field 'prompt' is 3"),
        (["--limit", "1", "--target", "/no/such/model"], "target_model is '/no/such/model'"),
        (["--limit", "1", "--out", str(bad / "folder")], "cannot be made"),
        (["--limit", "1", "--url", "localhost", "--target", "/no/such/model"], "/no/such/model"),
    ]:
        assert main(["eval", *argv]) == 1
        out, err = capsys.readouterr()
        assert words in err.splitlines()[-1]
        assert (out, "Traceback" in err) == ("", False)


def test_a_server_that_is_not_there_names_the_question(unused_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--limit", "1", "--url", unused_address, "--timeout", "0.5"]) == 1
    error = capsys.readouterr().err
    assert unused_address in error
    assert "math-000: " in error or "code-000: " in error or "chat-000: " in error


@pytest.mark.server
def test_a_server_of_another_kind_is_refused(toy: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--dataset", "math", "--limit", "1", "--url", toy.grpc_url]) == 1
    assert "only a model that dflash-triton serves can be evaluated" in capsys.readouterr().err


@pytest.mark.parametrize(("encode", "thinking"), [(None, False), (lambda request: [1], None)])
def test_conversations_are_sent_with_thinking_off(encode: Encode | None, thinking: bool | None) -> None:
    sent: list[dict[str, Any]] = []

    class Client(DFlashClient):
        def generate(self, *prompt: Any, **options: Any) -> GenerationResult:
            sent.append(options)
            stats = {
                "num_drafts": 0,
                "num_draft_tokens": 0,
                "num_accepted_tokens": 0,
                "num_accepted_tokens_per_pos": [],
            }
            return GenerationResult((Completion("x", spec_stats=stats),))

    with Client("127.0.0.1:1") as client:
        question = ModelRequest("q", None, ({"role": "user", "content": "x"},), {"max_tokens": 1})
        ServerAnswerer(client, 1, encode).answer([question], lambda place, answer: None)
    assert sent[0].get("enable_thinking") is thinking


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in ("--target", "--draft", "--set", "--dataset", "--limit", "--max-tokens", "--seed", "--out", "--url"):
        assert option in text

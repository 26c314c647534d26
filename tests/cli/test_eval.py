"""`dflash-triton eval`: what it prints is what the engine counted, and what is wrong is one sentence and a status."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.evaluation import Answer, EvaluationError, ModelRequest
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_cli.commands.progress import Progress
from dflash_cli.launcher.server import TritonServer
from dflash_cli.server_backend import Encode, ServerAnswerer
from dflash_client import Completion, DFlashClient, GenerationResult
from dflash_client.errors import ClientError, ConnectionLost, Internal
from load_tests.prompts import load_prompts
from tests.support.quantised import AWQ, FP8_BLOCK, Packer, awq, fp8_block, write
from tests.support.tiny_models import make_target

LIMIT = 4
FAST = ["--set", "max_model_len=512"]
# The program `dflash-triton`, which says at each answer how far it is.
EVAL = """
from dflash_cli.commands.progress import Progress
Progress.__init__.__defaults__ = (0.0, *Progress.__init__.__defaults__[1:])
from dflash_cli.main import entry
entry()
"""


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """Counts by category of the engine run directly, on the first prompts of each held-out set."""
    llm = LLM(max_model_len=512, adaptive_speculation=False)
    counts = {}
    for category in ("math", "code", "chat"):
        prompts = [row.prompt for row in load_prompts(LIMIT, (category,))]
        outputs = llm.generate(prompts, max_tokens=256, temperature=0)
        stats = SpecDecodingStats.total(output.stats.spec_decoding for output in outputs if output.stats is not None)
        counts[category] = {"num_tokens": sum(len(output.token_ids) for output in outputs), **stats.as_dict()}
    return counts


@pytest.fixture
def json_of(cli):
    """The report of a run with some options."""

    def json_of(*options: object) -> dict[str, Any]:
        ended = cli("eval", *FAST, "--json", *options)
        assert ended.status == 0
        return json.loads(ended.out)

    return json_of


def test_by_default_the_demo_pair_is_measured_on_the_embedded_sets(json_of, counted: dict[str, Any]) -> None:
    data = json_of("--limit", LIMIT)
    assert list(data["categories"]) == ["math", "code", "chat"]
    for category, counts in counted.items():
        assert {name: data["categories"][category][name] for name in counts} == counts
    assert data["overall"]["num_drafts"] == sum(counts["num_drafts"] for counts in counted.values())
    assert data["overall"]["num_prompts"] == 3 * LIMIT
    assert data["categories"]["math"]["num_scored"] == LIMIT
    assert data["categories"]["chat"]["accuracy"] is None
    assert data["seconds"] > 0
    assert data["about"]["num_speculative_tokens"] == 15


def test_the_table_shows_what_the_engine_counted_and_progress_goes_elsewhere(cli, counted: dict[str, Any]) -> None:
    status, out, err = cli("eval", *FAST, "--dataset", "math", "--limit", LIMIT)
    assert status == 0
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
    command = [sys.executable, "-c", EVAL, "eval", *FAST, "--dataset", "math", "--concurrency", "1"]
    with subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if re.search(r"\d+ of 200 answers, ", line):
                break
        process.send_signal(signal.SIGINT)
        text, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "cancelled; this is what was answered until then" in error
    found = json.loads((out / "eval.json").read_text())
    assert 0 < found["overall"]["num_prompts"] == 200 - found["num_left_out"] < 200
    assert f"Interrupted: {found['overall']['num_prompts']} of 200 questions" in text


def test_progress_has_a_rate_and_what_is_left() -> None:
    times, said = iter([-5.0, 0.0, 1.0, 5.0, 6.0, 395.0, 396.0]), list[str]()
    progress = Progress("answers", said.append, clock=lambda: next(times))
    for done in (0, 1, 10, 11, 1000, 1001):  # what ends after the end is not told
        progress.step(done, 1000)
    assert said == [
        "0 of 1000 answers after 5 s",
        "10 of 1000 answers, 1/s, about 16 min left",
        "1000 of 1000 answers, 2.5/s",
    ]


def test_what_was_there_before_is_not_counted_as_fast() -> None:
    times, said = iter([0.0, 1.0, 11.0, 21.0]), list[str]()
    progress = Progress("tokens", said.append, clock=lambda: next(times), resumes=True)
    for done in (500, 600, 1000):
        progress.step(done, 1000)
    assert said == ["600 of 1000 tokens, 9.1/s, about 44 s left", "1000 of 1000 tokens, 24/s"]


def test_without_speculation_every_step_yields_one_token(json_of) -> None:
    data = json_of("--dataset", "math", "--limit", "1", "--draft", "")
    assert data["overall"]["acceptance_length"] == 1
    assert data["overall"]["per_position_rates"] == []
    assert data["overall"]["accuracy"] == 1


def test_k_is_the_settings_and_rates_have_as_many_positions(json_of) -> None:
    data = json_of("--dataset", "math", "--limit", "2", "--set", "num_speculative_tokens=3")
    assert len(data["overall"]["per_position_rates"]) == 3
    assert data["overall"]["draft_tokens_per_step"] == 3


def test_the_same_seed_samples_the_same_answers(json_of) -> None:
    options = ["--dataset", "chat", "--limit", "2", "--max-tokens", "40", "--temperature", "2"]
    runs = [json_of(*options, "--seed", seed)["overall"] for seed in ("5", "5", "6")]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_rows_of_ones_own_are_answered_in_turns_and_reported_to_files(json_of, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    question = load_prompts(1, ("math",))[0]
    rows = [
        {"prompt": question.prompt, "answer": 17, "category": "sums"},
        {"turns": ["Say hello.", "Say goodbye."], "category": "talk"},
    ]
    own.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "report"
    data = json_of("--dataset", own, "--max-tokens", 96, "--out", out)
    assert data["categories"]["own/sums"]["accuracy"] == 1
    assert data["categories"]["own/talk"]["num_prompts"] == 1
    assert json.loads((out / "eval.json").read_text()) == data
    assert "own/talk" in (out / "eval.md").read_text()
    assert (out / "eval.png").stat().st_size > 1000


def test_settings_come_from_the_environment_too(cli, json_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_NUM_SPECULATIVE_TOKENS", "2")
    data = json_of("--dataset", "math", "--limit", "1", "--max-tokens", "8")
    assert data["about"]["num_speculative_tokens"] == 2
    monkeypatch.setenv("DFLASH_NUM_SPECULATIVE_TOKENS", "many")
    ended = cli("eval")
    assert ended.status == 2
    assert "'many' (environment)" in ended.err


def test_what_cannot_be_run_is_one_sentence_and_1(cli, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    for argv, words in [
        (["--dataset", bad], f"{bad}, line 2: field 'prompt' is 3"),
        (["--limit", "1", "--target", "/no/such/model"], "target_model is '/no/such/model'"),
        (["/no/such/model", "--limit", "1"], "target_model is '/no/such/model'"),
        (["--limit", "1", "--out", bad / "folder"], "cannot be made"),
        (["--limit", "1", "--url", "localhost", "--target", "/no/such/model"], "/no/such/model"),
    ]:
        status, out, err = cli("eval", *argv)
        assert (status, out, "Traceback" in err) == (1, "", False)
        assert words in err.splitlines()[-1]


def test_a_server_that_is_not_there_names_the_question(cli, unused_address: str) -> None:
    ended = cli("eval", "--limit", "1", "--url", unused_address, "--timeout", "0.5")
    assert ended.status == 1
    assert re.search(rf"(math|code|chat)-000: .*{unused_address}", ended.err)


class DescribedServer:
    """A client of a server that says this of itself, or fails where it is an error."""

    address, protocol, model = "host:1", "grpc", "dflash"

    def __init__(self, description: Any, most_answers: int = 1000) -> None:
        """most_answers: after these each request fails."""
        self._description, self._left = description, most_answers

    def __enter__(self) -> DescribedServer:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""

    def describe(self, timeout_s: float) -> Any:
        if isinstance(self._description, ClientError):
            raise self._description
        return self._description

    def generate(self, *prompt: Any, **parameters: Any) -> GenerationResult:
        if not self._left:
            raise ConnectionLost("the connection broke")
        self._left -= 1
        stats = {"num_drafts": 1, "num_draft_tokens": 3, "num_accepted_tokens": 2}
        stats |= {"num_accepted_tokens_per_pos": [1, 1, 0], "acceptance_length": 3.0}
        return GenerationResult((Completion("4", "stop", (1, 2, 3), 3, spec_stats=stats),), 5)


@pytest.mark.parametrize(
    ("description", "told"),
    [
        ({"adaptive_speculation": True}, True),
        ({"adaptive_speculation": False}, False),
        ({}, None),
        (Internal("no description"), None),
    ],
)
def test_the_acceptance_of_a_server_that_adapts_is_not_compared_without_a_word(
    cli, monkeypatch: pytest.MonkeyPatch, description: Any, told: bool | None
) -> None:
    monkeypatch.setattr("dflash_cli.commands.eval.client_of", lambda arguments: DescribedServer(description))
    ended = cli("eval", "--dataset", "math", "--limit", "1", "--url", "host:1", "--json")
    assert ended.status == 0
    assert ("note: adaptive_speculation is on" in ended.err) == (told is True)
    assert json.loads(ended.out)["about"].get("adaptive_speculation") == told


def test_what_was_answered_before_a_request_failed_is_shown_and_written(
    cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dflash_cli.commands.eval.client_of", lambda arguments: DescribedServer({}, most_answers=2))
    options = ["--dataset", "math", "--limit", "4", "--concurrency", "1", "--json", "--out", tmp_path]
    ended = cli("eval", *options, "--url", "host:1")
    assert ended.status == 1
    assert "math-002: the connection broke; this is what was answered until then" in ended.err
    found = json.loads(ended.out)
    assert json.loads((tmp_path / "eval.json").read_text()) == found
    assert (found["overall"]["num_prompts"], found["num_left_out"]) == (2, 2)
    assert found["failure"] == "math-002: the connection broke"


@pytest.mark.server
def test_a_server_of_another_kind_is_refused(cli, toy: TritonServer) -> None:
    ended = cli("eval", "--dataset", "math", "--limit", "1", "--url", toy.grpc_url)
    assert ended.status == 1
    assert "only a model that dflash-triton serves can be evaluated" in ended.err


@pytest.mark.parametrize(
    ("encode", "given", "sent_options"),
    [
        (None, (), {"enable_thinking": False}),
        (None, ({"a": 1},), {"a": 1}),
        (lambda request: [1], (), None),
    ],
)
def test_conversations_are_sent_with_thinking_off_unless_the_caller_says_else(
    encode: Encode | None, given: tuple[dict[str, Any]], sent_options: dict[str, Any] | None
) -> None:
    sent: list[dict[str, Any]] = []

    class Client(DFlashClient):
        def generate(self, *prompt: Any, **options: Any) -> GenerationResult:
            sent.append(options)
            return GenerationResult((Completion("x", spec_stats=SpecDecodingStats().as_dict()),))

    with Client("127.0.0.1:1") as client:
        question = ModelRequest("q", None, ({"role": "user", "content": "x"},), {"max_tokens": 1})
        ServerAnswerer(client, 1, encode, *given).answer([question], lambda place, answer: None)
    assert sent[0].get("chat_template_kwargs") == sent_options


def test_variables_of_the_chat_template_are_a_json_object(cli) -> None:
    for text in ("{", "[1]"):
        ended = cli("eval", "--chat-template-kwargs", text)
        assert ended.status == 2
        assert "JSON" in ended.err


def test_help_names_every_option(cli) -> None:
    ended = cli("eval", "--help")
    assert ended.status == 0
    for option in ("--target", "--draft", "--set", "--dataset", "--limit", "--max-tokens", "--seed", "--out", "--url"):
        assert option in ended.out


def test_a_second_target_is_measured_on_the_same_questions_with_the_same_drafter(cli, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Sam fills 4 bags with 6 marbles each.")
    other = tmp_path / "other"
    shutil.copytree(asset_path("demo", "pair", "target"), other)
    options = [*FAST, "--dataset", "math", "--limit", LIMIT, "--json", "--text", text]
    ended = cli("eval", *options, "--against", other, "--against-set", "quantization=fp8", "--out", tmp_path / "report")
    assert ended.status == 0, ended.err
    data = json.loads(ended.out)
    assert json.loads((tmp_path / "report" / "eval.json").read_text()) == data
    first, against = data["first"], data["against"]
    assert first["about"]["draft_model"] == against["about"]["draft_model"] != ""
    assert first["overall"]["num_prompts"] == against["overall"]["num_prompts"] == LIMIT
    compared = data["comparison"]
    assert compared["acceptance_length"]["against"] == against["overall"]["acceptance_length"] > 8
    assert compared["perplexity"]["first"] != compared["perplexity"]["against"]
    assert compared["perplexity"]["first"] == first["about"]["perplexity"] > 1
    assert "quantised at load" in ended.err


@pytest.mark.parametrize(
    ("packer", "config"),
    [(fp8_block(32, 32), FP8_BLOCK | {"weight_block_size": [32, 32]}), (awq(16), AWQ | {"group_size": 16})],
    ids=["fp8", "int4"],
)
def test_a_quantised_mixture_of_experts_is_held_against_its_plain_checkpoint(
    cli, tmp_path: Path, packer: Packer, config: dict[str, Any]
) -> None:
    """Random weights, and the numbers that the quantised ones stand for: both give the same text."""
    source, demo = tmp_path / "source", asset_path("demo", "pair", "target")
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    make_target(source, architecture="Qwen3MoeForCausalLM", vocab_size=vocab_size, moe_intermediate_size=32)
    for file in demo.glob("tokenizer*.json"):
        shutil.copy(file, source)
    copies = write(source, tmp_path, packer, config)
    (text := tmp_path / "text").write_text("Sam fills 4 bags with 6 marbles each.")
    options = [copies.plain, "--draft", "ngram", "--against", copies.quantised, "--dataset", "math"]
    ended = cli("eval", *FAST, *options, "--limit", "2", "--max-tokens", "48", "--text", text, "--json")
    assert ended.status == 0, ended.err
    compared = json.loads(ended.out)["comparison"]
    for name in ("accuracy", "acceptance_length", "perplexity", "tokens_per_s"):
        assert set(compared[name]) == {"first", "against"}, name
        assert all(value is not None for value in compared[name].values()), name
    perplexities = compared["perplexity"]
    assert perplexities["against"] == pytest.approx(perplexities["first"], rel=1e-4)
    assert compared["num_same_answers"] == 2
    assert "dequantised" in ended.err


def test_settings_of_the_second_are_its_own(cli) -> None:
    ended = cli(
        "eval", *FAST, "--dataset", "math", "--limit", "1", "--json", "--against-set", "num_speculative_tokens=3"
    )
    data = json.loads(ended.out)
    assert [data[side]["about"]["num_speculative_tokens"] for side in ("first", "against")] == [15, 3]
    assert data["comparison"]["num_same_answers"] == 1


class Quick:
    """A model that answers at once, up to a question."""

    def __init__(self, error: BaseException | None = None, most_answers: int = 1000) -> None:
        self._error, self._most = error, most_answers

    def answer(self, requests: Any, on_answer: Any) -> None:
        for place, _ in list(enumerate(requests))[: self._most]:
            on_answer(place, Answer("4", 3, SpecDecodingStats(1, 3, 2, [1, 1, 0])))
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "most_answers", "status", "words"),
    [
        (KeyboardInterrupt(), 0, 130, "cancelled"),
        (EvaluationError("it died"), 0, 1, "it died"),
        (EvaluationError("it died"), 1, 1, "it died; this is what both had answered until then"),
        (RuntimeError("a defect"), 0, None, ""),
    ],
)
def test_the_first_models_answers_are_not_lost_with_the_second(
    cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: BaseException,
    most_answers: int,
    status: int | None,
    words: str,
) -> None:
    models = [Quick(), Quick(error, most_answers)]
    monkeypatch.setattr(
        "dflash_cli.commands.eval._engine", lambda *_: nullcontext((models.pop(0), {"draft_model": "ngram"}))
    )
    options = ["--dataset", "math", "--limit", "2", "--json", "--out", tmp_path, "--against-set", "seed=1"]
    if status is None:
        with pytest.raises(RuntimeError, match="a defect"):
            cli("eval", *options)
    else:
        ended = cli("eval", *options)
        assert ended.status == status
        assert words in ended.err.splitlines()[-1]
        assert json.loads(ended.out) == json.loads((tmp_path / "eval.json").read_text())
    found = json.loads((tmp_path / "eval.json").read_text())
    if most_answers:
        assert [found[side]["overall"]["num_prompts"] for side in ("first", "against")] == [1, 1]
    else:
        assert (found["overall"]["num_prompts"], found["num_left_out"]) == (2, 0)


def test_without_the_end_of_the_first_the_second_is_not_begun(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Quick(EvaluationError("it died"), 1)]
    monkeypatch.setattr("dflash_cli.commands.eval._engine", lambda *_: nullcontext((models.pop(0), {})))
    ended = cli("eval", "--dataset", "math", "--limit", "2", "--json", "--against-set", "seed=1")
    assert ended.status == 1
    assert "it died; this is what the first model had answered; the second one was not measured" in ended.err
    assert json.loads(ended.out)["overall"]["num_prompts"] == 1


def test_a_second_target_that_the_drafter_does_not_fit_is_refused_before_the_first_is_measured(
    cli, tmp_path: Path
) -> None:
    demo = asset_path("demo", "pair", "target")
    make_target(tmp_path, vocab_size=json.loads((demo / "config.json").read_text())["vocab_size"])
    for file in demo.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    ended = cli("eval", *FAST, "--dataset", "math", "--limit", "1", "--against", tmp_path)
    assert (ended.status, ended.out) == (1, "")
    assert "loading" not in ended.err, "before anything is measured"
    assert "does not fit the target" in ended.err


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--url", "localhost", "--against", "x"], 2, "--against needs the models in this process"),
        (["--url", "localhost", "--against-set", "seed=1"], 2, "--against-set needs the models"),
        (["--url", "localhost", "--text", "x"], 2, "--text needs the models"),
        (["--against-set", "quantization=nvfp4", "--limit", "1"], 2, "weights in NVFP4 are not supported"),
        (["--against", "/no/such/model", "--limit", "1"], 1, "/no/such/model"),
        (["--text", "/no/such/text", "--limit", "1"], 1, "/no/such/text cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(cli, options: list[str], status: int, words: str) -> None:
    ended = cli("eval", "--dataset", "math", *options)
    assert " answers" not in ended.err, "before anything is measured"
    assert (ended.status, ended.out, "Traceback" in ended.err) == (status, "", False)
    assert words in ended.err.splitlines()[-1]

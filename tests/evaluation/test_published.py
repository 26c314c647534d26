"""What `tests/evaluation/test_real_weights.py` makes of a run, without weights: evaluations that a defect would give,
through the sums and means that a real one goes through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_backend import LLM
from dflash_backend.evaluation import Answer, Evaluation, ModelRequest, Question, Sampling, evaluate
from dflash_backend.evaluation.questions import Row
from dflash_backend.evaluation.run import OnAnswer
from dflash_backend.spec_stats import SpecDecodingStats
from tests.evaluation import test_real_weights as real
from tests.support.published import (
    MAX_TOKENS,
    NUM_EXAMPLES,
    QWEN3_8B_B16,
    QWEN3_8B_SPECULATORS,
    STOP,
    defects_of_speculators,
    defects_of_the_pair,
    first_turns,
    least_acceptance_length,
    with_examples,
)


def counts(num_drafts: int, rates: Sequence[float]) -> SpecDecodingStats:
    """Counts of a request with `num_drafts` steps and these rates by position."""
    per_position = [round(rate * num_drafts) for rate in rates]
    return SpecDecodingStats(num_drafts, num_drafts * len(rates), sum(per_position), per_position)


class Told:
    """Answers with what it is told to, request by request."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self.asked: list[ModelRequest] = []

    def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
        self.asked += requests
        for place in range(len(requests)):
            on_answer(place, self.answers[place])


def run_of(dataset: str, requests: Sequence[SpecDecodingStats]) -> Evaluation:
    """An evaluation whose requests counted this."""
    questions = [Question(str(i), dataset, dataset, prompt="x") for i in range(len(requests))]
    return evaluate(Told([Answer("", 9, one) for one in requests]), questions, Sampling())


def of_length(length: float) -> SpecDecodingStats:
    """A request of 1000 steps with this acceptance length."""
    return SpecDecodingStats(1000, 15000, round((length - 1) * 1000), [round((length - 1) * 1000)])


@pytest.mark.parametrize(("dataset", "length"), QWEN3_8B_B16.items())
def test_the_published_length_itself_passes_and_six_percent_less_does_not(dataset: str, length: float) -> None:
    assert defects_of_the_pair(run_of(dataset, [of_length(length)] * 3), dataset) == []
    short = 0.9 if dataset == "gsm8k" else 0.94
    assert defects_of_the_pair(run_of(dataset, [of_length(length * short)] * 3), dataset)


LONG_AND_LOW = [SpecDecodingStats(10, 150, 50, [50])] * 2 + [SpecDecodingStats(1000, 15000, 2000, [2000])]
LONG_AND_HIGH = [SpecDecodingStats(10, 150, 20, [20])] * 3 + [SpecDecodingStats(1000, 15000, 5000, [5000])]


@pytest.mark.parametrize(
    ("requests", "passes"),
    [
        # The published pair falls back to about 3.95 when its layer ids are off by one.
        ([of_length(3.95)] * 3, False),
        ([SpecDecodingStats()] * 3, False),
        # The mean over requests counts: pooled, one long request would outweigh the others.
        (LONG_AND_LOW, True),
        (LONG_AND_HIGH, False),
    ],
    ids=["layers off by one", "no drafts", "a long request that accepts little", "a long request that accepts much"],
)
def test_the_mean_acceptance_length_on_mt_bench_decides(requests: list[SpecDecodingStats], passes: bool) -> None:
    found = run_of("mt-bench", requests)
    assert (defects_of_the_pair(found, "mt-bench") == []) == passes
    if requests in (LONG_AND_LOW, LONG_AND_HIGH):
        assert (found.overall.counts.acceptance_length < least_acceptance_length("mt-bench")) == passes


def test_a_defect_is_named_with_both_figures() -> None:
    (defect,) = defects_of_the_pair(run_of("mt-bench", [of_length(3.95)] * 3), "mt-bench")
    assert "3.950, expected at least 4.028" in defect


def test_the_tolerances_are_those_of_the_tests_upstream() -> None:
    assert least_acceptance_length("mt-bench") == pytest.approx(4.24 * 0.95)
    assert least_acceptance_length("gsm8k") == pytest.approx(6.54 * 0.975 * 0.95)


def rows(*data: dict[str, Any]) -> list[Row]:
    return [Row(one, f"row {i}") for i, one in enumerate(data)]


TRAIN = rows(*({"question": f"q{i}", "answer": f"because\n#### {i}"} for i in range(7)))


def speculators_run(num_right: int, rates: Sequence[float]) -> Evaluation:
    """A run of 200 questions of which some are answered right, each a request with these rates."""
    questions = with_examples(TRAIN, rows(*({"question": "q", "answer": "so\n#### 7"} for _ in range(200))))
    answers = [Answer("so\n#### 7" if i < num_right else "so 8", 50, counts(1000, rates)) for i in range(200)]
    return evaluate(Told(answers), questions, Sampling(stop=STOP))


GOOD_RATES = (0.795, 0.611, 0.429, 0.282, 0.18, 0.1, 0.06)


def test_what_vllm_measured_of_the_speculators_checkpoint_passes() -> None:
    assert defects_of_speculators(speculators_run(177, GOOD_RATES), QWEN3_8B_SPECULATORS) == []


@pytest.mark.parametrize(
    ("num_right", "rates", "defect"),
    [
        (165, GOOD_RATES, "accuracy is 0.825, expected at least 0.858"),
        (177, (0.795, 0.611, 0.4, 0.1, 0, 0, 0), "acceptance length is 2.90"),
        (177, (0.6, 0.6, 0.6, 0.6, 0.6, 0, 0), "acceptance rate at position 0 is 0.6, expected at least 0.676"),
        (177, (0.9, 0.9, 0.9, 0.2, 0.2, 0, 0), "acceptance rate at position 3 is 0.2, expected at least 0.240"),
        (177, (0.99, 0.99, 0.99), "acceptance rate at position 3 is None"),
        (177, (), "acceptance length is 1.0"),
    ],
)
def test_each_figure_of_the_speculators_checkpoint_is_compared(
    num_right: int, rates: Sequence[float], defect: str
) -> None:
    defects = defects_of_speculators(speculators_run(num_right, rates), QWEN3_8B_SPECULATORS)
    assert any(found.startswith(defect) for found in defects), defects


def test_the_questions_of_the_speculators_checkpoint_follow_five_solved_ones() -> None:
    (question,) = with_examples(TRAIN, rows({"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"}))
    assert question.prompt is not None
    assert question.prompt.startswith("Question: q0\nAnswer: because\n#### 0\n\nQuestion: q1\n")
    assert question.prompt.count("Question: ") == 6
    assert question.prompt.endswith("#### 4\n\nQuestion: How many?\nAnswer:")
    assert (question.answer, question.max_tokens) == ("1,005", MAX_TOKENS)


def test_follow_ups_are_left_out() -> None:
    asked = Told([Answer("", 1, SpecDecodingStats())])
    question = Question("a", "mt-bench", "mt-bench", messages=({"role": "user", "content": "x"},), follow_ups=("y",))
    evaluate(asked, first_turns([question]), Sampling())
    assert len(asked.asked) == 1


def test_what_measures_published_weights_runs_on_the_demo_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but the weights: rows from files, prompts, the engine, sums, judgement."""
    row = {"question": "Sam has 3 marbles and finds 4. How many are there?", "answer": "3 + 4 = 7\n#### 7"}
    for name in ("GSM8K", "GSM8K_TRAIN"):
        (tmp_path / name).write_text(f"{json.dumps(row)}\n" * 6, encoding="utf-8")
        monkeypatch.setenv(f"DFLASH_REAL_WEIGHTS_{name}", str(tmp_path / name))
    (tmp_path / "mt").write_text(json.dumps({"turns": ["Name the capital of Norway.", "Thanks!"]}), encoding="utf-8")
    monkeypatch.setenv("DFLASH_REAL_WEIGHTS_MT_BENCH", str(tmp_path / "mt"))
    monkeypatch.setenv("DFLASH_REAL_WEIGHTS_LIMIT", "2")
    llm = LLM(adaptive_speculation=False)
    questions = with_examples(real.gsm8k_rows("train", NUM_EXAMPLES), real.gsm8k_rows("test", real.limit_of("gsm8k")))
    found = real.measure(llm, questions, Sampling(max_tokens=24, stop=STOP))
    assert (found.overall.num_scored, len(found.results)) == (2, 2)
    assert found.overall.counts.num_drafts > 0
    assert any(defect.startswith("accuracy") for defect in defects_of_speculators(found, QWEN3_8B_SPECULATORS))
    assert [len(real.questions_of(name)) for name in ("gsm8k", "mt-bench")] == [2, 1]
    found = real.measure(llm, real.questions_of("mt-bench"), Sampling(max_tokens=40))
    assert found.overall.mean_acceptance_length == found.overall.counts.acceptance_length
    assert "mean_length" in capsys.readouterr().out

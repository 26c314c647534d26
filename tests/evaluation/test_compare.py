"""Two models side by side: figures of the questions that both answered, and the perplexity of a text."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.evaluation import Answer, Evaluation, EvaluationError, Question
from dflash_backend.evaluation import engine as answering
from dflash_backend.evaluation.compare import Comparison, Measured
from dflash_backend.evaluation.engine import perplexity
from dflash_backend.evaluation.run import QuestionResult
from dflash_backend.spec_stats import SpecDecodingStats
from tests.evaluation.test_report import cells

TEXT = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep? " * 8


def result(name: str, text: str, accepted: int, answer: str | None = "4") -> QuestionResult:
    counts = SpecDecodingStats(1, 4, accepted, [int(accepted > i) for i in range(4)])
    return QuestionResult(Question(name, "own", "own", prompt="x", answer=answer), (Answer(text, 10, counts),))


def measured(*results: QuestionResult, seconds: float = 2.0, **about: Any) -> Measured:
    return Measured.of(Evaluation(results, seconds), about)


FIRST = measured(result("a", "4", 4), result("b", "4", 2), perplexity=8.0, text_tokens=50)
AGAINST = measured(result("a", "4", 3), result("b", "5", 1), seconds=1.0, perplexity=9.0, text_tokens=50)


def test_each_figure_stands_beside_the_others_with_its_ratio() -> None:
    rows = cells(Comparison.of(FIRST, AGAINST).text())
    assert rows["accuracy"] == [["1.000", "0.500", "0.500"]]
    assert rows["acceptance_length"] == [["4.000", "3.000", "0.750"]]
    assert rows["acceptance_rate"] == [["0.750", "0.500", "0.667"]]
    assert rows["perplexity"] == [["8.000", "9.000", "1.125"]]
    assert rows["tokens_per_s"] == [["10.000", "20.000", "2.000"]]
    assert rows["overall"][0] == ["1.000", "0.500", "4.000", "3.000"]


def test_json_has_both_reports_and_the_figures() -> None:
    data = Comparison.of(FIRST, AGAINST).as_dict()
    assert data["first"]["overall"]["acceptance_length"] == 4
    assert data["against"]["overall"]["acceptance_length"] == 3
    assert data["comparison"]["acceptance_length"] == {"first": 4, "against": 3}
    assert data["comparison"]["num_same_answers"] == 1


def test_only_questions_that_both_answered_count_and_speed_is_of_all() -> None:
    more = measured(result("z", "9", 0), *FIRST.evaluation.results, result("a", "7", 0), seconds=2.0)
    cut = replace(AGAINST, evaluation=replace(AGAINST.evaluation, results=AGAINST.evaluation.results[1:]))
    compared = Comparison.of(more, cut)
    for side in (compared.first, compared.against):
        assert [each.question.id for each in side.evaluation.results] == ["b"]
    assert compared.first.evaluation.num_left_out == 3
    assert compared.figures["tokens_per_s"] == (20.0, 20.0)


def test_without_drafts_answers_or_a_text_there_is_no_figure_and_no_error() -> None:
    none = replace(result("a", "4", 0, None), answers=(Answer("4", 10, SpecDecodingStats()),))
    rows = cells(Comparison.of(measured(none), measured(none)).text())
    for name in ("accuracy", "acceptance_rate", "perplexity"):
        assert rows[name] == [["-", "-", "-"]]


def test_perplexities_of_other_tokens_are_not_compared() -> None:
    other = replace(AGAINST, about=AGAINST.about | {"text_tokens": 40})
    compared = Comparison.of(FIRST, other)
    assert compared.figures["perplexity"] == (8.0, None)
    assert "cannot be compared" in compared.text()
    assert "cannot be compared" not in Comparison.of(FIRST, AGAINST).text()


def test_the_files_hold_what_is_printed(tmp_path: Path) -> None:
    compared = Comparison.of(FIRST, AGAINST)
    compared.write(tmp_path)
    assert compared.text() in (tmp_path / "eval.md").read_text()
    assert (tmp_path / "eval.png").stat().st_size > 1000
    with pytest.raises(EvaluationError, match="cannot be written"):
        compared.write(tmp_path / "eval.md")


def test_perplexities_of_pieces_of_other_lengths_are_not_compared() -> None:
    first, other = (replace(each, about=each.about | {"text_piece": 511}) for each in (FIRST, AGAINST))
    assert Comparison.of(first, other).figures["perplexity"] == (8.0, 9.0)
    other = replace(other, about=other.about | {"text_piece": 2048})
    compared = Comparison.of(first, other)
    assert compared.figures["perplexity"] == (8.0, None)
    assert "pieces of different lengths, so their perplexities cannot be compared" in compared.text()


@pytest.mark.parametrize("leading", [[], [0], [0, 2]])
@pytest.mark.parametrize("piece", [2048, 30])
def test_perplexity_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch, piece: int, leading: list[int]) -> None:
    """Each piece is behind the special tokens that the tokenizer puts before a text, which do not count."""
    monkeypatch.setattr(answering, "TEXT_PIECE", piece)
    llm = LLM(max_model_len=512, draft="")
    ids = llm.tokenizer.encode_part(TEXT)
    names = llm.tokenizer.token_texts(leading)
    llm.tokenizer._fast.post_processor = TemplateProcessing(
        single=[*names, "$A"], special_tokens=list(zip(names, leading, strict=True))
    )
    assert llm.tokenizer.encode(TEXT) == [*leading, *ids]
    model = AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32).eval()
    losses = []
    with torch.inference_mode():
        size = piece - len(leading)
        for first in range(0, len(ids), size):
            part = torch.tensor([*leading, *ids[first : first + size]])
            logprobs = model(part[None]).logits[0].log_softmax(dim=-1)
            losses += [-logprobs[i - 1, part[i]].item() for i in range(max(1, len(leading)), len(part))]
    found, num_tokens = perplexity(llm, TEXT)
    assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
    assert num_tokens == len(ids) > 60


def test_a_text_of_one_token_has_no_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_model_len=64, draft="")
    with pytest.raises(EvaluationError, match="needs at least 2"):
        perplexity(llm, "a")
    monkeypatch.setattr(answering, "TEXT_PIECE", 1)
    with pytest.raises(EvaluationError, match="holds 1 tokens, too few for a perplexity; raise max_model_len"):
        perplexity(llm, "a b c")

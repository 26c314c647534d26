"""What the comparison of SmolLM2 with `transformers` takes for equal, on made-up models."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checks import smollm2
from dflash_backend.checkpoints import CheckpointError


class Scores:
    """A reference whose next token scores -i at id i, but for id 3, which is `gap` below id 2."""

    def __init__(self, answers: list[list[int]], gap: float = 1.0) -> None:
        self.answers, self.gap = answers, gap

    def scores(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([0.0, -1.0, -2.0, -2.0 - self.gap]).repeat(len(ids), 1)

    def greedy(self, prompts: Any, max_tokens: int) -> list[list[int]]:
        return self.answers

    def tokenizer(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, 0]}

    is_tie = smollm2.Reference.is_tie


def engine(answers: list[list[int]], logprobs: tuple[float, ...] = (-2.0, 0.0)) -> Any:
    entries = [None, *(SimpleNamespace(logprobs=[each]) for each in logprobs)]
    return SimpleNamespace(
        generate=lambda prompts, **_: [
            SimpleNamespace(token_ids=each, prompt_logprobs=entries)
            for each in (answers if len(prompts) > 1 else [[0]])
        ],
        tokenizer=SimpleNamespace(
            encode=lambda text: [1, 2, 0] if text in smollm2.TEXTS else [len(text)],
            render_chat=lambda messages: SimpleNamespace(text=messages[0]["content"]),
        ),
        stats=lambda: SimpleNamespace(spec_decoding=SimpleNamespace(acceptance_length=1.0)),
    )


@pytest.mark.parametrize(("gap", "missed"), [(5e-5, 0), (2e-4, 1)])
def test_greedy_answers_may_part_at_a_tie_alone(gap: float, missed: int) -> None:
    outcome = smollm2.Outcome([], [])
    ours, theirs = [[1, 2, 0], [0, 0, 0]], [[1, 3, 1], [0, 0, 0]]
    smollm2.compare_greedy(engine(ours), Scores(theirs, gap), [[1], [2]], 3, outcome)
    assert len(outcome.misses) == missed
    assert f"{2 - missed} of 2, {1 - missed} of them up to a tie" in outcome.lines[0]


@pytest.mark.parametrize(("distance", "missed"), [(5e-5, 0), (2e-4, 1)])
def test_scores_may_differ_by_rounding_alone(distance: float, missed: int) -> None:
    outcome = smollm2.Outcome([], [])
    smollm2.compare_texts(engine([], (-2.0 + distance, 0.0)), Scores([]), outcome)
    assert outcome.lines[0] == "texts with the token ids of transformers: 4 of 4"
    assert len(outcome.misses) == missed
    assert "perplexity 2.71" in outcome.lines[1]  # e to the mean of 2 and 0


def test_drafts_that_change_an_answer_are_seen() -> None:
    outcome = smollm2.Outcome([], [])
    smollm2.compare_drafts(engine([[1], [2]]), engine([[1], [3]]), [[0], [0]], 1, outcome)
    assert outcome.misses == [
        f"{what} answers of 1 tokens with drafts as without: only 1 of 2" for what in ("greedy", "seeded")
    ]


def test_the_questions_are_different_and_have_answers() -> None:
    rows = [json.loads(line) for line in smollm2.QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert len({row["turns"][0] for row in rows}) == len(rows) == 25
    assert all(row["answer"] for row in rows)
    assert len(smollm2.chat_prompts(engine([]), 100)) == 100
    with pytest.raises(ValueError, match="101 prompts were asked for; there are 100"):
        smollm2.chat_prompts(engine([]), 101)


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def find(*_: Any) -> None:
        raise CheckpointError("`make smollm2` installs it")

    monkeypatch.setattr(smollm2, "find_model", find)
    monkeypatch.setattr("sys.argv", ["smollm2"])
    assert smollm2.main() == 0
    assert "skipped: `make smollm2` installs it" in capsys.readouterr().out

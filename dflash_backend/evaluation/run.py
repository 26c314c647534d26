"""Has questions answered and adds up what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.figures import mean_acceptance_length
from dflash_backend.evaluation.questions import Message, Question
from dflash_backend.evaluation.scoring import is_correct, is_mentioned
from dflash_backend.spec_stats import SpecDecodingStats

Progress = Callable[[int, int], None]
# Variables of the chat template, as the published figures are measured. Templates ignore what they do not know.
NO_THINKING: Mapping[str, Any] = {"enable_thinking": False}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn. `max_tokens` of None takes each question's own. Request i of a round is given `seed` + i,
    so that a run can be repeated; at temperature 0 no seed has an effect. An answer ends before any text of `stop`."""

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One answer that is wanted: `prompt`, or `messages` when it is None. `where` names the question in errors;
    `sampling` has the server's names of sampling parameters."""

    where: str
    prompt: str | None
    messages: tuple[Message, ...]
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said to one request, and what it cost."""

    text: str
    num_tokens: int
    counts: SpecDecodingStats


# Takes the place of a request and its answer, once it is there.
OnAnswer = Callable[[int, Answer], None]


class Answerer(Protocol):
    """A model that answers: the engine in this process, or a server."""

    def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
        """Answer all requests, in any order, and call `on_answer` for each one that is done, from this thread.

        Raises `EvaluationError`, or what the model itself raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class QuestionResult:
    """A question with its answers, one for each turn. `correct` is None where no right answer is known."""

    question: Question
    answers: tuple[Answer, ...]

    @property
    def correct(self) -> bool | None:
        """Whether the last answer is the right one."""
        expected = self.question.answer
        if self.question.mentions:
            return any(is_mentioned(self.answers[-1].text, words) for words in self.question.mentions)
        return None if expected is None else is_correct(self.answers[-1].text, expected)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group of questions came to; `num_scored` of them have a known answer. `counts` are those of all requests
    (a turn is one) together, `mean_acceptance_length` is the mean over the requests that had drafts, None without."""

    name: str
    num_questions: int
    num_tokens: int
    counts: SpecDecodingStats
    mean_acceptance_length: float | None
    num_scored: int
    num_correct: int

    @classmethod
    def of(cls, name: str, results: Sequence[QuestionResult]) -> GroupResult:
        """The sum over `results`."""
        answers = [answer for result in results for answer in result.answers]
        scored = [result.correct for result in results if result.correct is not None]
        return cls(
            name=name,
            num_questions=len(results),
            num_tokens=sum(answer.num_tokens for answer in answers),
            counts=SpecDecodingStats.total(answer.counts for answer in answers),
            mean_acceptance_length=mean_acceptance_length(answer.counts for answer in answers),
            num_scored=len(scored),
            num_correct=sum(scored),
        )

    @property
    def accuracy(self) -> float | None:
        """Share of right answers among those that are known; None where none is."""
        return self.num_correct / self.num_scored if self.num_scored else None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All results, in the order of the questions, and the seconds from the first request to the last answer.

    An evaluation that was interrupted or failed has the questions that were answered in full; `num_left_out` counts the
    others, and `failure` says what failed.
    """

    results: tuple[QuestionResult, ...]
    seconds: float
    num_left_out: int = 0
    failure: str = ""

    @property
    def overall(self) -> GroupResult:
        """All questions together."""
        return GroupResult.of("overall", self.results)

    @property
    def datasets(self) -> list[GroupResult]:
        """One group for each data set."""
        return self._grouped(lambda question: question.dataset)

    @property
    def categories(self) -> list[GroupResult]:
        """One group for each category."""
        return self._grouped(lambda question: question.category)

    def _grouped(self, key: Callable[[Question], str]) -> list[GroupResult]:
        groups: dict[str, list[QuestionResult]] = {}
        for result in self.results:
            groups.setdefault(key(result.question), []).append(result)
        return [GroupResult.of(name, results) for name, results in groups.items()]


def evaluate(
    answerer: Answerer, questions: Sequence[Question], sampling: Sampling, progress: Progress | None = None
) -> Evaluation:
    """Have all questions answered, turn by turn: a round asks every question that has that many turns.

    `progress` is called with `(answers so far, answers in all)`. Raises what `Answerer.answer` does. A
    `KeyboardInterrupt` or an `EvaluationError` ends the evaluation with the questions answered in full by then; without
    any it is raised.
    """
    answers: list[dict[int, Answer]] = [{} for _ in questions]
    failure, done, total = "", 0, sum(question.num_turns for question in questions)
    started = time.perf_counter()
    try:
        for turn in range(max((question.num_turns for question in questions), default=0)):
            asked = [i for i, question in enumerate(questions) if turn < question.num_turns]

            def on_answer(place: int, answer: Answer, turn: int = turn, asked: list[int] = asked) -> None:
                nonlocal done
                answers[asked[place]][turn] = answer
                done += 1
                if progress is not None:
                    progress(done, total)

            answerer.answer([_request(questions[i], _in_order(answers[i]), sampling, i) for i in asked], on_answer)
    except (KeyboardInterrupt, EvaluationError) as error:
        if not any(len(said) == question.num_turns for question, said in zip(questions, answers, strict=True)):
            raise
        failure = str(error)
    seconds = time.perf_counter() - started
    results = tuple(
        QuestionResult(question, _in_order(said))
        for question, said in zip(questions, answers, strict=True)
        if len(said) == question.num_turns
    )
    return Evaluation(results, seconds, len(questions) - len(results), failure)


def _in_order(said: Mapping[int, Answer]) -> tuple[Answer, ...]:
    return tuple(said[turn] for turn in sorted(said))


def _request(question: Question, said: Sequence[Answer], sampling: Sampling, index: int) -> ModelRequest:
    """The next turn of a question, after the model has `said` its answers to the earlier ones."""
    messages = list(question.messages)
    for answer, follow_up in zip(said, question.follow_ups, strict=False):
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": follow_up}]
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_tokens or question.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed + index,
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    where = question.id if question.num_turns == 1 else f"{question.id}, turn {len(said) + 1}"
    return ModelRequest(where, question.prompt, tuple(messages), parameters)

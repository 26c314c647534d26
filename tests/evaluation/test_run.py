"""Rounds of questions and the sums over them, with a model that says what it was asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_backend.evaluation import Answer, EvaluationError, ModelRequest, Question, Sampling, evaluate
from dflash_backend.evaluation.run import OnAnswer
from dflash_backend.spec_stats import SpecDecodingStats


class Parrot:
    """Answers with the last thing it was told, one token and one draft of two each time."""

    def __init__(self) -> None:
        self.asked: list[ModelRequest] = []

    def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
        self.asked += requests
        for place, request in reversed(list(enumerate(requests))):
            on_answer(place, Answer(self._text(request), 1, SpecDecodingStats(1, 2, 1, [1, 0])))

    @staticmethod
    def _text(request: ModelRequest) -> str:
        return request.prompt or request.messages[-1]["content"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


QUESTIONS = [
    Question("a", "own", "own/x", prompt="4", answer="4"),
    Question("b", "own", "own/y", messages=(user("one"),), follow_ups=("two", "3"), answer="3"),
    Question("c", "more", "more", messages=(user("five"),), answer="6", max_tokens=9),
    Question("d", "more", "more", messages=(user("seven"),)),
]


def test_every_turn_is_answered_with_the_history() -> None:
    model = Parrot()
    evaluate(model, QUESTIONS, Sampling())
    assert [request.where for request in model.asked] == ["a", "b, turn 1", "c", "d", "b, turn 2", "b, turn 3"]
    said = {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}
    assert model.asked[-1].messages == (user("one"), said[0], user("two"), said[1], user("3"))


def test_an_answer_is_right_that_mentions_one_of_the_texts() -> None:
    asked = [
        Question(text, "own", "own", prompt=text, mentions=("seven", "7")) for text in ("It is 7.", "17", "Seven!")
    ]
    assert [result.correct for result in evaluate(Parrot(), asked, Sampling()).results] == [True, False, True]


def test_results_are_summed_by_data_set_and_category() -> None:
    found = evaluate(Parrot(), QUESTIONS, Sampling())
    assert found.overall.counts == SpecDecodingStats(6, 12, 6, [6, 0])
    assert (found.overall.num_questions, found.overall.num_tokens) == (4, 6)
    assert [(g.name, g.counts.num_drafts, g.num_scored, g.num_correct) for g in found.datasets] == [
        ("own", 4, 2, 2),
        ("more", 2, 1, 0),
    ]
    assert [(g.name, g.counts.num_drafts, g.accuracy) for g in found.categories] == [
        ("own/x", 1, 1.0),
        ("own/y", 3, 1.0),
        ("more", 2, 0.0),
    ]


def test_no_known_answer_is_no_accuracy() -> None:
    assert evaluate(Parrot(), QUESTIONS[-1:], Sampling()).overall.accuracy is None


def test_a_question_keeps_its_own_seed_and_limit_unless_one_is_asked_for() -> None:
    model = Parrot()
    evaluate(model, QUESTIONS, Sampling(temperature=0.5, seed=10))
    first = {request.where: request.sampling for request in model.asked}
    assert first["c"] == {"max_tokens": 9, "temperature": 0.5, "seed": 12}
    assert first["b, turn 3"]["seed"] == 11
    evaluate(model, QUESTIONS, Sampling(max_tokens=5))
    assert model.asked[-1].sampling["max_tokens"] == 5


def test_progress_counts_answers_not_questions() -> None:
    heard: list[tuple[int, int]] = []
    evaluate(Parrot(), QUESTIONS, Sampling(), lambda done, total: heard.append((done, total)))
    assert heard == [(done, 6) for done in range(1, 7)]


class Interrupted(Parrot):
    """Ctrl-C comes after that many answers, or an error."""

    def __init__(self, after: int, error: BaseException | None = None) -> None:
        super().__init__()
        self._left, self._error = after, error or KeyboardInterrupt()

    def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
        def counted(place: int, answer: Answer) -> None:
            if not self._left:
                raise self._error
            self._left -= 1
            on_answer(place, answer)

        super().answer(requests, counted)


def test_ctrl_c_keeps_the_questions_that_were_answered_in_full() -> None:
    found = evaluate(Interrupted(after=5), QUESTIONS, Sampling())
    # The second of b's three turns is answered too, which is not all of it.
    assert [result.question.id for result in found.results] == ["a", "c", "d"]
    assert (found.num_left_out, found.overall.num_tokens) == (1, 3)


def test_an_error_keeps_the_questions_that_were_answered_in_full_and_is_told() -> None:
    found = evaluate(Interrupted(5, EvaluationError("b: no server")), QUESTIONS, Sampling())
    assert [result.question.id for result in found.results] == ["a", "c", "d"]
    assert (found.num_left_out, found.failure) == (1, "b: no server")
    with pytest.raises(EvaluationError, match="b: no server"):
        evaluate(Interrupted(0, EvaluationError("b: no server")), QUESTIONS, Sampling())


def test_ctrl_c_before_any_answer_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(Interrupted(after=0), QUESTIONS, Sampling())


def test_a_mean_is_over_requests_and_a_turn_is_one() -> None:
    class Uneven(Parrot):
        def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
            for place, request in enumerate(requests):
                # The long conversation: ten steps of one accepted draft; the others: one step of five.
                counts = (
                    SpecDecodingStats(10, 50, 10, [10])
                    if request.where.startswith("b")
                    else SpecDecodingStats(1, 5, 5, [1] * 5)
                )
                on_answer(place, Answer(self._text(request), 1, counts))

    overall = evaluate(Uneven(), QUESTIONS, Sampling()).overall
    assert overall.mean_acceptance_length == (3 * 2 + 3 * 6) / 6
    assert overall.counts.acceptance_length == 1 + (30 + 15) / 33


def test_stop_texts_go_with_every_request() -> None:
    model = Parrot()
    evaluate(model, QUESTIONS[:1], Sampling(stop=("Question", "END")))
    assert model.asked[0].sampling["stop"] == ["Question", "END"]
    evaluate(model, QUESTIONS[:1], Sampling())
    assert "stop" not in model.asked[1].sampling

"""Every answer is compared with the expected one, and every error is an outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash_client import Cancelled, ClientError, Delta, DFlashClient, Unavailable
from load_tests.expected_answers import ExpectedAnswer
from load_tests.request_runner import RequestRunner
from load_tests.samples import Recorder, Sample
from load_tests.workload import Question, Request

EXPECTED = ExpectedAnswer("prompt", (1, 2), (3, 4, 5), "abc", "stop")
RIGHT = [("a", [3]), ("bc", [4, 5], "stop")]


def delta(text: str, token_ids: list[int], finish_reason: str | None = None) -> Delta:
    return Delta(text, tuple(token_ids), len(token_ids), num_input_tokens=2, finish_reason=finish_reason)


class Client(DFlashClient):
    """Answers with the given responses, and then the error."""

    def __init__(
        self,
        responses: list[tuple[Any, ...]],
        error: ClientError | None = None,
        before_error: Callable[[], None] = lambda: None,
    ) -> None:
        self.responses, self.error, self.before_error = responses, error, before_error
        self.sent: dict[str, Any] = {}

    def stream(self, prompt: Any = None, *, messages: Any = None, **sampling: Any) -> Any:
        self.sent = {"prompt": prompt, **sampling}
        return Stream(self)


class Stream:
    """A stream of a client that ends with the client's error, if any."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __iter__(self) -> Iterator[Delta]:
        yield from (delta(*response) for response in self._client.responses)
        if self._client.error is not None:
            self._client.before_error()
            raise self._client.error

    def cancel(self) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def run(client: Client, request: Request, ends_load: bool = False) -> tuple[Sample, Recorder]:
    recorder = Recorder()
    questions = {"q": Question("q", "text", 3, temperature=1.0, seed=7)}
    sample = recorder.begin("load", "traffic", "q", request.salt, True)
    runner = RequestRunner(client, questions, {"q": EXPECTED}, recorder)
    if ends_load:
        client.before_error = runner.end_load
    runner.run(request, sample)
    return sample, recorder


def test_the_expected_answer_is_right_and_its_times_and_tokens_are_recorded() -> None:
    client = Client(RIGHT)
    sample, recorder = run(client, Request("q", "salt", tenant="tenant"))
    assert (sample.outcome, sample.num_tokens, sample.num_prompt_tokens, len(sample.gaps)) == ("right", 3, 2, 1)
    assert client.sent == {
        "prompt": "prompt",
        "max_tokens": 3,
        "temperature": 1.0,
        "seed": 7,
        "cache_salt": "salt",
        "tenant": "tenant",
    }
    assert sum(recorder.tokens_by_second.values()) == 3
    assert recorder.in_flight == 0


@pytest.mark.parametrize(
    "responses",
    [
        [("a", [3]), ("bc", [4, 6], "stop")],
        [("a", [3]), ("bd", [4, 5], "stop")],
        [("a", [3]), ("bc", [4, 5], "length")],
        [("a", [3])],
        [*RIGHT, ("d", [6])],
    ],
)
def test_another_answer_is_wrong_and_kept(responses: list[tuple[Any, ...]]) -> None:
    sample, recorder = run(Client(responses), Request("q"))
    assert (sample.outcome, recorder.num_wrong) == ("wrong", 1)
    (wrong,) = recorder.wrong
    assert (wrong.question, wrong.prompt, wrong.expected_token_ids) == ("q", "prompt", [3, 4, 5])


@pytest.mark.parametrize(
    ("first", "outcome"), [(("a", [3]), "cancelled"), (("a", [9]), "wrong"), (("x", [3]), "wrong")]
)
def test_a_cancelled_answer_is_right_as_far_as_it_came(first: tuple[Any, ...], outcome: str) -> None:
    sample, recorder = run(Client([first, ("bc", [4, 5], "stop")]), Request("q", cancel_after=1))
    assert sample.outcome == outcome
    assert recorder.num_wrong == (outcome == "wrong")
    sample, _ = run(Client([first], Cancelled("cancelled")), Request("q", cancel_at_end=True), ends_load=True)
    assert sample.outcome == outcome


@pytest.mark.parametrize("request_", [Request("q"), Request("q", cancel_after=2), Request("q", cancel_at_end=True)])
def test_what_the_server_cancels_unasked_is_an_error(request_: Request) -> None:
    sample, _ = run(Client(RIGHT[:1], Cancelled("the server is in a hurry")), request_)
    assert sample.outcome == "error"
    assert "in a hurry" in sample.status


def test_an_answer_that_is_complete_before_its_cancellation_is_right() -> None:
    assert run(Client(RIGHT), Request("q", cancel_after=2))[0].outcome == "right"


def test_refusals_and_errors_are_told_apart() -> None:
    refused, _ = run(Client([], Unavailable("the queue is full")), Request("q"))
    failed, _ = run(Client(RIGHT[:1], ClientError("it broke")), Request("q"))
    assert (refused.outcome, failed.outcome) == ("refused", "error")
    assert "it broke" in failed.status

"""URLs, requests and results: what needs no server."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_client import (
    NULL,
    ClientError,
    Completion,
    ConnectionFailed,
    ConnectionLost,
    Delta,
    DFlashClient,
    GenerationResult,
    Internal,
    InvalidArgument,
    Logprob,
    RequestTimeout,
    Step,
    Unavailable,
    stream,
)
from dflash_client.address import Location, parse_url
from dflash_client.request import Request
from dflash_client.responses import ResponseReader
from dflash_client.retry import RetryPolicy


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        ("localhost", "grpc", ("grpc", "localhost:8001")),
        ("localhost", "http", ("http", "localhost:8000")),
        ("host.example:9", "grpc", ("grpc", "host.example:9")),
        ("http://10.0.0.1:8000/", "grpc", ("http", "10.0.0.1:8000")),
        ("grpc://10.0.0.1", "http", ("grpc", "10.0.0.1:8001")),
        ("[::1]:8001", "grpc", ("grpc", "[::1]:8001")),
        ("[::1]", "http", ("http", "[::1]:8000")),
        ("https://host", "grpc", ("http", "host:443", True)),
        ("grpcs://host:9", "http", ("grpc", "host:9", True)),
        ("http://host/a/b/", "grpc", ("http", "host:8000", False, "/a/b")),
        ("host/a/v2", "http", ("http", "host:8000", False, "/a")),
        ("https://host/v2/", "http", ("http", "host:443", True, "")),
    ],
)
def test_a_url_gives_protocol_address_tls_and_path(url: str, protocol: str, expected: tuple[Any, ...]) -> None:
    assert parse_url(url, protocol) == Location(*expected)


@pytest.mark.parametrize(
    "url",
    ["", ":8001", "host:0", "host:70000", "host:x", "ftp://host", "host/path", "a b:1", "http://h/a?b", "me@host"],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|port|begins with|path"):
        parse_url(url, "grpc")


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("prompt", "messages", "sampling", "words"),
    [
        (None, None, {}, "exactly one"),
        ("x", [{"role": "user", "content": "x"}], {}, "exactly one"),
        ("ab\udc80", None, {}, "UTF-8.*character 2"),
        *((prompt, None, {}, "at position 0; allowed: token ids, or one text") for prompt in (["a"], [1.5], [2**63])),
        ([None], None, {}, "at position 0; allowed: token ids, or one text"),
        ("x", None, {"stop": {"."}}, "sampling parameters cannot be sent as JSON"),
        ("x", None, {"structured_outputs": nested(100_000)}, "cannot be sent as JSON: they are nested too deeply"),
    ],
)
def test_what_cannot_be_sent_is_refused_before(prompt: Any, messages: Any, sampling: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Request.build("m", False, prompt, messages, sampling)


def test_parameters_that_are_none_are_not_sent() -> None:
    request = Request.build("m", True, "x", None, {"max_tokens": None, "stop": ["."]})
    assert request.strings() == {"text_input": "x", "sampling_parameters": '{"stop": ["."]}'}


def test_null_is_sent_where_none_is_not() -> None:
    request = Request.build("m", True, "x", None, {"max_tokens": NULL, "logprobs": NULL, "seed": None})
    assert request.sampling == '{"max_tokens": null, "logprobs": null}'
    assert "return_logprobs" not in request.flags()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), 1e9 + 1, 10**400])
def test_a_time_out_that_is_no_time_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"timeout_s is .*; allowed: seconds, more than 0 and at most 1e\+09, or None"):
        DFlashClient("localhost", timeout_s=timeout_s)
    with DFlashClient("localhost") as client, pytest.raises(ValueError, match="timeout_s is"):
        client.describe(timeout_s)


@pytest.mark.parametrize(
    ("responses", "broke_off"),
    [
        ([], True),
        ([{"text_output": ["a"]}], False),
        ([{"text_output": ["a"], "finish_reason": ["None"]}], True),
        ([{"text_output": ["a"], "finish_reason": ["None"]}, {"text_output": [""], "finish_reason": ["stop"]}], False),
        ([{"text_output": ["a", "b"], "finish_reason": ["stop", "None"]}], True),
        ([{"text_output": ["a", "b"], "finish_reason": ["stop", "length"]}], False),
    ],
)
def test_an_answer_is_whole_when_each_completion_has_a_reason_if_any_is_told(
    responses: list[dict[str, Any]], broke_off: bool
) -> None:
    reader = ResponseReader()
    for outputs in responses:
        list(reader.deltas(outputs))
    assert reader.broke_off == broke_off


def test_the_prompt_is_excluded_only_where_the_server_would_send_it() -> None:
    streamed = Request.build("m", True, "x", None, {}).flags()
    at_once = Request.build("m", False, "x", None, {}).flags()
    assert "exclude_input_in_output" not in streamed
    assert at_once["exclude_input_in_output"]


def test_log_probabilities_are_asked_for_with_the_parameter_logprobs_only() -> None:
    plain, asked = (Request.build("m", False, "x", None, {"logprobs": value}).flags() for value in (None, 0))
    assert "return_logprobs" not in plain
    assert asked["return_logprobs"]
    assert asked["return_cumulative_logprob"]


def test_steps_are_asked_for_by_name_and_are_no_sampling_parameter() -> None:
    request = Request.build("m", True, "a", None, {"return_steps": True, "seed": 1})
    assert request.flags()["return_steps"] is True
    assert request.sampling == '{"seed": 1}'
    assert "return_steps" not in Request.build("m", True, "a", None, {}).flags()
    (delta,) = ResponseReader().deltas({"text_output": ["ab"], "steps": ["[[2, 5, 1], [1, 0, 1]]"]})
    assert delta.steps == (Step(2, 5, 1), Step(1, 0, 1))


def test_deltas_join_to_a_result() -> None:
    deltas = [
        Delta("a", (1, 2), 2, 7, logprobs=({1: Logprob(-1.0)}, {2: Logprob(-2.0)}), cumulative_logprob=-3.0),
        Delta("", (), 0, 7),
        Delta("b", (3,), 1, 7, "stop", {"num_drafts": 1}, logprobs=({3: Logprob(-0.5)},), cumulative_logprob=-3.5),
    ]
    result = GenerationResult.from_deltas(deltas)
    logprobs = ({1: Logprob(-1.0)}, {2: Logprob(-2.0)}, {3: Logprob(-0.5)})
    assert result == GenerationResult(
        (Completion("ab", "stop", (1, 2, 3), 3, logprobs, -3.5, {"num_drafts": 1}),), num_input_tokens=7
    )
    assert (result.text, result.num_output_tokens) == ("ab", 3)


def test_deltas_of_several_completions_join_to_each_of_them() -> None:
    deltas = [Delta("a", index=1), Delta("x", index=0), Delta("b", index=1, finish_reason="length")]
    first, second = GenerationResult.from_deltas(deltas).completions
    assert (first.text, second.text, second.finish_reason) == ("x", "ab", "length")


def test_token_ids_that_do_not_fit_their_counts_are_an_error() -> None:
    outputs = {"text_output": ["a", "b"], "token_ids": [1, 2, 3], "num_output_tokens": [1, 1]}
    with pytest.raises(Internal, match="3 token ids for 2 completions"):
        list(ResponseReader().deltas(outputs))


def test_null_log_probabilities_are_none_and_a_null_entry_is_empty() -> None:
    outputs = {"text_output": ["a", "b"], "logprobs": ["null", '[null, {"5": {"logprob": -1.0}}]']}
    first, second = ResponseReader().deltas(outputs)
    assert (first.logprobs, second.logprobs) == (None, ({}, {5: Logprob(-1.0)}))


@pytest.mark.parametrize("error", [InvalidArgument("x"), Internal("x"), RequestTimeout("x"), ConnectionLost("x")])
def test_what_the_server_may_have_begun_is_not_sent_again(error: ClientError) -> None:
    assert RetryPolicy(retries=9).wait_s(0, error, answered=False, remaining_s=100) is None


@pytest.mark.parametrize("error", [Unavailable("x"), ConnectionFailed("x")])
def test_what_the_server_did_not_begin_is_sent_again_after_waits_that_double(error: ClientError) -> None:
    policy = RetryPolicy(retries=9, first_wait_s=1.0, longest_wait_s=5.0)
    for attempt, longest in enumerate((1, 2, 4, 5, 5)):
        wait_s = policy.wait_s(attempt, error, answered=False, remaining_s=100)
        assert wait_s is not None
        assert longest / 2 <= wait_s <= longest
    assert policy.wait_s(9, error, answered=False, remaining_s=100) is None
    assert policy.wait_s(0, error, answered=True, remaining_s=100) is None
    assert policy.wait_s(3, error, answered=False, remaining_s=1) is None


def test_parameters_of_a_transfer_come_with_the_last_response() -> None:
    reader, kept = ResponseReader(), {"do_remote_prefill": True, "remote_port": 7}
    first = list(reader.deltas({"text_output": ["a", "b"]}))
    ended = {"text_output": ["", ""], "finish_reason": ["length"] * 2, "kv_transfer_params": [json.dumps(kept)]}
    last = list(reader.deltas(ended))
    assert [delta.kv_transfer_params for delta in (*first, *last)] == [None, None, kept, None]
    assert GenerationResult.from_deltas([*first, *last]).kv_transfer_params == kept


def test_log_probabilities_of_the_prompt_join_over_responses() -> None:
    reader = ResponseReader()
    texts = ('[null, {"5": {"logprob": -1.0}}]', '[{"6": {"logprob": -2.0}}]', "[]")
    deltas = [
        delta for text in texts for delta in reader.deltas({"text_output": ["a", "b"], "prompt_logprobs": [text]})
    ]
    assert [delta.prompt_logprobs for delta in deltas if delta.index == 1] == [None] * 3
    result = GenerationResult.from_deltas(deltas)
    assert result.prompt_logprobs == (None, {5: Logprob(-1.0)}, {6: Logprob(-2.0)})


class Refuses:
    """A transport whose server refuses each call after a second. deadlines: of each call."""

    def __init__(self) -> None:
        self.now, self.deadlines = 50.0, list[float]()

    def call(self, request: Request, deadline: float) -> "Refuses":
        self.deadlines.append(deadline)
        return self

    def responses(self) -> Iterator[Any]:
        self.now += 1.0
        raise Unavailable("the queue is full")
        yield

    def cancel(self) -> None:
        """Nothing is left."""


def test_the_time_out_is_that_of_all_attempts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    transport: Any = Refuses()
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: transport.now))
    policy = RetryPolicy(3, first_wait_s=0.001, longest_wait_s=0.001)
    for timeout_s, num_calls in ((10.0, 4), (2.5, 3)):
        transport.deadlines.clear()
        begun = transport.now
        with pytest.raises(Unavailable):
            next(stream.Stream(transport, (Request("dflash", True, "Hello"), timeout_s, policy)))
        assert transport.deadlines == [begun + timeout_s] * num_calls

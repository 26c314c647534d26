"""The client against a real Triton server with a toy model: text, tokens, errors, cancellation, over both protocols."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_client import (
    Cancelled,
    ClientError,
    DFlashClient,
    Internal,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    Unavailable,
)
from dflash_client.launcher import TritonServer

pytestmark = pytest.mark.server

TEXT = "héllo wörld \u2028 日本語"
Connect = Callable[..., DFlashClient]


@pytest.fixture(params=["grpc", "http"])
def connect(request: pytest.FixtureRequest, toy: TritonServer) -> Iterator[Connect]:
    """Makes clients of the toy server for each protocol."""
    made: list[DFlashClient] = []

    def make(model: str = "dflash", timeout_s: float = 20.0) -> DFlashClient:
        url = toy.grpc_url if request.param == "grpc" else toy.http_url
        made.append(DFlashClient(url, request.param, model, timeout_s))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_generate_returns_the_completion_and_what_it_cost(connect: Connect) -> None:
    result = connect().generate(TEXT, max_tokens=100, seed=None)
    data = TEXT.encode()
    assert (result.text, result.finish_reason) == (TEXT, "stop")
    assert (result.num_input_tokens, result.num_output_tokens) == (len(TEXT), len(data))
    assert result.token_ids == tuple(data)
    assert result.spec_stats["sampling"] == {"max_tokens": 100}


def test_streamed_deltas_join_to_the_same_text(connect: Connect) -> None:
    deltas = list(connect().stream(TEXT, max_tokens=100))
    assert [delta.text for delta in deltas] == list(TEXT)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(TEXT) - 1) + ["stop"]
    assert deltas[-1].spec_stats is not None


def test_token_ids_and_chat_messages_are_prompts_too(connect: Connect) -> None:
    assert connect().generate([104, 105]).text == "hi"
    assert connect().generate(messages=[{"role": "user", "content": "é"}]).text == "<user>é"


def test_an_unknown_model_is_not_found(connect: Connect) -> None:
    with pytest.raises(NotFound, match="nope"):
        connect(model="nope").generate("x")


def test_a_refused_request_is_an_invalid_argument_with_the_servers_words(connect: Connect) -> None:
    client = connect()
    with pytest.raises(InvalidArgument, match="^toy says INVALID_ARG$"):
        client.generate("error INVALID_ARG")
    assert client.generate("still here").text == "still here"


def test_an_error_after_the_first_delta_is_raised_there(connect: Connect) -> None:
    stream = connect().stream("break INTERNAL")
    assert next(stream).text == "partial"
    with pytest.raises(Internal, match="toy says INTERNAL"):
        next(stream)


def test_a_request_that_takes_too_long_is_a_timeout(connect: Connect, cancel_log: Path) -> None:
    with _one_more_cancellation(cancel_log), pytest.raises(RequestTimeout, match="timeout_s"):
        list(connect(timeout_s=0.3).stream("forever"))


def test_closing_a_stream_early_cancels_the_request(connect: Connect, cancel_log: Path) -> None:
    with _one_more_cancellation(cancel_log):
        stream = connect().stream("forever")
        assert next(stream).text == "x"
        stream.close()


@pytest.mark.parametrize(
    ("status", "kind"), [("UNAVAILABLE", Unavailable), ("CANCELLED", Cancelled), ("INTERNAL", Internal)]
)
def test_grpc_carries_the_kind_of_every_error(toy: TritonServer, status: str, kind: type[ClientError]) -> None:
    with DFlashClient(toy.grpc_url, timeout_s=20) as client, pytest.raises(kind, match=f"toy says {status}"):
        client.generate(f"error {status}")


class _one_more_cancellation:
    """Checks that the toy model saw one cancellation more at the end than at the start, waiting for it."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def _count(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0

    def __enter__(self) -> None:
        self._before = self._count()

    def __exit__(self, *exc: object) -> None:
        deadline = time.monotonic() + 10
        while self._count() == self._before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._count() == self._before + 1

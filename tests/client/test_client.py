"""Both clients against a real Triton server with a toy model: text, tokens, errors, cancellation, over both protocols.

`test_async_client` has what only asyncio has.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.launcher.server import TritonServer
from dflash_client import (
    Cancelled,
    ClientError,
    DFlashClient,
    GenerationResult,
    Internal,
    InvalidArgument,
    Logprob,
    NotFound,
    RequestTimeout,
    Unavailable,
)
from tests.client.blocking import BlockingClient
from tests.client.conftest import one_more_cancellation, url_of

pytestmark = pytest.mark.server

TEXT = "héllo wörld \u2028 日本語"
Connect = Callable[..., DFlashClient]
KINDS: dict[str, Any] = {"sync": DFlashClient, "async": BlockingClient}


@pytest.fixture(params=[(kind, protocol) for kind in KINDS for protocol in ("grpc", "http")], ids="-".join)
def connect(request: pytest.FixtureRequest, toy: TritonServer) -> Iterator[Connect]:
    """Makes clients of the toy server, of each kind and for each protocol."""
    kind, protocol = request.param
    with ExitStack() as stack:

        def make(model: str = "dflash", timeout_s: float = 20.0, retries: int = 0) -> DFlashClient:
            return stack.enter_context(KINDS[kind](url_of(toy, protocol), protocol, model, timeout_s, retries))

        yield make


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


@pytest.mark.parametrize(("prompt", "streaming"), [("forever", True), ("silent", True), ("silent", False)])
def test_what_takes_too_long_is_a_timeout(connect: Connect, cancel_log: Path, prompt: str, streaming: bool) -> None:
    client = connect(timeout_s=0.3)
    with one_more_cancellation(cancel_log, client.protocol, prompt), pytest.raises(RequestTimeout, match="timeout_s"):
        list(client.stream(prompt)) if streaming else client.generate(prompt)


def test_closing_or_dropping_a_stream_early_cancels_the_request(connect: Connect, cancel_log: Path) -> None:
    client = connect()
    with one_more_cancellation(cancel_log):
        stream = client.stream("forever")
        assert next(stream).text == "x"
        stream.close()
    with one_more_cancellation(cancel_log):
        for delta in client.stream("forever"):
            assert delta.text == "x"
            break


@pytest.mark.parametrize("prompt", ["forever", "silent"])
def test_cancel_from_another_thread_ends_the_wait_for_a_delta(connect: Connect, cancel_log: Path, prompt: str) -> None:
    client = connect()
    stream = client.stream(prompt)
    canceller = threading.Timer(0.3, stream.cancel)
    canceller.start()
    with one_more_cancellation(cancel_log, client.protocol, prompt), pytest.raises(Cancelled):
        list(stream)
    canceller.join()


def test_a_stream_cancelled_before_it_began_sends_nothing(connect: Connect) -> None:
    stream = connect().stream("hello")
    stream.cancel()
    with pytest.raises(Cancelled):
        next(stream)


def test_closing_the_client_cancels_what_waits(connect: Connect, cancel_log: Path) -> None:
    client = connect()
    stream = client.stream("silent")
    closer = threading.Timer(0.3, client.close)
    closer.start()
    with one_more_cancellation(cancel_log, client.protocol, "silent"), pytest.raises(Cancelled):
        next(stream)
    closer.join()


@pytest.mark.parametrize("streaming", [False, True])
def test_n_completions_are_told_apart_though_they_end_one_after_the_other(connect: Connect, streaming: bool) -> None:
    client = connect()
    deltas = client.stream("abc", n=3, logprobs=0)
    result = GenerationResult.from_deltas(deltas) if streaming else client.generate("abc", n=3, logprobs=0)
    assert [completion.text for completion in result.completions] == ["abc", "ab", "a"]
    assert [completion.token_ids for completion in result.completions] == [(97, 98, 99), (97, 98), (97,)]
    assert [completion.finish_reason for completion in result.completions] == ["stop"] * 3
    assert all(completion.spec_stats["num_drafts"] == 2 for completion in result.completions)
    assert [len(completion.logprobs or ()) for completion in result.completions] == [3, 2, 1]


def test_the_deltas_of_a_completion_that_ended_do_not_come_again(connect: Connect) -> None:
    seen = [(delta.index, delta.text) for delta in connect().stream("abc", n=2) if delta.spec_stats is None]
    assert seen == [(0, "a"), (1, "a"), (0, "b"), (1, "b")]


@pytest.mark.parametrize("n", [2, 4])
def test_each_completion_of_a_stream_ends_once_with_its_own_last_text(connect: Connect, n: int) -> None:
    deltas = list(connect().stream("abcd", n=n))
    ends = [(delta.index, delta.text) for delta in deltas if delta.finish_reason is not None]
    assert sorted(ends) == [(index, "abcd"[3 - index]) for index in range(n)]
    late = [delta for delta in deltas if delta.is_statistics]
    assert [(delta.index, delta.spec_stats is not None) for delta in late] == [(index, True) for index in range(1, n)]


def test_log_probabilities_come_for_each_token_when_asked_for(connect: Connect) -> None:
    result = connect().generate("hi", logprobs=1)
    assert result.logprobs == ({104: Logprob(-0.5, 1, "h")}, {105: Logprob(-0.5, 1, "i")})
    assert result.cumulative_logprob == -1.0
    plain = connect().generate("hi")
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_readiness_is_the_models_own(connect: Connect) -> None:
    assert connect().ready()
    assert not connect(model="nope").ready()
    with pytest.raises(RequestTimeout, match="'nope' at .* was not ready within 0.3 s"):
        connect(model="nope").wait_ready(0.3)


def test_a_busy_server_is_asked_again_only_as_often_as_allowed(connect: Connect) -> None:
    client = connect(retries=2)
    assert client.generate(f"busy {uuid.uuid4()} 2").text.startswith("busy")
    with pytest.raises(Unavailable, match="try again later"):
        client.generate(f"busy {uuid.uuid4()} 3")


def test_nothing_is_sent_again_without_leave_or_after_a_delta(connect: Connect) -> None:
    client = connect()
    with pytest.raises(Unavailable):
        client.generate(f"busy {uuid.uuid4()} 1")
    stream = connect(retries=5).stream("break UNAVAILABLE")
    assert next(stream).text == "partial"
    with pytest.raises((Unavailable, Internal), match="toy says UNAVAILABLE"):
        next(stream)


@pytest.mark.parametrize(
    ("status", "kind"), [("UNAVAILABLE", Unavailable), ("CANCELLED", Cancelled), ("INTERNAL", Internal)]
)
def test_grpc_carries_the_kind_of_every_error(toy: TritonServer, status: str, kind: type[ClientError]) -> None:
    with DFlashClient(toy.grpc_url, timeout_s=20) as client, pytest.raises(kind, match=f"toy says {status}"):
        client.generate(f"error {status}")

"""Delta streams: what steps add to many requests leaves as one response, and nothing of an answer is lost, doubled or
out of order, however the stream ends."""

from __future__ import annotations

import json
import os
import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_backend.triton import delta_streams, running_requests
from dflash_backend.triton.service import TritonService
from tests.support.waiting import eventually
from tests.triton.fake_triton import FINAL, FakeTriton, InferenceResponse, Request, Sender
from tests.triton.serving import TEXT, returning, submit

NAME = "a-name-drawn-by-chance"
NUM_TOKENS = 90
ASKED = returning("finish_reason", "num_output_tokens", "token_ids", "spec_stats")
SLOW_PROMPT = [1008, *TEXT.encode()]  # of the toy engine: a step takes a hundredth of a second


def opened(service: TritonService, name: Any = NAME) -> Sender:
    """Open a delta stream."""
    request = Request(delta_stream=name)
    service.submit(request)
    return request.sender


def ask(service: TritonService, key: str, tokens: int = NUM_TOKENS, **inputs: Any) -> Sender:
    """Stream an answer whose deltas may come by the delta stream."""
    return submit(service, SLOW_PROMPT, tokens, stream=True, delta_stream=f"{NAME}/{key}", **{**ASKED, **inputs})


def sent(sender: Sender) -> list[InferenceResponse]:
    """What was sent so far."""
    responses = []
    while True:
        try:
            response, _ = sender._responses.get_nowait()
        except queue.Empty:
            return responses
        if response is not None:
            responses.append(response)


def batches(sender: Sender) -> list[list[list[Any]]]:
    """The batches of a delta stream, the acknowledgement first."""
    return [json.loads(response.outputs["text_output"]) for response in sent(sender)]


def answer(key: str, own: list[InferenceResponse], together: list[list[list[Any]]]) -> list[int]:
    """The token ids of a request in the order that a client has: its own responses, each after the batches that it
    names. Either its first response or its first entry begins the answer."""
    marked = [len(entry) > 4 for batch in together for entry in batch if entry[0] == key]
    assert not any(marked[1:])
    begins_alone = "delta_batches" not in own[0].outputs
    assert not marked or marked[0] is not begins_alone
    ids: list[int] = []
    num_read = 0
    for response in own:
        count = response.outputs.get("delta_batches", [num_read])[0]
        for batch in together[1 + num_read : 1 + count]:
            ids += [token_id for entry in batch if entry[0] == key for token_id in entry[2]]
        num_read = count
        ids += response.outputs["token_ids"]
    return ids


def repeated(count: int) -> list[int]:
    """The toy's answer."""
    return (SLOW_PROMPT * (count // len(SLOW_PROMPT) + 1))[:count]


@pytest.fixture
def slow_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_streams, "IDLE_S", 0.3)
    monkeypatch.setattr(delta_streams, "LOOK_S", 0.05)


def test_a_stream_is_acknowledged_and_carries_all_but_last_responses(service: TritonService) -> None:
    stream = opened(service)
    assert stream.next().outputs["text_output"] == "[]"
    senders = {key: ask(service, key) for key in "abc"}
    own = {key: sender.all() for key, sender in senders.items()}
    together = [[], *batches(stream)]
    for key, responses in own.items():
        assert answer(key, responses, together) == repeated(NUM_TOKENS)
        assert len(responses) == 1, "the last"
        assert responses[-1].outputs["delta_batches"][0] > 0
        assert responses[-1].outputs["finish_reason"] == "length"
        assert "spec_stats" in responses[-1].outputs
    assert max(map(len, together)) == 3, "a batch has what a step added to all"


def test_entries_have_texts_that_join_and_steps_where_they_were_asked_for(service: TritonService) -> None:
    stream = opened(service)
    senders = {"plain": ask(service, "plain"), "steps": ask(service, "steps", return_steps=True)}
    own = {key: sender.all() for key, sender in senders.items()}
    together = batches(stream)
    entries = {key: [entry for batch in together for entry in batch if entry[0] == key] for key in senders}
    assert entries["plain"][0][3:] == [None, True]
    assert entries["steps"][0][4] is True
    assert {len(entry) for entry in entries["plain"][1:]} == {3}
    assert {len(entry) for entry in entries["steps"][1:]} == {4}
    assert all(sum(step[0] for step in entry[3]) == len(entry[2]) for entry in entries["steps"])
    for key, (last,) in own.items():
        text = "".join(entry[1] for entry in entries[key]) + last.outputs["text_output"]
        assert text == bytes(id for id in repeated(NUM_TOKENS) if id < 256).decode(errors="replace")


def test_without_token_ids_an_entry_has_their_number_and_some_text(serve: Any) -> None:
    service = serve(max_stream_responses_per_s=10**9)
    stream = opened(service)
    (last,) = ask(service, "a", return_token_ids=False).all()
    entries = [entry for batch in batches(stream) for entry in batch]
    assert all(entry[1] for entry in entries), "characters that end in a later step wait for it"
    assert sum(entry[2] for entry in entries) + last.outputs["num_output_tokens"][0] == NUM_TOKENS


def test_first_tokens_wait_for_no_others(serve: Any) -> None:
    service = serve(max_stream_responses_per_s=1)  # so others wait for as long as they may
    stream = opened(service)
    assert stream.next().outputs["text_output"] == "[]"

    others = ask(service, "others", 3000)

    def steps_of_first_entry(key: str) -> int:
        sender = ask(service, key, 60, return_steps=True)
        while True:
            for entry in json.loads(stream.next().outputs["text_output"]):
                if entry[0] == key:
                    sender.all()
                    return len(entry[3])

    # On a busy machine a reader of the engine that is behind takes several steps together, now and then.
    rounds = ([steps_of_first_entry(f"{number}{key}") for key in "abcd"] for number in range(3))
    assert [1, 1, 1, 1] in rounds
    others.cancelled = True


def test_requests_of_a_batch_wait_for_less_than_a_response_each(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_requests, "MAX_WAIT_S", 60.0)
    service = serve(max_stream_responses_per_s=1)
    stream = opened(service)
    assert stream.next().outputs["text_output"] == "[]"
    alone = submit(service, SLOW_PROMPT, 20_000, stream=True)
    senders = [alone, *[ask(service, str(number), 20_000) for number in range(9)]]
    running = service._requests
    eventually(lambda: len(running._waiting) == 10, "all wait for others")
    assert running._wait_s == 1 + (1 + 8 * running_requests.BATCHED_RESPONSE)
    for sender in senders:
        sender.cancelled = True


def test_a_request_with_several_responses_of_its_own_joins_no_stream(serve: Any) -> None:
    """Its client may not have read them yet, and would have what a batch brings before them."""
    service = serve(max_stream_responses_per_s=1)
    sender = ask(service, "a", 3000)
    first = [sender.next(), sender.next()]
    stream = opened(service)
    own = [*first, *sender.all()]
    assert [token_id for each in own for token_id in each.outputs["token_ids"]] == repeated(3000)
    assert batches(stream) == [[]]


def test_a_request_that_begins_alone_marks_no_entry(serve: Any) -> None:
    service = serve(max_stream_responses_per_s=1)  # so its second response waits
    sender = ask(service, "a", 3000)
    first = sender.next()
    assert "delta_batches" not in first.outputs
    stream = opened(service)
    own = [first, *sender.all()]
    together = batches(stream)
    assert len(together) > 2
    assert {len(entry) for batch in together[1:] for entry in batch} == {3}
    ids = [token_id for each in own[:-1] for token_id in each.outputs["token_ids"]]
    ids += [token_id for batch in together for entry in batch for token_id in entry[2]]
    assert ids + list(own[-1].outputs["token_ids"]) == repeated(3000)


def test_what_a_batch_cannot_hold_comes_alone(service: TritonService) -> None:
    stream = opened(service)
    for inputs in (
        {"sampling": {"n": 2}},
        {"sampling": {"logprobs": 0}, "return_logprobs": True},
        {"sampling": {"logprobs": 0}, "return_cumulative_logprob": True},
        {"sampling": {"prompt_logprobs": 0}},
        {"sampling": {"stream_interval": 1}},
    ):
        responses = ask(service, "a", 60, **inputs).all()
        assert len(responses) > 2, inputs
        assert all("delta_batches" not in response.outputs for response in responses), inputs
    assert batches(stream) == [[]]


def test_a_request_whose_stream_is_not_there_is_answered_alone(service: TritonService) -> None:
    responses = ask(service, "a", 60).all()
    assert [token for response in responses for token in response.outputs["token_ids"]] == repeated(60)


def test_odd_names_are_refused(service: TritonService) -> None:
    for inputs, message in (
        ({"delta_stream": "short"}, "names a stream by 5 characters; allowed: 16 to 64, drawn by chance"),
        ({"delta_stream": "x" * 65}, "by 65 characters"),
        ({"delta_stream": b"\xff" * 20}, "the input delta_stream is no text; it is one text in UTF-8"),
        ({"delta_stream": NAME, "text_input": "a"}, "a stream's name, '/' and the request's key there; it has no '/'"),
        ({"delta_stream": f"{NAME}/", "text_input": "a"}, "it has no key"),
        ({"delta_stream": "short/1", "text_input": "a"}, "by 5 characters"),
        ({"delta_stream": f"{NAME}/{'k' * 200}", "text_input": "a"}, "bytes; allowed: at most 128"),
    ):
        request = Request(**inputs)
        service.submit(request)
        (response,) = request.sender.all()
        assert response.error is not None
        assert message in response.error.message
        assert response.error.code == "INVALID_ARG"


def test_a_name_is_one_clients(service: TritonService, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = opened(service)
    (refused,) = opened(service).all()
    assert "a delta stream of this name is open" in refused.error.message
    monkeypatch.setattr(delta_streams, "MOST_STREAMS", 1)
    (full,) = opened(service, NAME + "-2").all()
    assert full.error.code == "UNAVAILABLE"
    assert "1 delta streams are open already" in full.error.message
    assert not stream.answered


def test_a_stream_that_cannot_be_sent_to_loses_nothing(service: TritonService, triton: FakeTriton) -> None:
    stream = opened(service)
    sender = ask(service, "a")
    eventually(lambda: stream._responses.qsize() > 3)
    stream.failures = 1
    own = sender.all()
    assert stream.answered
    assert len(own) > 2, "the rest comes alone"
    assert answer("a", own, batches(stream)) == repeated(NUM_TOKENS)
    assert any("its requests go on without it" in line for line in triton.lines)


def test_one_that_cannot_even_be_acknowledged_is_none(service: TritonService) -> None:
    request = Request(delta_stream=NAME)
    request.sender.failures = 1
    service.submit(request)
    assert request.sender.answered
    assert len(ask(service, "a", 60).all()) > 2


@pytest.mark.parametrize("how", ["cancelled", "unreachable"])
def test_a_stream_whose_client_has_gone_ends(service: TritonService, slow_toy: None, how: str) -> None:
    stream = opened(service)
    sender = ask(service, "a", 150)
    setattr(stream, how, True)
    eventually(lambda: stream.answered)
    own = sender.all()
    assert answer("a", own, batches(stream)) == repeated(150)
    assert len(own) > 2


def test_a_stream_that_no_request_names_ends_and_its_name_is_free(service: TritonService, slow_toy: None) -> None:
    stream = opened(service)
    ask(service, "a", NUM_TOKENS).all()
    assert not stream.answered, "only after a while"
    eventually(lambda: stream.answered)
    assert stream._responses.queue[-1] == (None, FINAL), "without an error"
    assert not opened(service).answered


def test_a_stream_ends_with_the_service(serve: Any) -> None:
    service = serve()
    stream = opened(service)
    service.close()
    assert stream.answered
    (refused,) = opened(service).all()
    assert refused.error.code == "UNAVAILABLE"


def test_what_a_batch_has_counts_for_the_largest_answer(serve: Any) -> None:
    service = serve(max_response_mb=0.002)
    opened(service)
    assert "max_response_mb" in ask(service, "a", 3000).all()[-1].error.message


def test_tokens_are_counted_once(service: TritonService, triton: FakeTriton) -> None:
    opened(service)
    ask(service, "a").all()
    service._metrics.flush()
    assert triton.values["dflash:generation_tokens_total",] == NUM_TOKENS
    assert triton.values["dflash:prompt_tokens_total",] == len(SLOW_PROMPT)


def test_for_memory_of_the_server_the_stream_is_closed_before_a_request(
    service: TritonService, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened(service)
    sender = ask(service, "a", 150)
    memory = service._requests._server_memory
    monkeypatch.setattr("dflash_backend.triton.running_requests.SMALLEST_STREAM_BYTES", 1)
    eventually(lambda: stream._responses.qsize() > 3)
    over = iter([True])
    monkeypatch.setattr(memory, "is_over", lambda now: next(over, False))
    monkeypatch.setattr(type(memory), "is_of_requests", property(lambda self: False))
    monkeypatch.setattr(type(memory), "is_of_responses", property(lambda self: True))
    own = sender.all()
    assert stream.answered
    assert answer("a", own, batches(stream)) == repeated(150)
    assert any("a delta stream is closed" in line for line in triton.lines)


class Listener:
    """A client that listens on the socket of its stream."""

    def __init__(self, name: str = NAME) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(delta_streams.SOCKET_PREFIX + name)
        self._listening.listen()
        self._listening.settimeout(10.0)

    def accept(self) -> socket.socket:
        """The service's connection; no other is taken."""
        connection, _ = self._listening.accept()
        self._listening.close()
        connection.settimeout(10.0)
        return connection

    def close(self) -> None:
        """Listen no more."""
        self._listening.close()


def read_all(connection: socket.socket) -> list[list[list[Any]]]:
    """The batches until the service closes its end."""
    data = b""
    while more := connection.recv(1 << 16):
        data += more
    found = []
    while data:
        size = int.from_bytes(data[:4], "little")
        found.append(json.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def test_a_client_that_listens_on_this_machine_has_its_batches_there(
    service: TritonService, slow_toy: None, listener: Listener
) -> None:
    stream = opened(service)
    connection = listener.accept()
    senders = {key: ask(service, key) for key in "abc"}
    own = {key: sender.all() for key, sender in senders.items()}
    eventually(lambda: stream.answered)  # no request names it any more
    assert batches(stream) == [[]]
    together = [[], *read_all(connection)]
    for key, responses in own.items():
        assert answer(key, responses, together) == repeated(NUM_TOKENS)
        assert len(responses) == 1
        assert responses[-1].outputs["delta_batches"][0] > 0


def test_a_reader_that_stops_takes_no_memory_and_no_answer(
    service: TritonService, triton: FakeTriton, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_streams, "MOST_WAITING", 100)
    stream = opened(service)
    connection = listener.accept()
    (ours,) = service._requests.delta_streams._streams.values()
    assert ours.socket is not None
    while True:  # until its buffer is full
        try:
            ours.socket._socket.send((2).to_bytes(4, "little") + b"[]")
        except BlockingIOError:
            break
    own = ask(service, "a", 60).all()
    assert stream.answered
    assert any("its client does not read: " in line for line in triton.lines)
    assert len(own) > 2, "the rest comes alone"
    assert own[-1].outputs["finish_reason"] == "length"
    # What waited has not arrived, as its client sees by the number of batches; what had no place was sent once.
    together = [batch for batch in read_all(connection) if batch]
    waited = own[-1].outputs["delta_batches"][0] - len(together)
    assert waited > 0
    assert not together
    assert bytes(ours.socket.waiting).count(b'[["a",') == waited, "a batch that has no place is not among them"


def test_what_waits_for_a_slow_reader_arrives(service: TritonService, slow_toy: None, listener: Listener) -> None:
    opened(service)
    connection = listener.accept()
    (ours,) = service._requests.delta_streams._streams.values()
    assert ours.socket is not None
    full = 0
    while True:
        try:
            full += ours.socket._socket.send((2).to_bytes(4, "little") + b"[]")
        except BlockingIOError:
            break
    own = ask(service, "a").all()
    assert ours.socket.waiting
    together = [batch for batch in read_all(connection) if batch]
    assert full
    assert answer("a", own, [[], *together]) == repeated(NUM_TOKENS)


def test_a_socket_that_breaks_loses_nothing_that_was_not_written(
    service: TritonService, triton: FakeTriton, listener: Listener
) -> None:
    stream = opened(service)
    listener.accept().close()
    own = ask(service, "a", 60).all()
    assert stream.answered
    assert any("its client's socket broke" in line for line in triton.lines)
    assert [token for each in own for token in each.outputs["token_ids"]] == repeated(60)


def test_another_users_socket_gets_nothing(
    service: TritonService, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own_user + 1)
    stream = opened(service)
    assert listener.accept().recv(1) == b""
    assert len(ask(service, "a").all()) == 1
    assert len(batches(stream)) > 1

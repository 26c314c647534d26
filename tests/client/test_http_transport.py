"""Server-sent events and HTTP errors, against a small local HTTP server that answers what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dflash_client import (
    Cancelled,
    ConnectionFailed,
    ConnectionLost,
    DFlashClient,
    Internal,
    InvalidArgument,
    NotFound,
    QueueFull,
    RequestTimeout,
    Unavailable,
)
from dflash_client.errors import ClientError, error_in_text
from dflash_client.http_messages import EventParser
from dflash_client.retry import RetryPolicy
from tests.client.blocking import BlockingClient
from tests.client.tls_servers import running
from tests.support.growth import assert_linear


class Scripted(ThreadingHTTPServer):
    """Answers every POST with `status` and `body`, then holds the connection open until `release` is set, sending
    `trickle` over and over, and then sends `last`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.body = 200, b""
        self.length: int | None = None
        self.trickle = self.last = b""
        self.release = threading.Event()
        self.release.set()
        self.received: list[tuple[str, dict[str, object]]] = []

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, json.loads(body)))
        self.send_response(self.server.status)
        if self.server.length is not None:
            self.send_header("Content-Length", str(self.server.length))
        self.end_headers()
        self.wfile.write(self.server.body)
        self.wfile.flush()
        while not self.server.release.wait(0.05 if self.server.trickle else 10) and self.server.trickle:
            try:
                self.wfile.write(self.server.trickle)
            except ConnectionError:
                return
        if self.server.last:
            self.wfile.write(self.server.last)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as scripted, running(scripted, scripted.release):
        yield scripted


def events(*bodies: dict[str, object]) -> bytes:
    return b"".join(b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n" for body in bodies)


def test_events_are_joined_data_lines_ended_by_an_empty_line() -> None:
    lines = [": comment", "data: a", "data:b", "", "event: x", "", "data:  c", "", "data: cut off"]
    assert list(EventParser().feed("\n".join(lines).encode())) == ["a\nb", " c"]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_events_survive_any_chunking_and_lines_end_at_newlines_only(size: int) -> None:
    data = "data: é\u2028\u0085x\r\n\ndata: b\n\n".encode()
    parser = EventParser()
    assert [e for i in range(0, len(data), size) for e in parser.feed(data[i : i + size])] == ["é\u2028\u0085x", "b"]


def test_an_event_in_many_pieces_takes_a_time_that_grows_with_it() -> None:
    def work(pieces: int) -> None:
        parser = EventParser()
        found = [event for chunk in [b"data: ", *[b"x" * 1000] * pieces, b"\n", b"\n"] for event in parser.feed(chunk)]
        assert list(map(len, found)) == [1000 * pieces]

    assert_linear(work, 1000)


def test_a_stream_becomes_deltas(server: Scripted) -> None:
    server.body = events(
        {"text_output": "a\u2028", "token_ids": 5, "num_output_tokens": 1, "finish_reason": "None"},
        {"text_output": "b", "token_ids": [6, 7], "finish_reason": "stop", "spec_stats": '{"num_drafts": 3}'},
    )
    with DFlashClient(server.url, "http", model="m/1") as client:
        first, last = client.stream("p", max_tokens=4, stop=["x"])
    assert (first.text, first.token_ids, first.finish_reason, first.spec_stats) == ("a\u2028", (5,), None, None)
    assert (last.token_ids, last.num_output_tokens, last.finish_reason) == ((6, 7), 2, "stop")
    assert last.spec_stats == {"num_drafts": 3}
    path, body = server.received[0]
    assert path == "/v2/models/m%2F1/generate_stream"
    assert (body["text_input"], body["stream"]) == ("p", True)
    assert json.loads(str(body["sampling_parameters"])) == {"max_tokens": 4, "stop": ["x"]}


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (400, "the words", InvalidArgument),
        (404, "the words", NotFound),
        (503, "the words", Unavailable),
        (500, "the words", Internal),
        (418, "the words", Internal),
        # A 400 is told apart by the status in its text, and an error may come with status 200.
        (400, "UNAVAILABLE: 8 requests wait already and max_queue_size is 8; try again later", QueueFull),
        (400, "INTERNAL: the engine process died (signal 9)", Internal),
        (400, "CANCELLED: the request was cancelled", Cancelled),
        (400, "INVALID_ARGUMENT: the prompt is empty", InvalidArgument),
        (400, "Request for unknown model: 'm' is not found", NotFound),
        (400, "Request for unknown model: 'm' has no available versions", Unavailable),
        (400, "Stub process 'dflash_0_0' is not healthy.", Unavailable),
        (400, "unexpected shape for input 'stream'", InvalidArgument),
        (200, "UNAVAILABLE: the engine is being restarted", Unavailable),
    ],
)
def test_an_error_has_its_kind_and_begins_with_the_servers_words(
    server: Scripted, status: int, words: str, kind: type
) -> None:
    server.status, server.body = status, json.dumps({"error": words}).encode()
    with DFlashClient(server.url, "http") as client, pytest.raises(kind) as raised:
        client.generate("p")
    assert type(raised.value) is kind
    added = "; it is loading or unloading, or the server stops: try again later" if "versions" in words else ""
    assert str(raised.value) == words.removeprefix(f"{kind.status}: ") + added


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Server is stopping, scheduler for model has stopped accepting new inference requests", Unavailable),
        ("Server not ready", Unavailable),
        (
            "Failed to increase the shared memory pool size for key 'triton_python_backend_shm_region_1' to 4325376 "
            "bytes. Error: No space left on device",
            Internal,
        ),
        ("input 'stream' batch size does not match other inputs", InvalidArgument),
    ],
)
def test_what_triton_says_of_itself_is_not_the_clients_error(words: str, kind: type) -> None:
    for before in ("", "[request id: <id_unknown>] ", "[request id: 7] "):
        found = error_in_text(before + words)
        assert type(found) is kind
        assert str(found).startswith(words)
        assert type(error_in_text(f"{before}UNAVAILABLE: the engine is being restarted")) is Unavailable


@pytest.mark.parametrize(
    ("status", "words"),
    [(404, "answers as OpenAI's API does (Not Found); this client speaks Triton's"), (400, "Not Found")],
)
def test_a_server_of_openais_api_is_named_as_that(server: Scripted, status: int, words: str) -> None:
    server.status = status
    server.body = json.dumps({"error": {"message": "Not Found", "type": "x", "param": None, "code": None}}).encode()
    with DFlashClient(server.url, "http") as client, pytest.raises(ClientError) as raised:
        client.generate("p")
    assert words in str(raised.value)
    assert "{'" not in str(raised.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("trickle", [b"", b": alive\n"], ids=["silent", "trickling"])
def test_a_server_that_does_not_end_its_answer_is_a_timeout(server: Scripted, streaming: bool, trickle: bytes) -> None:
    server.release.clear()
    server.trickle = trickle
    with DFlashClient(server.url, "http", timeout_s=0.3) as client, pytest.raises(RequestTimeout, match="timeout_s"):
        list(client.stream("p")) if streaming else client.generate("p")


def test_a_connection_that_breaks_is_not_one_that_was_never_there(server: Scripted) -> None:
    server.length, server.body = 1000, b"{"
    with DFlashClient(server.url, "http", retries=3) as client, pytest.raises(ConnectionLost, match="broke"):
        client.generate("p")
    assert len(server.received) == 1


def test_an_error_in_the_middle_of_a_stream_is_raised_after_its_deltas(server: Scripted) -> None:
    server.body = events({"text_output": "a"}, {"error": "engine died"})
    with DFlashClient(server.url, "http") as client:
        stream = client.stream("p")
        assert next(stream).text == "a"
        with pytest.raises(Internal, match="engine died"):
            next(stream)


@pytest.mark.parametrize("kind", [DFlashClient, BlockingClient])
@pytest.mark.parametrize("rest", [b"", b'data: {"text_output": "b", "finish_re'])
def test_a_stream_that_ends_in_its_middle_without_an_error_is_not_whole(
    server: Scripted, kind: Any, rest: bytes
) -> None:
    server.body = events({"text_output": "a", "finish_reason": "None"}) + rest
    with kind(server.url, "http", retries=3) as client:
        stream = client.stream("p")
        assert next(stream).text == "a"
        with pytest.raises(ConnectionLost, match="the answer broke off"):
            next(stream)
        server.body = rest
        with pytest.raises(ConnectionLost, match="the answer broke off"):
            next(client.stream("p"))
        server.body = events({"text_output": "of a server that tells no reasons"})
        assert len(list(client.stream("p"))) == 1
    assert len(server.received) == 3


@pytest.mark.parametrize("kind", [DFlashClient, BlockingClient])
@pytest.mark.parametrize("timeout_s", [None, 1e9, (2**32 + 300) / 1000])
def test_a_long_time_out_or_none_does_not_end_a_request(server: Scripted, kind: Any, timeout_s: float | None) -> None:
    """The last one has 0.3 s left where its milliseconds are kept in 32 bits."""
    server.last = b'{"text_output": "a"}'
    server.release.clear()
    answer = threading.Timer(0.6, server.release.set)
    answer.start()
    with kind(server.url, "http", timeout_s=timeout_s) as client:
        assert client.generate("p").text == "a"
    answer.join()


def test_what_a_proxy_says_is_one_line(server: Scripted) -> None:
    server.status, server.body = 502, b"<html>\n<h1>Bad Gateway</h1>\n</html>"
    with DFlashClient(server.url, "http") as client, pytest.raises(Internal) as raised:
        client.generate("p")
    said = "answered with HTTP status 502: <html> <h1>Bad Gateway</h1> </html>"
    assert str(raised.value) == f"http://{server.url} {said}"


@pytest.mark.parametrize("body", [b"data: {\n\n", b"data: 7\n\n"])
def test_what_is_not_a_json_object_is_an_error(server: Scripted, body: bytes) -> None:
    server.body = body
    with DFlashClient(server.url, "http") as client, pytest.raises(Internal, match="not a JSON object"):
        list(client.stream("p"))


@pytest.mark.parametrize("kind", [DFlashClient, BlockingClient])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_server_is_a_failed_connection_that_names_the_address(kind: Any, protocol: str, unused_address: str) -> None:
    with kind(unused_address, protocol, timeout_s=0.5) as client, pytest.raises(ConnectionFailed, match=unused_address):
        client.generate("p")


@pytest.mark.parametrize("kind", [DFlashClient, BlockingClient])
def test_cancel_ends_the_wait_before_another_attempt(
    kind: Any, unused_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryPolicy, "wait_s", lambda *_: 30.0)
    with kind(unused_address, "http", retries=1) as client:
        stream = client.stream("p")
        canceller = threading.Timer(0.2, stream.cancel)
        canceller.start()
        start = time.monotonic()
        with pytest.raises(Cancelled):
            next(stream)
        assert time.monotonic() - start < 10
        canceller.join()

"""What the front end counts of its requests, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.types import Message, Receive, Scope, Send

from dflash_openai import metrics as module
from dflash_openai.metrics import FrontendMetrics, MetricsMiddleware
from dflash_openai.sse import PING
from tests.frontend.middleware.asgi import collecting, http_scope, receiving

CHAT = "/v1/chat/completions"


class Answers:
    """An application that sends each message when its time has come. running: how many requests ran meanwhile."""

    def __init__(self, counted: FrontendMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.running = 100.0, list[int]()
        self._counted, self._messages = counted, list[tuple[float, Message]]()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for seconds, message in self._messages:
            self.now += seconds
            self.running.append(len(self._counted.running))
            await send(message)

    def ask(self, path: str, *messages: tuple[float, Message]) -> None:
        self._messages = list(messages)
        asyncio.run(MetricsMiddleware(self, self._counted)(http_scope(path), receiving(), collecting([])))


def start(status: int = 200, kind: bytes = b"application/json") -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def body(content: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def test_counts_and_times_are_those_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = FrontendMetrics([CHAT, "/v1/completions"])
    app, stream = Answers(counted, monkeypatch), b"text/event-stream; charset=utf-8"
    app.ask(
        CHAT, (0.125, start(kind=stream)), (0.25, body(PING)), (0.5, body(b"data: {}\n\n")), (1.0, body(b"", False))
    )
    app.ask(CHAT, (0.0, start(kind=stream)), (0.0625, body(b"data: {}\n\n")), (2.0, body(b"data: [DONE]\n\n", False)))
    app.ask(CHAT, (0.5, start(429)), (0.0, body(b"{}", False)))
    app.ask("/v1/completions", (4.0, start()), (0.0, body(b"{}", False)))
    app.ask("/made/up", (0.25, start(404)), (0.0, body(b"{}", False)))
    app.ask("/v1/completions")
    assert set(app.running) == {1}
    lines = [line.rpartition(" ") for line in counted.lines() if not line.startswith("#")]
    found = {name.removeprefix("dflash_openai:"): float(value) for name, _, value in lines}
    assert found.pop("requests_running") == 0
    of_requests = {name: value for name, value in found.items() if name.startswith("requests_total")}
    assert of_requests == {
        f'requests_total{{path="{CHAT}",status="200"}}': 2,
        f'requests_total{{path="{CHAT}",status="429"}}': 1,
        'requests_total{path="/v1/completions",status="200"}': 1,
        'requests_total{path="/v1/completions",status="499"}': 1,
        'requests_total{path="other",status="404"}': 1,
    }

    def histogram(name: str, path: str) -> tuple[float, float, dict[str, float]]:
        """The count, the sum, and the buckets at whose bounds the count grows."""
        buckets = {
            each.partition('le="')[2].rstrip('"}'): value
            for each, value in found.items()
            if each.startswith(f'{name}_bucket{{path="{path}",')
        }
        bounds, last = {}, 0.0
        for bound, value in buckets.items():
            if value > last:
                bounds[bound], last = value, value
        return found[f'{name}_count{{path="{path}"}}'], found[f'{name}_sum{{path="{path}"}}'], bounds

    # A comment is no event, and an answer that is not streamed has none.
    first = histogram("time_to_first_event_seconds", CHAT)
    assert first == (2, 0.875 + 0.0625, {"0.1": 1, "1.0": 2})
    assert [name for name in found if name.startswith("time_to_first_event_seconds_count")] == [
        f'time_to_first_event_seconds_count{{path="{CHAT}"}}'
    ]
    assert histogram("request_duration_seconds", CHAT) == (3, 1.875 + 2.0625 + 0.5, {"0.5": 1, "2.5": 3})
    assert histogram("request_duration_seconds", "/v1/completions") == (2, 4.0, {"0.005": 1, "5.0": 2})
    assert histogram("request_duration_seconds", "other") == (1, 0.25, {"0.25": 1})


def test_a_route_with_a_parameter_is_one_label() -> None:
    counted = FrontendMetrics([CHAT, "/v1/models", "/v1/models/{name:path}"])
    assert counted.label("/v1/models/org/model") == "/v1/models/{name:path}"
    assert counted.label("/v1/models") == "/v1/models"
    assert {counted.label(path) for path in ("/v1/models/", "/v1/model", "/")} == {"other"}

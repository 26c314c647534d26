"""Spans of requests, and that nothing of OpenTelemetry is imported where they are off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from dflash_cli.commands import openai
from dflash_client import Delta
from dflash_client.errors import Internal, InvalidArgument
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.generation_record import GenerationRecord
from dflash_openai.middleware.api_keys import ApiKey
from dflash_openai.security import SecurityConfig
from dflash_openai.telemetry import endpoint_of
from tests.frontend.scripted_pool import Script, ScriptedPool
from tests.frontend.test_security import wait_until_ready

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
KEY = "alice-secret-key"
HEADERS = {"authorization": f"Bearer {KEY}", "x-request-id": "run-7"}
SECRET = "a private question"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(model_dir: Path, exporter: InMemorySpanExporter) -> Iterator[tuple[ScriptedPool, TestClient]]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    security = SecurityConfig(api_keys=(ApiKey.of("alice", KEY),))
    pool = ScriptedPool(model_dir)
    app = create_app(FrontendConfig(tracer=provider.get_tracer("test"), security=security), pool)
    with TestClient(app, raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield pool, http


@pytest.fixture
def model(traced: tuple[ScriptedPool, TestClient], exporter: InMemorySpanExporter) -> ScriptedPool:
    pool = traced[0]
    pool.script = Script()
    pool.asked.clear()
    exporter.clear()
    return pool


def ask(http: TestClient, path: str = "/v1/completions", headers: Mapping[str, str] = HEADERS, **body: Any) -> str:
    return http.post(path, json={"prompt": SECRET, **body}, headers=dict(headers)).text


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_span_with_what_it_asked_and_used(model, traced, exporter, stream: bool) -> None:
    ask(traced[1], stream=stream, max_tokens=20, temperature=0.5, seed=3)
    span = only(exporter)
    assert span.name == "text_completion toys/target"
    assert span.kind.name == "SERVER"
    found = dict(span.attributes or {})
    assert 0 < found.pop("gen_ai.latency.time_to_first_token") <= found.pop("gen_ai.latency.e2e")
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "dflash",
        "gen_ai.request.model": "toys/target",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": len("Hello!"),
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 0.25,
        "dflash.acceptance_length": 1 + 4 / 3,
        "dflash.tenant": "alice",
        "dflash.request_id": "run-7",
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
    }
    assert [event.name for event in span.events] == ["dflash.queue", "dflash.prefill", "dflash.decode"]
    times = [event.timestamp for event in span.events]
    assert span.start_time <= times[0] <= times[1] <= times[2] <= span.end_time
    assert SECRET not in span.to_json()
    assert KEY not in span.to_json()


def test_several_completions_have_the_sum_of_their_tokens_and_the_longest_of_their_waits() -> None:
    record = GenerationRecord("m", {}, 3)
    for index, (tokens, queue_s, drafts, accepted) in enumerate(((2, 0.5, 4, 6), (5, 0.25, 1, 0), (3, None, 2, 1))):
        stats = {"num_drafts": drafts, "num_accepted_tokens": accepted, "queue_time_s": queue_s}
        record.add(Delta("text", (1,) * tokens, tokens, finish_reason="length", spec_stats=stats, index=index))
    assert (record.num_output_tokens, record.queue_time_s) == (10, 0.5)
    assert (record.num_drafts, record.num_accepted_tokens) == (7, 7)
    assert record.finish_reasons == ["length"] * 3


def test_a_trace_goes_on_from_the_client_to_triton(model, traced, exporter) -> None:
    ask(traced[1], headers={**HEADERS, "traceparent": TRACEPARENT})
    span = only(exporter)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert model.asked[0].headers == {"traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01"}


def test_a_traceparent_that_is_none_begins_a_trace(model, traced, exporter) -> None:
    ask(traced[1], headers={**HEADERS, "traceparent": "00-x-y-01"})
    assert only(exporter).parent is None


@pytest.mark.parametrize(
    ("error", "status", "code", "is_failure"),
    [(InvalidArgument("no"), 400, "400", False), (Internal("out of memory"), 500, "internal_error", True)],
)
def test_an_error_is_in_the_span(model, traced, exporter, error, status: int, code: str, is_failure: bool) -> None:
    model.script = Script(texts=(), error=error)
    ask(traced[1])
    span = only(exporter)
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["error.type"] == code
    assert [event.name for event in span.events] == ["dflash.queue"]
    assert (span.status.status_code.name == "ERROR") is is_failure


def test_an_error_within_a_stream_is_in_the_span(model, traced, exporter) -> None:
    model.script = Script(error=Internal("out of memory"))
    ask(traced[1], stream=True)
    span = only(exporter)
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["error.type"] == "internal_error"
    assert span.status.status_code.name == "ERROR"


def test_a_refused_key_has_no_span_and_no_other_path_has_one(model, traced, exporter) -> None:
    ask(traced[1], headers={})
    traced[1].get("/v1/models", headers=HEADERS)
    traced[1].get("/health")
    assert exporter.get_finished_spans() == ()


def test_nothing_is_imported_or_sent_unless_it_is_asked_for() -> None:
    code = (
        "import json, sys; import dflash_openai.app, dflash_cli.commands.openai;"
        "from dflash_openai.telemetry import endpoint_of;"
        "print(json.dumps([endpoint_of({}), [n for n in sys.modules if n.startswith('opentelemetry')]]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ended.stdout) == [None, []]


def test_spans_go_where_the_option_says_whatever_the_variables_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_openai.telemetry.make_tracer", lambda endpoint: endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://variable")
    assert openai._tracer("http://option") == "http://option"
    assert openai._tracer(None) == "http://variable"


def test_the_sdks_own_variables_say_where_spans_go() -> None:
    both = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"}
    assert endpoint_of(both) == "http://c/x"
    assert endpoint_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}) == "http://c:4318/v1/traces"
    assert endpoint_of({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x"}) == "http://c/x"
    assert endpoint_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}) is None
    assert endpoint_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}) is None

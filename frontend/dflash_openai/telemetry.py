"""OpenTelemetry: one span for each request that generates text. An optional extra, `dflash-triton[otel]`: nothing of
it is imported unless it is asked for.

The span continues the trace of the request's `traceparent`, and its own goes to Triton in the request's metadata, where
Triton's tracing continues it. Names are those of OpenTelemetry's conventions for generative AI and of vLLM.
No attribute has a prompt, an answer or a key.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_openai.generation_record import GenerationRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

# By path: `gen_ai.operation.name`.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
PROVIDER = "dflash"
# Of these its attribute has the name, behind `gen_ai.request.`.
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


def make_tracer(endpoint: str) -> Tracer:
    """A tracer that sends spans to an OTLP endpoint over HTTP, such as `http://localhost:4318/v1/traces`. The usual
    variables (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`) are read by the SDK. Raises
    ValueError as `check_endpoint`."""
    check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({SERVICE_NAME: "dflash-triton-openai"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer("dflash_openai")


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError for an endpoint that is no URL of HTTP, and where the extra is not installed."""
    location = urlsplit(endpoint)
    if location.scheme not in ("http", "https") or not location.netloc:
        raise ValueError(
            f"spans cannot be sent to {endpoint!r}; allowed: a URL of HTTP, such as http://localhost:4318/v1/traces"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ValueError(f"traces need the package's extra 'otel' ({error})") from None


def endpoint_of(environ: Mapping[str, str]) -> str | None:
    """Where the variables of OpenTelemetry's SDK say that traces go, if they do."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if url := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return url
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return f"{base.rstrip('/')}/v1/traces" if base else None


class TelemetryMiddleware:
    """Writes the span of each request under the paths of `OPERATIONS`. Puts `trace_headers`, which continue the trace,
    into the request's state, and reads the `GenerationRecord` that is there in the end."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._tracer, self._propagator = app, tracer, TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, within its span."""
        if scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, set_span_in_context

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            OPERATIONS[scope["path"]], self._propagator.extract(headers), SpanKind.SERVER, _first_attributes(scope)
        )
        trace_headers: dict[str, str] = {}
        self._propagator.inject(trace_headers, set_span_in_context(span))
        scope.setdefault("state", {})["trace_headers"] = trace_headers
        status = 499

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except BaseException as error:
            status = 500
            if isinstance(error, Exception):
                span.set_attribute("exception.type", type(error).__name__)
            raise
        finally:
            _finish(span, scope, status)


def _first_attributes(scope: Scope) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": OPERATIONS[scope["path"]],
        "gen_ai.provider.name": PROVIDER,
        "http.request.method": scope["method"],
        "http.route": scope["path"],
        "url.scheme": scope.get("scheme", "http"),
    }


def _finish(span: Span, scope: Scope, status: int) -> None:
    """Write what is known in the end, and end the span."""
    from opentelemetry.trace import StatusCode

    state = scope["state"]
    span.set_attribute("http.response.status_code", status)
    if (request_id := state.get("request_id")) is not None:
        span.set_attribute("dflash.request_id", request_id)
    if state.get("api_key") is not None:
        span.set_attribute("dflash.tenant", state["api_key"].name)
    record: GenerationRecord | None = state.get("generation")
    if record is not None:
        span.update_name(f"{OPERATIONS[scope['path']]} {record.model}")
        span.set_attributes(_attributes(record))
        _add_events(span, record)
    error = record.error if record is not None and record.error else None
    if error is not None or status >= 400:
        span.set_attribute("error.type", error or str(status))
        if status < 400 or status >= 500:
            span.set_status(StatusCode.ERROR)
    span.end()


def _attributes(record: GenerationRecord) -> dict[str, Any]:
    sampling: Mapping[str, Any] = record.sampling
    asked = {name: sampling.get(name) for name in _SAMPLING} | {"choice.count": sampling.get("n")}
    found = {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
    found |= {
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.latency.e2e": (time.time_ns() - record.began_ns) / 1e9,
    }
    if record.finish_reasons:
        found["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.first_token_ns is not None:
        found["gen_ai.latency.time_to_first_token"] = (record.first_token_ns - record.began_ns) / 1e9
    if record.queue_time_s is not None:
        found["gen_ai.latency.time_in_queue"] = record.queue_time_s
    if record.num_drafts:
        found["dflash.acceptance_length"] = 1 + record.num_accepted_tokens / record.num_drafts
    return found


def _add_events(span: Span, record: GenerationRecord) -> None:
    """When the request began to wait, its prompt to be computed, and its tokens to come. The wait is what the engine
    says of it."""
    span.add_event("dflash.queue", timestamp=record.began_ns)
    if record.first_token_ns is None:
        return
    if record.queue_time_s is not None:
        scheduled_ns = record.began_ns + int(record.queue_time_s * 1e9)
        span.add_event("dflash.prefill", timestamp=min(scheduled_ns, record.first_token_ns))
    span.add_event("dflash.decode", timestamp=record.first_token_ns)

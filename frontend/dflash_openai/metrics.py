"""GET /metrics: what this front end has counted, and the metrics of the Triton servers behind it."""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_openai.sse import PINGS

FETCH_TIMEOUT_S = 2.0
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
EVENT_STREAM = b"text/event-stream"
# Paths are a label: only known ones are, so that no client can make up labels without end.
OTHER = "other"
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?( .*)")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


class Histogram:
    """Counts of seconds by bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The samples in Prometheus's text format."""
        total = 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:.9g}"
        yield f"{name}_count{{{labels}}} {total}"


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


class FrontendMetrics:
    """What one front end has counted. `running` are the tasks of the requests that it works on."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        # Routes that end with a parameter, by what they begin with.
        self._routes = {path.partition("{")[0]: path for path in self._paths if "{" in path}
        self.running: set[asyncio.Task[Any]] = set()
        # Whether those that still run are cancelled: the server stops.
        self.stopping = False
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first_event: dict[str, Histogram] = defaultdict(Histogram)
        self._duration: dict[str, Histogram] = defaultdict(Histogram)

    def label(self, path: str) -> str:
        """The path as a label: of its route, where that has a parameter."""
        if path in self._paths:
            return path
        return next((route for begin, route in self._routes.items() if path.startswith(begin) and path != begin), OTHER)

    def first_event(self, path: str, seconds: float) -> None:
        """A stream has sent its first event."""
        self._first_event[path].observe(seconds)

    def finished(self, path: str, status: int, seconds: float) -> None:
        """A request has ended; 499 where its client left before the answer began, of a stream that began and failed the
        status of its error."""
        self._requests[path, status] += 1
        self._duration[path].observe(seconds)

    def lines(self) -> Iterator[str]:
        """All metrics in Prometheus's text format."""
        yield from _head("dflash_openai:requests_running", "gauge", "Requests that this front end works on")
        yield f"dflash_openai:requests_running {len(self.running)}"
        yield from _head("dflash_openai:requests_total", "counter", "Requests that have ended, by path and HTTP status")
        for (path, status), count in sorted(self._requests.items()):
            yield f'dflash_openai:requests_total{{path="{path}",status="{status}"}} {count}'
        for name, help_text, histograms in (
            ("time_to_first_event_seconds", "From the request to the first event of its stream", self._first_event),
            ("request_duration_seconds", "From the request to the end of its answer", self._duration),
        ):
            yield from _head(f"dflash_openai:{name}", "histogram", help_text)
            for path, histogram in sorted(histograms.items()):
                yield from histogram.lines(f"dflash_openai:{name}", f'path="{path}"')


class MetricsMiddleware:
    """Counts every request, refused ones too."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and watch its answer."""
        began, path, metrics = time.monotonic(), self._metrics.label(scope["path"]), self._metrics
        status, waits_for_event = 499, False

        async def watch(message: Message) -> None:
            nonlocal status, waits_for_event
            if message["type"] == "http.response.start":
                status = message["status"]
                waits_for_event = any(value.startswith(EVENT_STREAM) for _, value in message["headers"])
            elif waits_for_event and not message.get("body", b"").startswith(PINGS):
                waits_for_event = False
                metrics.first_event(path, time.monotonic() - began)
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        metrics.running.add(task)
        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            # A traceback would say nothing: the connection is closed with the process.
            if not metrics.stopping:
                raise
        finally:
            metrics.running.discard(task)
            status = scope.get("state", {}).get("failed_with", status)
            metrics.finished(path, status, time.monotonic() - began)


async def get_metrics(request: Request) -> Response:
    """Both, in Prometheus's text format. A server that does not answer is left out, and counted as down."""
    urls: tuple[str, ...] = request.app.state.frontend.config.triton_metrics_urls
    metrics: FrontendMetrics = request.app.state.metrics
    pages = {}
    # Reading the authorities holds up all requests for 20 ms, and in the clear they are of no use.
    secure = any(urlsplit(url).scheme == "https" for url in urls)
    async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S, trust_env=False, verify=secure) as client:
        for url, page in zip(urls, await asyncio.gather(*(_fetch(client, url) for url in urls)), strict=True):
            pages[urlsplit(url).netloc] = page
    text = "\n".join([*metrics.lines(), *merged(pages)]) + "\n"
    return Response(text, media_type="text/plain; version=0.0.4")


async def _fetch(client: httpx.AsyncClient, url: str) -> str | None:
    try:
        return (await client.get(url)).raise_for_status().text
    except httpx.HTTPError:
        return None


def merged(pages: Mapping[str, str | None]) -> Iterator[str]:
    """The samples of several servers' pages, by the server's address; None for a page that could not be had. With more
    than one server each sample gets the label `server`."""
    if not pages:
        return
    yield from _head("dflash_openai:triton_up", "gauge", "Whether the metrics of a Triton server could be read")
    for server, page in pages.items():
        yield f'dflash_openai:triton_up{{server="{server}"}} {int(page is not None)}'
    families: dict[str, tuple[list[str], list[str]]] = {}
    for server, page in pages.items():
        for line in (page or "").splitlines():
            _add(families, line, server if len(pages) > 1 else None)
    for comments, samples in families.values():
        yield from comments
        yield from samples


def _add(families: dict[str, tuple[list[str], list[str]]], line: str, server: str | None) -> None:
    """Add a line of a page to its family: the lines of a metric must follow each other."""
    if line.startswith(("# HELP ", "# TYPE ")):
        comments = families.setdefault(line.split(" ", 3)[2], ([], []))[0]
        kind = line[:7]
        if not any(comment.startswith(kind) for comment in comments):
            comments.append(line)
    elif found := _SAMPLE.fullmatch(line):
        name, labels, value = found[1], (found[2] or "")[1:-1], found[3]
        if server is not None:
            labels = f'{labels},server="{server}"' if labels else f'server="{server}"'
        without = (name, *map(name.removesuffix, _SUFFIXES))
        family = next((known for known in without if known in families), name)
        families.setdefault(family, ([], []))[1].append(f"{name}{{{labels}}}{value}" if labels else f"{name}{value}")

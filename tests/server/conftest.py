"""One real Triton server on the demo pair for all wire tests, and small ways to talk to it without our own client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.server import LauncherError, TritonServer
from dflash_cli.launcher.triton_install import find_triton
from dflash_client import DFlashClient
from load_tests.server_state import MetricsPage
from tests.support.frontends import local_frontend
from tests.support.servers import clean_environ, local_server
from tests.support.waiting import eventually

# With a number of drafts that does not depend on the time of steps.
SETTINGS = {
    "max_num_seqs": "8",
    "max_model_len": "1024",
    "kv_cache_gb": "0.1",
    "kv_write_guard": "true",
    "adaptive_speculation": "false",
}
# Looks at the metrics page, 50 ms apart: longer than the second between two updates.
SETTLED = 25


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.server)


def new_server(settings: dict[str, str] | None = None, **options: Any) -> TritonServer:
    """A server on free loopback ports, not started yet."""
    try:
        find_triton(clean_environ())
    except LauncherError as error:
        pytest.skip(str(error))
    return local_server(SETTINGS | (settings or {}), **options)


@pytest.fixture(scope="session")
def server_log() -> list[str]:
    """What `server` has logged."""
    return []


@pytest.fixture(scope="session")
def server(server_log: list[str]) -> Iterator[TritonServer]:
    with new_server(on_log=lambda line: server_log.append(line.text)) as running:
        yield running


@pytest.fixture(scope="session")
def frontend(server: TritonServer) -> Iterator[FrontendProcess]:
    with local_frontend(server) as running:
        yield running


@pytest.fixture(scope="session")
def grpc_client(server: TritonServer) -> Iterator[DFlashClient]:
    with DFlashClient(server.grpc_url, "grpc", timeout_s=120) as client:
        yield client


@pytest.fixture(scope="session")
def http_client(server: TritonServer) -> Iterator[DFlashClient]:
    with DFlashClient(server.http_url, "http", timeout_s=120) as client:
        yield client


@pytest.fixture(scope="session")
def post(server: TritonServer) -> Iterator[Callable[..., httpx.Response]]:
    """POST a body to `generate` or `generate_stream`."""
    with httpx.Client(base_url=f"http://{server.http_url}", timeout=120, trust_env=False, verify=False) as http:

        def post(path: str = "generate", content: bytes | None = None, **body: Any) -> httpx.Response:
            return http.post(f"/v2/models/dflash/{path}", content=content or json.dumps(body).encode())

        yield post


@pytest.fixture(scope="session")
def metric(server: TritonServer) -> Callable[..., float]:
    """The value of a metric; a counter that was never counted is 0."""

    def metric(name: str, **labels: str) -> float:
        return MetricsPage.read(server.metrics_url).value(name, **labels)

    return metric


def settle(metric: Callable[..., float]) -> None:
    """Wait until the page has what came before, which the stub hands over once a second: what other tests did must not
    be counted as what comes next."""
    names = (
        "dflash:generation_tokens_total",
        "dflash:prompt_tokens_total",
        "dflash:request_errors_total",
        "dflash:e2e_request_latency_seconds_count",
    )
    shown: list[list[float]] = []

    def settled() -> bool:
        shown.append([metric(name) for name in names])
        return len(shown) > SETTLED and shown[-1] == shown[-SETTLED]

    eventually(settled, "the page has what came before")

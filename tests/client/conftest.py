"""Fixtures of the client's tests: a real Triton server with a toy model that echoes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.launcher.server import TritonServer
from tests.support.servers import local_server
from tests.support.waiting import eventually

TOY_REPOSITORY = Path(__file__).parent / "toy_repository"


def toy_server(environ: dict[str, str] | None = None, **options: Any) -> TritonServer:
    """A server with the toy model on free loopback ports, not started yet."""
    return local_server(environ=environ, **({"model_repository": TOY_REPOSITORY, "ready_timeout_s": 60.0} | options))


def url_of(server: TritonServer, protocol: str) -> str:
    """The address of one of a server's two protocols."""
    return server.grpc_url if protocol == "grpc" else server.http_url


@pytest.fixture(scope="session")
def cancel_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy model notes that a request of its was cancelled."""
    file = tmp_path_factory.mktemp("toy") / "cancelled.log"
    file.touch()
    return file


@pytest.fixture(scope="session")
def toy(cancel_log: Path) -> Iterator[TritonServer]:
    """One running toy server for all tests that only talk to it."""
    with toy_server({"TOY_CANCEL_LOG": str(cancel_log)}) as server:
        yield server


@pytest.fixture
def unused_address() -> Iterator[str]:
    """A loopback address that nothing listens on: bound, so that no other program can take it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def one_more_cancellation(log: Path, protocol: str = "grpc", prompt: str = "forever") -> Iterator[Callable[[], None]]:
    """Checks that the toy model sees one request more cancelled, which has this prompt. Yields what waits for that.

    None with the prompt `silent` over HTTP: Triton 2.51 notices that a client is gone only when it writes to it.
    """

    def count() -> int:
        return len(log.read_text().splitlines())

    expected = count() + (protocol == "grpc" or prompt == "forever")

    def wait() -> None:
        eventually(lambda: count() >= expected, "a cancellation", within_s=10)

    yield wait
    wait()
    assert count() == expected

"""Fixtures of the client's tests: a real Triton server with a toy model that echoes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.launcher.server import TritonServer

TOY_REPOSITORY = Path(__file__).parent / "toy_repository"


def toy_server(extra_environ: dict[str, str] | None = None, **options: Any) -> TritonServer:
    """A server with the toy model on free loopback ports, not started yet."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DFLASH_", "TOY_"))}
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    chosen = {"model_repository": TOY_REPOSITORY, "host": "127.0.0.1", "ready_timeout_s": 60.0, **ports, **options}
    return TritonServer(environ=environ | (extra_environ or {}), **chosen)


@pytest.fixture(scope="session")
def cancel_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy model notes that a request of its was cancelled."""
    return tmp_path_factory.mktemp("toy") / "cancelled.log"


@pytest.fixture(scope="session")
def toy(cancel_log: Path) -> Iterator[TritonServer]:
    """One running toy server for all tests that only talk to it."""
    with toy_server({"TOY_CANCEL_LOG": str(cancel_log)}) as server:
        yield server


@pytest.fixture
def unused_address() -> Iterator[str]:
    """A loopback address that nothing listens on: bound, so that nobody else can take it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


class one_more_cancellation:
    """Checks that the toy model saw one cancellation more at the end than at the start, waiting for it.

    Over HTTP, Triton 2.51 notices that a client is gone only when it writes to it: `told` is False where it cannot.
    """

    def __init__(self, log: Path, told: bool = True) -> None:
        self._log, self._told = log, told

    def _count(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0

    def wait(self) -> None:
        """Wait until one more was seen, or give up."""
        deadline = time.monotonic() + 10
        while self._told and self._count() == self._before and time.monotonic() < deadline:
            time.sleep(0.01)

    def __enter__(self) -> one_more_cancellation:
        self._before = self._count()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.wait()
            assert self._count() == self._before + self._told

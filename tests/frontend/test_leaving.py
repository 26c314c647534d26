"""Clients that leave, do not read, or send half a request: over real connections, on a scripted model."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from checks import silent_stream
from dflash_cli.launcher.ports import settle_ports
from dflash_openai.server import _drain, _tell_when_it_listens
from tests.support.waiting import eventually

# They start a front end, and with it the import of transformers.
pytestmark = pytest.mark.slow
SERVER = """
import sys
from pathlib import Path
from dflash_backend.without_torch import leave_torch_out
leave_torch_out()
from starlette.responses import JSONResponse
from starlette.routing import Route
from dflash_cli.launcher.ports import settle_ports
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.server import serve
from tests.frontend.scripted_pool import Script, ScriptedPool

pool = ScriptedPool(Path(sys.argv[1]))
pool.script = Script(texts=("Hello ",), endless=True)

async def asked(request):
    return JSONResponse([one.cancelled for one in pool.asked])

port = settle_ports("127.0.0.1", {"--port": 0})["--port"]
config = FrontendConfig(port=port, drain_timeout_s=600.0)
app = create_app(config, pool)
app.router.routes.append(Route("/asked", asked))
serve(app, config, lambda: print(port, flush=True))
"""


class Running:
    """A front end as a process, whose model answers without end."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port, self.num_asked_before = process, port, 0

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False, verify=False, timeout=10)

    def connect(self, **body: Any) -> socket.socket:
        """A connection that has sent a request."""
        data = json.dumps({"prompt": "a", **body}).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def asked(self) -> list[bool]:
        """Of each request that the model got in this test, whether it was cancelled."""
        found: list[bool] = self.get("/asked").json()
        return found[self.num_asked_before :]


@pytest.fixture(scope="module")
def started() -> Iterator[list[Running]]:
    """Front ends that have been started, of which the last one may still run."""
    started: list[Running] = []
    yield started
    for running in started:
        running.process.kill()
        running.process.wait()


@pytest.fixture
def running(model_dir: Path, started: list[Running]) -> Running:
    """The front end of the tests before, on which nothing runs any more; another where they have ended it."""
    if not started or started[-1].process.poll() is not None:
        command = [sys.executable, "-c", SERVER, str(model_dir)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        started.append(Running(process, int(process.stdout.readline())))
    running = started[-1]
    eventually(lambda: running.get("/health/ready").is_success, "ready", 60)
    eventually(lambda: "dflash_openai:requests_running 1\n" in running.get("/metrics").text, "nothing runs")
    running.num_asked_before += len(running.asked())
    return running


def test_a_client_that_leaves_in_mid_stream_ends_its_request(running: Running) -> None:
    connection = running.connect(stream=True)
    assert connection.recv(20).startswith(b"HTTP/1.1 200")
    assert running.asked() == [False]
    connection.close()
    eventually(lambda: running.asked() == [True], "cancelled")


def test_a_client_that_leaves_before_its_answer_ends_its_request(running: Running) -> None:
    connection = running.connect(stream=False)
    eventually(lambda: running.asked() == [False], "begun")
    connection.close()
    eventually(lambda: running.asked() == [True], "cancelled")


def test_a_client_that_leaves_ends_the_requests_of_all_its_prompts(running: Running) -> None:
    connection = running.connect(stream=True, prompt=["a", "b", "c"])
    connection.recv(20)
    eventually(lambda: len(running.asked()) == 3, "begun")
    connection.close()
    eventually(lambda: running.asked() == [True] * 3, "cancelled")


def test_many_clients_that_leave_at_once_leave_nothing_behind(running: Running) -> None:
    connections = [running.connect(stream=bool(number % 2)) for number in range(100)]
    eventually(lambda: len(running.asked()) == 100, "begun", 60)
    for connection in connections:
        connection.close()
    eventually(lambda: all(running.asked()), "cancelled", 60)
    # The model hears of a cancellation before the front end's own request has ended. The one left asks for the metrics.
    eventually(lambda: "dflash_openai:requests_running 1\n" in running.get("/metrics").text, "ended")


def test_half_a_request_keeps_no_other_from_its_answer(running: Running) -> None:
    halves = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(50)]
    for number, connection in enumerate(halves):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"[: 10 + number])
    assert running.get("/v1/models").is_success
    for connection in halves:
        connection.close()
    assert running.asked() == []


def test_a_stop_lets_streams_go_on_refuses_new_requests_and_does_not_wait_when_told_twice(running: Running) -> None:
    connection = running.connect(stream=True)
    connection.recv(20)
    running.process.terminate()
    eventually(lambda: running.get("/health/ready").status_code == 503, "draining")
    assert connection.recv(1000)
    running.process.terminate()
    # The answer ends with an error, and is complete.
    text, told_at = b"", time.monotonic()
    while piece := connection.recv(65536):
        assert time.monotonic() - told_at < 30, "it waits for the stream"
        text += piece
    assert b"the server shut down while it worked on this request" in text
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert running.process.wait(20) == 0
    connection.close()


@pytest.mark.parametrize(("runs_s", "waits_s"), [(None, 0.3), (0.1, 0.1)])
def test_a_stop_waits_for_what_runs_and_no_longer_than_it_may(runs_s: float | None, waits_s: float) -> None:
    async def drained() -> list[str]:
        loop = asyncio.get_running_loop()
        began, told = loop.time(), []

        async def stop() -> None:
            assert waits_s <= loop.time() - began < waits_s + 5
            told.append("stopped")

        running = {asyncio.current_task()}
        if runs_s is not None:
            loop.call_later(runs_s, running.clear)
        frontend = SimpleNamespace(stop_taking_requests=lambda: told.append("refuses"))
        state = SimpleNamespace(frontend=frontend, metrics=SimpleNamespace(running=running))
        await _drain(SimpleNamespace(state=state), stop, 0.3 if runs_s is None else 30.0)  # type: ignore[arg-type]
        return told

    assert asyncio.run(drained()) == ["refuses", "stopped"]


@pytest.mark.nightly
def test_a_silent_stream_comes_through_a_proxy_that_gives_up_sooner() -> None:
    assert [whole for whole, _, _ in silent_stream.run(2.0, 1.0, 0.3).values()] == [True] * 4
    assert [whole for whole, _, _ in silent_stream.run(2.0, 1.0, 0.0).values()] == [False] * 4


def test_that_it_listens_is_told_when_it_does() -> None:
    async def run() -> None:
        listening = asyncio.Event()
        port = settle_ports("127.0.0.1", {"--port": 0})["--port"]
        telling = asyncio.create_task(_tell_when_it_listens("127.0.0.1", port, listening.set))
        await asyncio.sleep(0.2)
        assert not listening.is_set()
        async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port):
            await asyncio.wait_for(listening.wait(), 10)
        await telling

    asyncio.run(run())

"""The OpenAI front end as a process beside a server: `FrontendProcess`, and `dflash-triton serve` with it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dflash_cli.launcher import frontend as module
from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.triton_install import LauncherError
from tests.support.servers import PORT_OPTIONS, answers, clean_environ
from tests.support.waiting import eventually

HOST = "127.0.0.1"
HANG_S = 3.0
WAITS_S = 4.0  # longer than one takes that does not wait
# A pipe of one page holds some 30 lines about requests.
PIPE_BYTES, NUM_REQUESTS = 4096, 300
F_SETPIPE_SZ = 1031


def free_port() -> int:
    return settle_ports(HOST, {"--port": 0})["--port"]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def frontend(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontendProcess]:
    """One before a server that is not there, so that it listens and is never ready."""
    monkeypatch.setattr(module, "READY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.1)
    frontend = FrontendProcess(HOST, free_port(), [], clean_environ(), said.append, hang_timeout_s=HANG_S)
    frontend.launch(f"{HOST}:{free_port()}", f"{HOST}:{free_port()}")
    frontend.start()
    yield frontend
    frontend.stop()


def status(frontend: FrontendProcess) -> int | None:
    try:
        return httpx.get(f"{frontend.url}/health/ready", trust_env=False, verify=False, timeout=10).status_code
    except httpx.TransportError:
        return None


def test_one_that_is_not_ready_is_told_and_answers_503(frontend: FrontendProcess, said: list[str]) -> None:
    assert said[0].startswith("warning: the OpenAI front end is not ready: ")
    eventually(lambda: status(frontend) == 503, "listening")
    answer = httpx.post(f"{frontend.url}/v1/completions", json={"prompt": "a"}, trust_env=False, verify=False)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_one_that_dies_is_started_again(frontend: FrontendProcess, said: list[str]) -> None:
    first = frontend.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)

    def restarted() -> bool:
        frontend.keep()
        return frontend.pid != first

    eventually(restarted, "restarted")
    assert "ended with status -9; it is started anew" in said[-1]
    eventually(lambda: status(frontend) == 503, "listening")


def test_one_that_hangs_is_replaced_and_one_that_does_not_is_kept(frontend: FrontendProcess, said: list[str]) -> None:
    first = frontend.pid
    assert first is not None

    def has_beaten() -> bool:
        frontend.keep()
        return frontend._has_beaten

    eventually(has_beaten, "its event loop runs")
    until = time.monotonic() + 1.5 * HANG_S
    while time.monotonic() < until:
        frontend.keep()
        assert frontend.pid == first
        time.sleep(0.1)
    os.kill(first, signal.SIGSTOP)

    def replaced() -> bool:
        frontend.keep()
        return frontend.pid != first

    eventually(replaced, "replaced")
    assert "the OpenAI front end has given no sign of life for 3 s" in said
    eventually(lambda: status(frontend) == 503, "listening")


def test_a_log_that_nobody_reads_holds_no_request_up() -> None:
    port = free_port()
    command = [sys.executable, "-m", "dflash_cli.main", "openai", "--port", str(port), "--triton", f"grpc://{HOST}:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_environ()) as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, F_SETPIPE_SZ, PIPE_BYTES)
        try:
            with httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False, verify=False, timeout=10) as http:
                eventually(lambda: answers(f"{HOST}:{port}", "/version"), "listening")
                for _ in range(NUM_REQUESTS):
                    assert http.get("/version").is_success
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            assert b'GET "/version" status=200' in process.stderr.read()
        finally:
            process.kill()


def test_one_that_ends_at_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = FrontendProcess(HOST, free_port(), ["--model-name"], clean_environ())
    frontend.launch(f"{HOST}:1", f"{HOST}:2")
    with pytest.raises(LauncherError, match="did not start"):
        frontend.start()
    assert frontend.pid is None


@pytest.mark.parametrize("ports", [(0, 2), (1, 0)])
def test_the_server_has_its_ports_before_the_front_end_begins(ports: tuple[int, int]) -> None:
    """Else it would look for a server that nobody can find, until its time is over."""
    frontend = FrontendProcess(HOST, free_port(), [], clean_environ())
    with pytest.raises(ValueError, match=f"the port of {HOST}:0 is not settled"):
        frontend.launch(*(f"{HOST}:{port}" for port in ports))
    assert frontend.pid is None


def test_it_listens_only_once_it_is_started_and_can_be_stopped_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_TIMEOUT_S", 0.0)
    frontend = FrontendProcess(HOST, free_port(), [], clean_environ())
    try:
        for _ in range(2):
            frontend.launch(f"{HOST}:{free_port()}", f"{HOST}:{free_port()}")
            frontend.stop()
        frontend.launch(f"{HOST}:{free_port()}", f"{HOST}:{free_port()}")
        time.sleep(WAITS_S)
        assert status(frontend) is None
        assert frontend.pid is not None
        frontend.start()
        assert eventually(lambda: status(frontend) == 503)
    finally:
        frontend.stop()
    assert frontend.pid is None


def test_it_is_not_waited_for_while_the_server_is_in_trouble(said: list[str]) -> None:
    """Which its keeper then says, and replaces the server."""
    frontend = FrontendProcess(HOST, free_port(), [], clean_environ(), said.append)
    looks = iter([None, "dead"])
    try:
        frontend.launch(f"{HOST}:{free_port()}", f"{HOST}:{free_port()}")
        frontend.start(lambda: next(looks))
        assert frontend.pid is not None
        assert said == []
    finally:
        frontend.stop()


@pytest.mark.parametrize(
    ("tls", "url"),
    [
        (None, "http://127.0.0.1:{port}/health/ready"),
        (SimpleNamespace(client_ca=None), "https://127.0.0.1:{port}/health/ready"),
        (SimpleNamespace(client_ca="ca.pem"), None),
    ],
)
def test_who_has_no_certificate_asks_it_whether_requests_are_taken_where_it_lets_him(tls: Any, url: str | None) -> None:
    port = free_port()
    assert FrontendProcess("0.0.0.0", port, [], tls=tls).ready_url == (url and url.format(port=port))


def test_a_port_that_is_taken_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(LauncherError, match="choose another one with --port"):
            FrontendProcess(HOST, taken.getsockname()[1], [])


def test_the_process_has_no_torch(frontend: FrontendProcess) -> None:
    eventually(lambda: status(frontend) == 503, "listening")
    with open(f"/proc/{frontend.pid}/maps", encoding="utf-8") as maps:
        assert "libtorch" not in maps.read()


@pytest.mark.server
def test_serve_answers_openais_api_and_ends_with_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    port, directory = free_port(), tmp_path_factory.mktemp("t")
    command = [sys.executable, "-m", "dflash_cli.main", "serve", *PORT_OPTIONS[2:], "--port", str(port)]
    command += ["--served-model-name", "demo", "--max-num-seqs", "4", "--max-model-len", "512"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environ = clean_environ(TMPDIR=str(directory))
    process = subprocess.Popen(command, **streams, text=True, env=environ, start_new_session=True)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "Ctrl-C stops the server.\n")
        assert f"  OpenAI   http://{HOST}:{port}/v1\n" in list(lines)
        with httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False, verify=False, timeout=60) as http:
            (ready_url,) = [path.read_text() for path in directory.glob("dflash-triton-*/ready-url")]
            assert ready_url == f"http://{HOST}:{port}/health/ready\n"
            (model,) = http.get("/v1/models").json()["data"]
            assert (model["id"], model["max_model_len"]) == ("demo", 512)
            body = {"model": "demo", "prompt": "Sam fills 4 bags", "max_tokens": 8}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 8
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{HOST}:{port}/health", trust_env=False, verify=False)
    finally:
        process.kill()
        process.wait()


def test_starts_that_fail_wait_ever_longer_until_one_has_served(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    now = 0.0
    spawned: list[float] = []
    status: int | None = None

    class Front(FrontendProcess):
        def _spawn(self) -> None:
            spawned.append(now)
            self._started_at = now
            self._process = SimpleNamespace(poll=lambda: status)  # type: ignore[assignment]

        def _end_if_it_hangs(self, process: Any, elapsed_s: float) -> None:
            pass

    monkeypatch.setattr(module, "settle_ports", lambda host, ports: ports)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    front = Front("127.0.0.1", 1, [], say=said.append)
    front._spawn()
    waits = []
    for runs_s in (70.0, *[2.0] * 7, 70.0):
        status, now = None, now + runs_s
        front.keep()
        status = 3
        ended = now
        while spawned[-1] <= ended:
            front.keep()
            now += 0.5
        now = spawned[-1]
        waits.append(spawned[-1] - ended)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30, 1]
    assert said[1] == "the OpenAI front end ended with status 3; it is started anew in 2 s"

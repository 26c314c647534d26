"""Starts a `tritonserver` on a model repository as operators do who have one already, without our launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from dflash_cli.launcher.processes import family, send
from dflash_cli.launcher.triton_install import TritonInstall

READY_S = 120.0


@dataclass(frozen=True)
class ExistingTriton:
    """A server that runs: its ports, and the file that its log goes to."""

    http_port: int
    grpc_port: int
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.http_port}{path}", timeout=10, trust_env=False)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.http_port}{path}", json=body, timeout=60, trust_env=False)


@contextmanager
def existing_triton(
    install: TritonInstall, backends: list[str], repository: Path, folder: Path, *options: str
) -> Iterator[ExistingTriton]:
    """Serve `repository` on free loopback ports; the block begins when the server answers, whatever its models say."""
    ports = _free_ports(3)
    log = folder / "triton.log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    names = ("http", "grpc", "metrics")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(install.binary),
                f"--model-repository={repository}",
                *backends,
                *(f"--{name}-address=127.0.0.1" for name in names),
                *(f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)),
                "--exit-on-error=false",
                "--exit-timeout-secs=5",
                *options,
            ],
            env=install.environment(environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = ExistingTriton(ports[0], ports[1], log)
    try:
        _wait_until_it_answers(running, process)
        yield running
    finally:
        members = family(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        send(family(process.pid, members), signal.SIGKILL)


def _wait_until_it_answers(running: ExistingTriton, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        assert process.poll() is None, running.log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, running.log.read_text(errors="replace")[-3000:]
        try:
            if running.get("/v2/health/live").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports

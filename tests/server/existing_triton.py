"""Starts a `tritonserver` on a model repository as operators do who have one already, without our launcher."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.processes import family, send
from dflash_cli.launcher.triton_install import TritonInstall
from tests.support.servers import answers, clean_environ
from tests.support.waiting import eventually

READY_S = 120.0


@dataclass(frozen=True)
class ExistingTriton:
    """A server that runs: its ports, and the file that its log goes to."""

    http_port: int
    grpc_port: int
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.http_port}{path}", timeout=10, trust_env=False, verify=False)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{self.http_port}{path}", json=body, timeout=60, trust_env=False, verify=False
        )


@contextmanager
def existing_triton(
    install: TritonInstall, backends: list[str], repository: Path, folder: Path, *options: str
) -> Iterator[ExistingTriton]:
    """Serve `repository` on free loopback ports; the block begins when the server answers, whatever its models say."""
    names = ("http", "grpc", "metrics")
    ports = settle_ports("127.0.0.1", {f"--{name}-port": 0 for name in names})
    log = folder / "triton.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(install.binary),
                f"--model-repository={repository}",
                *backends,
                *(f"--{name}-address=127.0.0.1" for name in names),
                *(f"{option}={port}" for option, port in ports.items()),
                "--exit-on-error=false",
                "--exit-timeout-secs=5",
                *options,
            ],
            env=install.environment(clean_environ()),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = ExistingTriton(ports["--http-port"], ports["--grpc-port"], log)

    def lives() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        return answers(f"127.0.0.1:{running.http_port}", "/v2/health/live")

    try:
        eventually(lives, log, READY_S)
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

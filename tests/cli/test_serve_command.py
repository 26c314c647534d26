"""`dflash-triton serve` as a process, with the toy model: how it ends, and what it writes to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from dflash_cli.launcher.processes import family, named
from dflash_client import DFlashClient
from tests.client.conftest import TOY_REPOSITORY

PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
SERVE = """
import sys
from pathlib import Path
import dflash_cli.launcher.server as launcher
launcher.asset_path = lambda *parts: Path(sys.argv[1])
from dflash_cli.main import main
sys.exit(main(["serve", *sys.argv[2:]]))
"""
READY_S = 60.0


@contextmanager
def serving(*argv: str, stderr: int | IO[Any]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and the address of its HTTP end point, once it is ready. At the end it and its files are gone."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    command = [sys.executable, "-c", SERVE, str(TOY_REPOSITORY), *PORTS, *argv]
    with tempfile.TemporaryDirectory(prefix="serve") as directory:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environ | {"TMPDIR": directory},
            start_new_session=True,
        )
        try:
            yield process, ready_address(process, directory)
            process.send_signal(signal.SIGINT)
            process.wait(30)
            assert os.listdir(directory) == []
        finally:
            process.kill()
            process.wait()


def ready_address(process: subprocess.Popen[bytes], directory: str) -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        for path in Path(directory).glob("dflash-triton-*/http-address"):
            address = path.read_text().strip()
            try:
                if httpx.get(f"http://{address}/v2/models/dflash/ready", timeout=2, trust_env=False).is_success:
                    return address
            except httpx.TransportError:
                pass
        time.sleep(0.1)
    raise AssertionError("not ready")


def ask_for(address: str, number: int) -> None:
    with DFlashClient(address, "http", timeout_s=20) as client:
        for _ in range(number):
            assert client.generate("well").text == "well"


@pytest.mark.server
def test_serve_replaces_a_dead_stub_or_ends_with_1_as_it_was_told() -> None:
    with tempfile.TemporaryFile() as said, serving("--no-restart", stderr=said) as (process, _):
        (stub,) = named(family(process.pid), "triton_python_backend_stub")
        os.kill(stub.pid, signal.SIGKILL)
        assert process.wait(30) == 1
        said.seek(0)
        assert b"the model's process, Triton's Python backend stub, has died\n" in said.read()
    with tempfile.TemporaryFile() as said, serving(stderr=said) as (process, address):
        (stub,) = named(family(process.pid), "triton_python_backend_stub")
        os.kill(stub.pid, signal.SIGKILL)
        deadline = time.monotonic() + READY_S
        while b"the server is ready again" not in read(said) and time.monotonic() < deadline:
            time.sleep(0.2)
        # The ports are the same ones.
        ask_for(address, 1)


def read(file: IO[bytes]) -> bytes:
    """All that a process has written, without moving the place where it writes."""
    return os.pread(file.fileno(), 1 << 20, 0)


@pytest.mark.server
def test_a_log_that_nobody_reads_holds_no_request_up() -> None:
    """A pipe holds 64 kB; Triton writes some 2 kB a request at this level."""
    with serving("--verbose", "--allow-api", "logging", stderr=subprocess.PIPE) as (process, address):
        url = f"http://{address}/v2/logging"
        assert httpx.post(url, json={"log_verbose_level": 1}, timeout=10, trust_env=False).is_success
        ask_for(address, 150)
        assert process.poll() is None


@pytest.mark.server
def test_a_log_on_a_full_disk_or_without_a_reader_leaves_the_server_as_it_is() -> None:
    with open("/dev/full", "wb") as full, serving("--verbose", stderr=full) as (process, address):
        ask_for(address, 3)
        assert process.poll() is None
    source, sink = os.pipe()
    os.close(source)
    with os.fdopen(sink, "wb") as broken, serving("--verbose", stderr=broken) as (process, address):
        ask_for(address, 3)
        assert process.poll() is None

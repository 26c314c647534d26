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

from dflash_cli.launcher.frontend import READY_TIMEOUT_S
from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.processes import family, named
from dflash_client import DFlashClient
from tests.client.conftest import TOY_REPOSITORY
from tests.support.scale import by_night
from tests.support.servers import PORT_OPTIONS, answers, clean_environ
from tests.support.waiting import eventually

SERVE = """
import sys
from pathlib import Path
import dflash_cli.launcher.server as launcher
launcher.asset_path = lambda *parts: Path(sys.argv[1])
from dflash_cli.main import main
sys.exit(main(["serve", *sys.argv[2:]]))
"""
COMMAND = [sys.executable, "-c", SERVE, str(TOY_REPOSITORY), *PORT_OPTIONS]
# Less than the front end is waited for.
READY_S = READY_TIMEOUT_S / 2


@contextmanager
def serving(*argv: str, stderr: int | IO[Any]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and the address of its HTTP end point, once it is ready. At the end it and its files are gone."""
    with tempfile.TemporaryDirectory(prefix="serve") as directory:
        environ = clean_environ(TMPDIR=directory)
        streams = {"stdout": subprocess.DEVNULL, "stderr": stderr}
        process = subprocess.Popen([*COMMAND, *argv], **streams, env=environ, start_new_session=True)

        def ready_address() -> str | None:
            assert process.poll() is None
            addresses = [path.read_text().strip() for path in Path(directory).glob("dflash-triton-*/http-address")]
            return next(filter(answers, addresses), None)

        try:
            yield process, eventually(ready_address, "ready", READY_S)
            process.send_signal(signal.SIGINT)
            process.wait(30)
            assert os.listdir(directory) == []
        finally:
            process.kill()
            process.wait()


def ask_for(address: str, number: int) -> None:
    with DFlashClient(address, "http", timeout_s=20) as client:
        for _ in range(number):
            assert client.generate("well").text == "well"


@pytest.mark.server
@pytest.mark.parametrize(
    ("number", "loading"),
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        by_night(signal.SIGINT, False),
        by_night(signal.SIGTERM, True),
    ],
)
def test_a_signal_ends_it_cleanly_within_ten_seconds(number: signal.Signals, loading: bool) -> None:
    environ = os.environ | ({"TOY_HANG": "1"} if loading else {})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(COMMAND, **streams, text=True, env=environ, start_new_session=True)
    assert process.stdout is not None
    until = "loading cache" if loading else "Ctrl-C stops the server."
    output = []
    for line in process.stdout:
        output.append(line)
        if until in line:
            break
    members = family(process.pid)
    asked = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert time.monotonic() - asked < 10
    assert family(process.pid, members) == set()
    text = "".join(output)
    assert "loading weights 50%" in text
    if not loading:
        assert " generate 'Sam fills 4 bags" in text
        assert "curl -s http://127.0.0.1:" in text


@pytest.mark.server
def test_an_error_that_ends_the_load_is_said_once() -> None:
    command = [sys.executable, "-m", "dflash_cli.main", "serve", "--target", "/no/such/model", *PORT_OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("target_model is '/no/such/model'") == 1


@pytest.mark.server
def test_a_dead_stub_is_replaced_or_the_end_with_1_as_it_was_told() -> None:
    with tempfile.TemporaryFile() as said, serving("--no-restart", stderr=said) as (process, _):
        (stub,) = named(family(process.pid), "triton_python_backend_stub")
        os.kill(stub.pid, signal.SIGKILL)
        assert process.wait(30) == 1
        assert b"the model's process, Triton's Python backend stub, has died\n" in read(said)
    # Also while the OpenAI front end starts, which is not ready before the server is.
    port = settle_ports("127.0.0.1", {"--port": 0})["--port"]
    with tempfile.TemporaryFile() as said, serving("--port", str(port), stderr=said) as (process, address):
        (stub,) = named(family(process.pid), "triton_python_backend_stub")
        os.kill(stub.pid, signal.SIGKILL)
        eventually(lambda: b"the server is ready again" in read(said), "it is replaced", READY_S)
        # The ports are the same ones.
        ask_for(address, 1)


def read(file: IO[bytes]) -> bytes:
    """All that a process has written, without moving the place where it writes."""
    return os.pread(file.fileno(), 1 << 20, 0)


@pytest.mark.server
def test_a_log_without_a_reader_holds_no_request_up() -> None:
    """A pipe holds 64 kB; Triton writes some 2 kB a request at this level."""
    with serving("--verbose", "--allow-api", "logging", stderr=subprocess.PIPE) as (process, address):
        url = f"http://{address}/v2/logging"
        assert httpx.post(url, json={"log_verbose_level": 1}, timeout=10, trust_env=False, verify=False).is_success
        ask_for(address, 150)
        assert process.poll() is None


@pytest.mark.server
def test_a_log_on_a_full_disk_or_to_a_closed_pipe_leaves_the_server_as_it_is() -> None:
    source, sink = os.pipe()
    os.close(source)
    for descriptor in (os.open("/dev/full", os.O_WRONLY), sink):
        with os.fdopen(descriptor, "wb") as stream, serving("--verbose", stderr=stream) as (process, address):
            ask_for(address, 3)
            assert process.poll() is None

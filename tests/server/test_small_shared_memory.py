"""A server whose /dev/shm is as small as a container's may be: an answer that does not fit it ends one request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.processes import family, gone, send
from dflash_client import DFlashClient
from dflash_client.errors import Internal

PRIVATE = ["unshare", "--mount", "--propagation", "private"]
MOUNT = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
# Of the demo pair's vocabulary: about 1.5 kB a token and completion, so 4 MB.
LARGE = {"n": 8, "max_tokens": 330, "logprobs": 20, "temperature": 0, "ignore_eos": True}
READY_S = 120.0


@pytest.fixture
def ports() -> dict[str, int]:
    return settle_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0})


@pytest.fixture
def small(ports: dict[str, int]) -> Iterator[str]:
    """`host:port` of the HTTP end point of a server that has a /dev/shm of 4 MB of its own."""
    if subprocess.run([*PRIVATE, "sh", "-c", MOUNT], capture_output=True).returncode:
        pytest.skip("this user may not mount a /dev/shm of its own")
    options = " ".join(f"{name} {number}" for name, number in ports.items())
    serve = f"{sys.executable} -m dflash_cli.main serve --host 127.0.0.1 {options}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    process = subprocess.Popen([*PRIVATE, "sh", "-c", f"{MOUNT} && exec {serve}"], env=environ, start_new_session=True)
    try:
        url = f"127.0.0.1:{ports['--http-port']}"
        wait_until_ready(process, url)
        yield url
    finally:
        members = family(process.pid)
        process.send_signal(signal.SIGINT)
        gone(members, 20.0)
        send(family(process.pid, members), signal.SIGKILL)
        process.wait(5)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            if httpx.get(f"http://{url}/v2/models/dflash/ready", timeout=2, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready within {READY_S} s")


def test_an_answer_that_does_not_fit_ends_its_request_and_no_other(small):
    with DFlashClient(small, "http", timeout_s=60) as client:
        stream = client.stream("Tell me a story.", temperature=0, max_tokens=900, ignore_eos=True)
        deltas = [next(stream)]
        with pytest.raises(Internal, match="does not fit the shared memory between Triton and the model"):
            client.generate("Tell me a story.", **LARGE)
        deltas += stream
        assert sum(delta.num_output_tokens for delta in deltas) == 900
        assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2

"""A server whose /dev/shm is as small as a container's may be: an answer that does not fit it ends one request."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.processes import family, gone, send
from dflash_client import DFlashClient
from dflash_client.errors import Internal
from tests.support.servers import answers, clean_environ
from tests.support.waiting import eventually

PRIVATE = ["unshare", "--mount", "--propagation", "private"]
MOUNT = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
# Of the demo pair's vocabulary: about 1.5 kB a token and completion, so 4 MB.
LARGE = {"n": 8, "max_tokens": 330, "logprobs": 20, "temperature": 0, "ignore_eos": True}
READY_S = 120.0


@pytest.fixture
def small() -> Iterator[str]:
    """`host:port` of the HTTP end point of a server that has a /dev/shm of 4 MB of its own."""
    if subprocess.run([*PRIVATE, "sh", "-c", MOUNT], capture_output=True).returncode:
        pytest.skip("this user may not mount a /dev/shm of its own")
    ports = settle_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0})
    options = " ".join(f"{name} {number}" for name, number in ports.items())
    serve = "-m dflash_cli.main serve --host 127.0.0.1 --openai-port 0 --set kv_cache_gb=0.1"
    command = f"{MOUNT} && exec {sys.executable} {serve} {options}"
    process = subprocess.Popen([*PRIVATE, "sh", "-c", command], env=clean_environ(), start_new_session=True)
    url = f"127.0.0.1:{ports['--http-port']}"

    def ready() -> bool:
        assert process.poll() is None, "the server ended"
        return answers(url)

    try:
        eventually(ready, "ready", READY_S)
        yield url
    finally:
        members = family(process.pid)
        process.send_signal(signal.SIGINT)
        gone(members, 20.0)
        send(family(process.pid, members), signal.SIGKILL)
        process.wait(5)


def test_an_answer_that_does_not_fit_ends_its_request_and_no_other(small):
    with DFlashClient(small, "http", timeout_s=60) as client:
        stream = client.stream("Tell me a story.", temperature=0, max_tokens=600, ignore_eos=True)
        deltas = [next(stream)]
        with pytest.raises(Internal, match="does not fit the shared memory between Triton and the model"):
            client.generate("Tell me a story.", **LARGE)
        deltas += stream
        assert sum(delta.num_output_tokens for delta in deltas) == 600
        assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2

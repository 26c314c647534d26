"""More connections than descriptors: those that are silent are closed in the end, and others are served again."""

from __future__ import annotations

import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dflash_openai.connections import ConnectionGate, listening_socket, num_open_files
from tests.client.tls_servers import Certificates
from tests.frontend.test_over_the_wire import certificates, free_port  # noqa: F401
from tests.support.waiting import eventually


@pytest.fixture
def limit() -> Iterator[None]:
    """The limits of this process are restored."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def takes(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


def test_the_gate_keeps_new_connections_out_while_most_descriptors_are_in_use(limit: None) -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        listener.listen(16)
        port = listener.getsockname()[1]
        gate = ConnectionGate(listener, most_files=1000)
        gate.look(500)
        assert (gate.closed, takes(port)) == (False, True)
        gate.look(501)
        assert (gate.closed, takes(port)) == (True, False)
        # What is in the queue is accepted with what was kept back.
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1000
        gate.look(438)
        assert (gate.closed, takes(port)) == (True, False)
        gate.look(436)
        assert (gate.closed, takes(port)) == (False, True)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1000 - gate.backlog - 32


def test_no_other_process_listens_beside_it() -> None:
    with listening_socket("127.0.0.1", 0) as listener, socket.socket() as other:
        listener.listen(1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(listener.getsockname())


def test_open_files_are_counted() -> None:
    before = num_open_files()
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.socket())
        assert num_open_files() == before + 10


@pytest.mark.nightly
@pytest.mark.parametrize("num_files", [256, 512])
def test_more_silent_tls_connections_than_descriptors_pass(num_files: int, certificates: Certificates) -> None:  # noqa: F811
    port = free_port()
    context = ssl._create_unverified_context()

    def is_served() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), 3) as plain, context.wrap_socket(plain) as connection:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return connection.recv(12) == b"HTTP/1.1 200"
        except OSError:
            return False

    options = ["--tls-cert", str(certificates.server), "--tls-key", str(certificates.server_key)]
    command = [sys.executable, "-m", "tests.frontend.scripted_server", str(port), *options]
    limited = ["bash", "-c", f'ulimit -n {num_files}; exec "$@"', "_", *command]
    with subprocess.Popen(limited, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(is_served, "serves", 60)
            silent = []
            for _ in range(num_files + 100):
                connection = socket.socket()
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", port))
                silent.append(connection)
            time.sleep(1.0)
            # While they are held: granian closes a handshake that is late after 10 seconds.
            eventually(is_served, "serves others beside silent connections", 40)
            for connection in silent:
                connection.close()
            eventually(is_served, "serves again", 20)
        finally:
            process.terminate()
            assert process.wait(20) == 0

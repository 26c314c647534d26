"""HTTPS, bodies and connections on a real socket: what only the HTTP server decides."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import httpx
import pytest

from tests.cli.test_security_options import pkcs8
from tests.client.tls_servers import Certificates

pytestmark = pytest.mark.slow
KEY = "alice-secret-key"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates.make(tmp_path_factory.mktemp("certificates"))
    pkcs8(made.server_key)
    return made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(*options: str) -> Iterator[int]:
    """The port of a front end on a scripted model, with these options."""
    port = free_port()
    command = [sys.executable, "-m", "tests.frontend.scripted_server", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait(20)


def wait_until_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while http.get("/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def https(port: int, certificates: Certificates, with_certificate: bool) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    if with_certificate:
        context.load_cert_chain(str(certificates.client), str(certificates.client_key))
    return httpx.Client(base_url=f"https://localhost:{port}", verify=context, trust_env=False, timeout=20)


def test_https_is_spoken_with_the_given_certificate_and_nothing_else(certificates: Certificates) -> None:
    options = ("--tls-cert", str(certificates.server), "--tls-key", str(certificates.server_key), "--api-key", KEY)
    with served(*options) as port, https(port, certificates, with_certificate=False) as http:
        wait_until_ready(http)
        body = {"prompt": "hello"}
        assert http.post("/v1/completions", json=body).status_code == 401
        answer = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
        assert answer.json()["choices"][0]["text"] == "Hello!"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
            httpx.get(f"https://localhost:{port}/health", trust_env=False)


def test_with_an_authority_for_clients_only_those_with_its_certificate_come_in(certificates: Certificates) -> None:
    options = ("--tls-cert", str(certificates.server), "--tls-key", str(certificates.server_key))
    with served(*options, "--tls-client-ca", str(certificates.ca)) as port:
        with https(port, certificates, with_certificate=True) as http:
            wait_until_ready(http)
        with https(port, certificates, with_certificate=False) as http, pytest.raises(httpx.TransportError):
            http.get("/health/ready")


def first_line(port: int, sent: bytes) -> bytes:
    """How the server answers bytes after which nothing comes."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(sent)
        return connection.makefile("rb").readline()


def test_an_idle_connection_is_kept_for_the_time_of_the_option() -> None:
    """A proxy that keeps it longer would send a request while it is closed."""
    with served("--keep-alive-timeout", "2") as port, closing(HTTPConnection("127.0.0.1", port, timeout=10)) as http:
        for _ in range(3):
            http.request("GET", "/health/live")
            answer = http.getresponse()
            answer.read()
            assert answer.status == 200
            time.sleep(1.0)
        began = time.monotonic()
        assert http.sock.recv(1) == b""
        assert time.monotonic() - began < 5


def test_bodies_are_bounded_in_size_and_time() -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with served("--max-body-mb", "0.01", "--body-timeout", "0.5", "--no-access-log") as port:
        assert b" 413 " in first_line(port, post + b"Content-Length: 999999999\r\n\r\n{")
        chunked = post + b"Transfer-Encoding: chunked\r\n\r\n" + 3 * (b"1000\r\n" + b"x" * 4096 + b"\r\n")
        assert b" 413 " in first_line(port, chunked)
        assert b" 408 " in first_line(port, post + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in first_line(port, post + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        assert b" 400 " in first_line(port, post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
        with httpx.Client(base_url=f"http://localhost:{port}", trust_env=False) as http:
            wait_until_ready(http)
            assert http.post("/v1/completions", json={"prompt": "x" * 20_000}).status_code == 413
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200

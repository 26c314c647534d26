"""TLS, headers, keys and path prefixes, over both protocols and with both clients, against real servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from dflash_cli.main import main
from dflash_client import (
    AsyncDFlashClient,
    Cancelled,
    ClientError,
    ConnectionFailed,
    DFlashClient,
    PermissionDenied,
    RequestTimeout,
    Unauthenticated,
)
from dflash_client.address import parse_url
from dflash_client.grpc_messages import translate
from tests.client.tls_servers import Certificates, grpc_server, http_server

PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "http"])
SERVERS = {"grpc": grpc_server, "http": http_server}
Answers = tuple[bool, str, str]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("tls"))


def url(protocol: str, address: str, secure: bool = True) -> str:
    return f"{protocol}{'s' if secure else ''}://{address}"


async def asked_with_asyncio(address: str, **options: Any) -> Answers:
    async with AsyncDFlashClient(address, timeout_s=20, **options) as client:
        ready = await client.ready()
        text = (await client.generate("one")).text
        return ready, text, "".join([delta.text async for delta in client.stream("two")])


def asked(address: str, **options: Any) -> Answers:
    """Whether the server is ready, and two answers."""
    with DFlashClient(address, timeout_s=20, **options) as client:
        return client.ready(), client.generate("one").text, "".join(delta.text for delta in client.stream("two"))


@pytest.fixture(params=[asked, lambda *where, **options: asyncio.run(asked_with_asyncio(*where, **options))])
def ask(request: pytest.FixtureRequest) -> Callable[..., Answers]:
    """`asked`, with either client."""
    return request.param


@PROTOCOLS
def test_requests_go_over_tls_with_headers_and_key(
    protocol: str, ask: Callable[..., Answers], certificates: Certificates
) -> None:
    with SERVERS[protocol](certificates) as seen:
        options = {"headers": {"X-Team": "blue"}, "api_key": "secret", "ca_cert": certificates.ca}
        assert ask(url(protocol, seen.address), **options) == (True, "one", "two")
    assert len(seen.headers) == 4  # readiness is two questions
    for headers in seen.headers:
        assert (headers["x-team"], headers["authorization"]) == ("blue", "Bearer secret")


@PROTOCOLS
def test_a_server_that_asks_who_is_calling_gets_our_certificate(protocol: str, certificates: Certificates) -> None:
    with SERVERS[protocol](certificates, mutual=True) as seen:
        where, trust = url(protocol, seen.address), {"ca_cert": certificates.ca}
        ours = {"client_cert": certificates.client, "client_key": certificates.client_key}
        assert asked(where, **trust, **ours) == (True, "one", "two")
        with pytest.raises(ConnectionFailed):
            asked(where, **trust)


NOT_TRUSTED = r"not trusted.*--ca-cert"
KEY_REFUSED = r"does not let this request in .*; (give a valid api_key|ask whoever runs it)"


@PROTOCOLS
@pytest.mark.parametrize(
    ("shown", "secure", "options", "kind", "words"),
    [
        ("server", True, {"ca_cert": "other"}, ConnectionFailed, NOT_TRUSTED),
        ("server", True, {}, ConnectionFailed, NOT_TRUSTED),
        ("elsewhere", True, {"ca_cert": "ca"}, ConnectionFailed, "not trusted"),
        (None, True, {"ca_cert": "ca"}, ConnectionFailed, "does not speak TLS; begin the URL with {protocol}://"),
        ("server", False, {}, ConnectionFailed, "TLS.*{protocol}s://"),
        (None, False, {"api_key": "wrong"}, Unauthenticated, KEY_REFUSED),
        (None, False, {"api_key": "other"}, PermissionDenied, KEY_REFUSED),
    ],
)
def test_a_connection_that_is_not_safe_or_not_allowed_is_refused_with_what_to_do(
    protocol: str,
    ask: Callable[..., Answers],
    shown: str | None,
    secure: bool,
    options: dict[str, str],
    kind: type,
    words: str,
    certificates: Certificates,
) -> None:
    """`shown` is the certificate of the server, which has none in the clear; `secure` whether we speak TLS to it."""
    if "ca_cert" in options:
        options = {"ca_cert": getattr(certificates, options["ca_cert"])}
    with (
        SERVERS[protocol](certificates if shown else None, elsewhere=shown == "elsewhere") as seen,
        pytest.raises(kind, match=words.format(protocol=protocol)),
    ):
        ask(url(protocol, seen.address, secure), **options)


def test_a_server_that_hangs_up_on_what_is_no_http_may_speak_no_tls(ask: Callable[..., Answers]) -> None:
    """Triton's HTTP server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(4096)
                    connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionFailed, match=f"^{address} ended the TLS handshake; .* begin with http://"):
            ask(f"https://{address}")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_server_that_refuses_before_it_has_read_the_request_is_heard_each_time() -> None:
    """grpc.aio's streams of requests would report some of these as INTERNAL."""

    async def refusals(address: str) -> set[type[Exception]]:
        kinds: set[type[Exception]] = set()
        async with AsyncDFlashClient(address, api_key="other") as client:
            for _ in range(40):
                try:
                    await client.generate("x" * 1_000_000)
                except ClientError as error:
                    kinds.add(type(error))
        return kinds

    with grpc_server(None) as seen:
        assert asyncio.run(refusals(seen.address)) == {PermissionDenied}


@pytest.mark.parametrize("prefix", ["/llm/one", "/llm/one/", "/llm/one/v2"])
def test_a_path_comes_before_tritons_own(prefix: str) -> None:
    with http_server(None) as seen:
        assert asked(f"http://{seen.address}{prefix}") == (True, "one", "two")
    verbs = ("ready", "generate", "generate", "generate_stream")
    assert seen.paths == [f"/llm/one/v2/models/dflash/{verb}" for verb in verbs]


@PROTOCOLS
def test_a_request_over_tls_is_cancelled_from_another_thread_and_ends_with_its_time(
    protocol: str, certificates: Certificates
) -> None:
    with SERVERS[protocol](certificates) as seen:
        options = {"ca_cert": certificates.ca}
        with DFlashClient(url(protocol, seen.address), timeout_s=20, **options) as client:
            stream = client.stream("wait")
            assert next(stream).text == "wait"
            threading.Timer(0.1, stream.cancel).start()
            began = time.monotonic()
            with pytest.raises(Cancelled):
                next(stream)
            assert time.monotonic() - began < 10
        with (
            DFlashClient(url(protocol, seen.address), timeout_s=1, **options) as client,
            pytest.raises(RequestTimeout),
        ):
            list(client.stream("wait"))


def test_http_to_a_grpc_port_says_which_protocol_to_use() -> None:
    with grpc_server(None) as seen, DFlashClient(f"http://{seen.address}", timeout_s=20) as client:
        with pytest.raises(ConnectionFailed, match=r"does not speak HTTP; .* use grpc:// \(--protocol grpc\)"):
            client.generate("one")
        assert isinstance(client.probe(), ConnectionFailed)


def test_grpc_to_an_http_port_asks_for_the_right_one() -> None:
    with http_server(None) as seen, pytest.raises(ConnectionFailed, match="is this its gRPC port"):
        asked(seen.address)


class _Http2Status(grpc.RpcError):
    """What grpc makes of an HTTP/2 answer that is no gRPC, from a web server or a proxy."""

    def __init__(self, code: grpc.StatusCode, status: int) -> None:
        super().__init__()
        self._code, self._status = code, status

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return f"Received http2 header with status: {self._status}"


def test_an_http2_server_that_is_no_grpc_server_is_said() -> None:
    error = translate(_Http2Status(grpc.StatusCode.UNIMPLEMENTED, 404), parse_url("grpcs://h:1", "grpc"))
    assert isinstance(error, ConnectionFailed)
    assert str(error).startswith("what answers at h:1 is no gRPC server (HTTP status 404)")
    refused = translate(_Http2Status(grpc.StatusCode.UNAUTHENTICATED, 401), parse_url("grpcs://h:1", "grpc"))
    assert isinstance(refused, Unauthenticated)


@PROTOCOLS
def test_waiting_for_a_server_says_why_it_did_not_become_ready(protocol: str, certificates: Certificates) -> None:
    with (
        SERVERS[protocol](certificates) as seen,
        DFlashClient(url(protocol, seen.address)) as client,
        pytest.raises(RequestTimeout, match=r"not ready within 1 s; last: .* is not trusted"),
    ):
        client.wait_ready(1.0)


@pytest.mark.parametrize(
    ("address", "options", "words"),
    [
        ("grpc://h", {"ca_cert": "x"}, "begin it with grpcs://"),
        ("http://h", {"ca_cert": "x"}, "begin it with https://"),
        ("https://h", {"ca_cert": "/no/such.pem"}, "ca_cert: /no/such.pem cannot be read"),
        ("grpcs://h", {"ca_cert": __file__}, "holds no certificates in PEM"),
        ("grpcs://h", {"client_cert": "x"}, "go together"),
        ("grpc://h", {"headers": {"a b": "c"}}, "'a b' cannot be sent"),
        ("grpc://h", {"headers": {"x-data-bin": "c"}}, "'x-data-bin' cannot be sent"),
        ("grpc://h", {"headers": {"x": "se\ncret"}}, "value of the header 'x' cannot be sent"),
        ("grpc://h", {"api_key": "se\ncret"}, "value of the header 'authorization' cannot be sent"),
        ("grpc://h", {"api_key": "k", "headers": {"Authorization": "k"}}, "either api_key or"),
    ],
)
def test_options_that_make_no_sense_are_refused_and_no_secret_is_said(
    address: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        DFlashClient(address, **options)
    assert "secret" not in str(refused.value).replace("\n", "")


@PROTOCOLS
def test_the_command_line_has_the_same_options(
    protocol: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_API_KEY", "from the environment")
    with SERVERS[protocol](certificates, mutual=True) as seen:
        argv = ["generate", "hi", "--url", url(protocol, seen.address), "--header", "X-Team: blue"]
        argv += ["--ca-cert", str(certificates.ca), "--client-cert", str(certificates.client)]
        argv += ["--client-key", str(certificates.client_key)]
        assert main(argv) == 0
        assert main([*argv, "--api-key", "given"]) == 0
    assert capsys.readouterr().out == "hi\nhi\n"
    assert [headers["authorization"] for headers in seen.headers] == ["Bearer from the environment", "Bearer given"]
    assert {headers["x-team"] for headers in seen.headers} == {"blue"}


def test_a_header_is_a_name_and_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--header", "s3cret"])
    error = capsys.readouterr().err
    assert "a header is NAME: VALUE" in error
    assert "s3cret" not in error


def test_a_client_in_the_clear_reads_no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(**_options: object) -> None:
        raise AssertionError("authorities were read")

    monkeypatch.setattr("ssl.create_default_context", unused)
    DFlashClient("http://127.0.0.1:1").close()
    with pytest.raises(AssertionError, match="authorities"):
        DFlashClient("https://127.0.0.1:1")

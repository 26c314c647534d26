"""Safe unless asked otherwise: addresses, APIs that need a key, shared memory, TLS, and options that are passed on."""

from __future__ import annotations

import argparse
import glob
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_cli.commands.serve import warnings
from dflash_cli.commands.serve_options import HOST_ENV
from dflash_cli.launcher.ports import is_loopback
from dflash_cli.launcher.server import GrpcTls, LauncherError, TritonServer
from dflash_cli.launcher.server_files import SEGMENT_PREFIX
from dflash_cli.launcher.server_options import GRPC_KEY_HEADER, KEY_HEADER, OWNED, checked_extra
from dflash_cli.main import main, parser
from dflash_client import DFlashClient
from tests.client.conftest import toy_server

# One request of each restricted API, over HTTP and over gRPC.
HTTP = {
    "shared-memory": ("POST", "/v2/systemsharedmemory/region/mine/register", {"key": "/no", "byte_size": 8}),
    "trace": ("GET", "/v2/trace/setting", None),
    "logging": ("POST", "/v2/logging", {"log_error": True}),
    "model-repository": ("POST", "/v2/repository/index", {}),
}
GRPC = {
    "shared-memory": ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
    "trace": ("TraceSetting", service_pb2.TraceSettingRequest()),
    "logging": ("LogSettings", service_pb2.LogSettingsRequest()),
    "model-repository": ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
}


def over_http(server: TritonServer, api: str, key: str | None = None) -> int:
    method, path, body = HTTP[api]
    headers = {} if key is None else {KEY_HEADER: key}
    url = f"http://{server.http_url}{path}"
    return httpx.request(method, url, json=body, headers=headers, timeout=10, trust_env=False).status_code


def over_grpc(server: TritonServer, api: str, key: str | None = None) -> str:
    name, message = GRPC[api]
    with grpc.insecure_channel(server.grpc_url) as channel:
        call: Callable[..., Any] = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), name)
        try:
            call(message, timeout=10, metadata=[] if key is None else [(GRPC_KEY_HEADER, key)])
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


@pytest.mark.server
@pytest.mark.parametrize("api", HTTP)
def test_an_api_that_reaches_into_the_server_needs_the_key(toy: TritonServer, api: str) -> None:
    for key in (None, "wrong"):
        assert over_http(toy, api, key) == 403
        assert over_grpc(toy, api, key) == "UNAVAILABLE"
    assert over_http(toy, api, toy.api_key) != 403
    assert over_grpc(toy, api, toy.api_key) == "OK"
    assert (toy.folder / "api-key").read_text().strip() == toy.api_key
    assert stat.S_IMODE(toy.folder.stat().st_mode) == 0o700


@pytest.mark.server
def test_apis_that_are_allowed_and_the_repository_of_an_explicit_loopback_server_need_none() -> None:
    with toy_server(explicit=True, allow_apis=["logging"]) as server:
        assert {api: over_http(server, api) for api in HTTP} == {
            "shared-memory": 403,
            "trace": 403,
            "logging": 200,
            "model-repository": 200,
        }
        assert {api: over_grpc(server, api) for api in GRPC} == {
            "shared-memory": "UNAVAILABLE",
            "trace": "UNAVAILABLE",
            "logging": "OK",
            "model-repository": "OK",
        }


def test_on_an_address_that_others_reach_explicit_does_not_open_the_repository() -> None:
    assert "model-repository" in TritonServer(explicit=True, host="0.0.0.0", environ={}).restricted_apis
    asked = TritonServer(explicit=True, host="0.0.0.0", allow_apis=["model-repository"], environ={})
    assert "model-repository" not in asked.restricted_apis


def test_an_api_that_is_not_restricted_cannot_be_allowed() -> None:
    with pytest.raises(LauncherError, match=r"'health' is no API that is restricted; those are: shared-memory, trace"):
        TritonServer(allow_apis=["health"], environ={})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses_are_told_from_others(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.server
def test_a_server_listens_on_this_machine_alone_unless_told_otherwise() -> None:
    assert TritonServer(environ={}).host == "127.0.0.1"
    address = other_address()
    with toy_server() as server:
        for port in (server.http_port, server.grpc_port, server.metrics_port):
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
            with pytest.raises(ConnectionRefusedError), socket.create_connection((address, port), timeout=5):
                pass


def other_address() -> str:
    """An address of this machine by which others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: this asks for the route.
            probe.connect(("203.0.113.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.mark.server
def test_shared_memory_is_the_owners_alone_also_after_a_reload_and_has_the_prefix_that_triton_protects() -> None:
    with toy_server(explicit=True) as server, DFlashClient(server.grpc_url, timeout_s=20) as client:
        for reload in (False, True):
            if reload:
                for action in ("unload", "load"):
                    url = f"http://{server.http_url}/v2/repository/models/dflash/{action}"
                    assert httpx.post(url, json={}, timeout=60, trust_env=False).is_success
                server.keep_safe()
            assert client.generate("x" * (3 << 20), max_tokens=1).text == "x"
            pattern = server._running_files().segments_pattern
            segments = [Path(name) for name in glob.glob(pattern)]
            assert segments
            for segment in segments:
                assert stat.S_IMODE(segment.stat().st_mode) == 0o600
                assert segment.name.startswith("triton_python_backend_shm_region_")
    assert glob.glob(pattern) == []
    assert SEGMENT_PREFIX.startswith("triton_python_backend_shm_region_")


@pytest.mark.parametrize("option", sorted(OWNED))
def test_an_option_that_the_launcher_sets_itself_is_not_passed_on(option: str) -> None:
    with pytest.raises(LauncherError, match=f"tritonserver's --{option} cannot be passed on: {OWNED[option][:20]}"):
        checked_extra(["--http-thread-count=4", f"--{option}=1"])


def test_what_is_no_option_is_not_passed_on() -> None:
    assert checked_extra(["--http-thread-count", "4", "--trace-config=mode=triton"]) != []
    with pytest.raises(LauncherError, match="'nonsense' is no option of tritonserver"):
        checked_extra(["nonsense"])


@pytest.mark.server
def test_other_options_reach_tritonserver() -> None:
    with toy_server(extra_options=["--http-thread-count=3", "--allow-cpu-metrics=false"]) as server:
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
        assert b"--http-thread-count=3" in command
        assert b"nv_cpu" not in httpx.get(f"http://{server.metrics_url}/metrics", trust_env=False).content


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*made, "-addext", names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    return cert, key


@pytest.mark.server
def test_grpc_is_encrypted_when_a_certificate_is_given(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with toy_server(tls=GrpcTls(cert, key)) as server:
        request = service_pb2.ServerLiveRequest()
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ServerLive(request, timeout=10).live
        with DFlashClient(f"grpcs://localhost:{server.grpc_port}", ca_cert=cert, timeout_s=10) as client:
            assert client.generate("hidden").text == "hidden"
        with grpc.insecure_channel(server.grpc_url) as channel, pytest.raises(grpc.RpcError):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(request, timeout=3)


@pytest.mark.server
def test_clients_without_a_certificate_are_refused_when_an_authority_is_given(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with toy_server(tls=GrpcTls(cert, key, client_ca=cert)) as server:
        request = service_pb2.ServerLiveRequest()
        known = grpc.ssl_channel_credentials(cert.read_bytes(), key.read_bytes(), cert.read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", known) as channel:
            assert service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(request, timeout=10).live
        unknown = grpc.ssl_channel_credentials(cert.read_bytes())
        with (
            grpc.secure_channel(f"localhost:{server.grpc_port}", unknown) as channel,
            pytest.raises(grpc.RpcError),
        ):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(request, timeout=3)


def test_a_file_for_tls_that_is_not_there_is_named() -> None:
    with pytest.raises(LauncherError, match=r"the certificate for TLS, /no/cert\.pem, is no file that can be read"):
        TritonServer(tls=GrpcTls(Path("/no/cert.pem"), Path("/no/key.pem")), environ={})


def parsed(*argv: str) -> argparse.Namespace:
    arguments, unknown = parser().parse_known_args(["serve", *argv])
    assert unknown == []
    return arguments


@pytest.mark.parametrize(
    ("argv", "model", "passed_on"),
    [
        ([], None, []),
        (["Qwen/Qwen3-8B", "--verbose"], "Qwen/Qwen3-8B", []),
        (["--verbose", "Qwen/Qwen3-8B", "--", "--a=1", "--b", "2"], "Qwen/Qwen3-8B", ["--a=1", "--b", "2"]),
        (["--", "--a=1"], None, ["--a=1"]),
    ],
)
def test_serve_takes_the_model_as_its_argument_and_what_follows_two_dashes_for_tritonserver(
    argv: list[str], model: str | None, passed_on: list[str]
) -> None:
    arguments = parsed(*argv)
    assert (arguments.model, arguments.tritonserver_options) == (model, passed_on)


def test_an_image_can_change_the_address_that_serve_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_ENV, raising=False)
    assert parsed().host == "127.0.0.1"
    monkeypatch.setenv(HOST_ENV, "0.0.0.0")
    assert parsed().host == "0.0.0.0"
    assert parsed("--host", "127.0.0.1").host == "127.0.0.1"
    # It is no setting of the engine.
    assert TritonServer(environ={HOST_ENV: "0.0.0.0"}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "a/b", "--target", "c/d"], "the model is given twice: a/b and --target c/d"),
        (["serve", "--grpc-tls-cert", "cert.pem"], "needs both --grpc-tls-cert and --grpc-tls-key"),
        (["serve", "--allow-api", "health"], "'health' is no API that is restricted"),
        (["serve", "--", "--http-port=1"], "tritonserver's --http-port cannot be passed on: use --http-port"),
    ],
)
def test_options_of_serve_that_make_no_sense_end_with_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said", "unsaid"),
    [
        ([], ["is for trying out on one machine"], ["WARNING"]),
        (["--host", "0.0.0.0"], ["is for trying out", "WARNING: --host 0.0.0.0", "CVE-2025-23310"], []),
        (["--host", "0.0.0.0", "--explicit"], ["WARNING: --host"], ["can run code as"]),
        (["--host", "0.0.0.0", "--explicit", "--allow-api", "model-repository"], ["can run code as the user"], []),
        (["--explicit"], [], ["WARNING"]),
    ],
)
def test_what_is_not_safe_is_said_before_the_start(argv: list[str], said: list[str], unsaid: list[str]) -> None:
    text = "\n".join(warnings(parsed(*argv)))
    assert all(words in text for words in said)
    assert not any(words in text for words in unsaid)

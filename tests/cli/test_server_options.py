"""Safe unless asked otherwise: addresses, APIs that need a key, shared memory, TLS, and options that are passed on."""

from __future__ import annotations

import argparse
import glob
import json
import shlex
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_cli.commands.serve import EXAMPLE_PROMPT, OTHER_PROMPT, _endpoints, _key_lines, _tries, warnings
from dflash_cli.commands.serve_options import HOST_ENV
from dflash_cli.launcher.leftovers import SEGMENT_PREFIX
from dflash_cli.launcher.ports import is_loopback
from dflash_cli.launcher.server import GrpcTls, LauncherError, TritonServer
from dflash_cli.launcher.server_options import (
    GRPC_KEY_HEADER,
    KEY_HEADER,
    OWNED,
    RESTRICTED_APIS,
    addresses,
    checked_extra,
)
from dflash_cli.main import main, parser
from dflash_client import ClientError, DFlashClient
from tests.cli.test_security_options import pkcs8
from tests.client.conftest import toy_server
from tests.client.tls_servers import Certificates
from tests.support.scale import by_night
from tests.support.servers import change_model

# Another one of this machine's own.
METRICS_HOST = "127.0.0.2"
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
    return httpx.request(method, url, json=body, headers=headers, timeout=10, trust_env=False, verify=False).status_code


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


@pytest.fixture(scope="module")
def explicit() -> Iterator[TritonServer]:
    """A server whose repository clients may change, with an API, an address and options asked for. No shared memory is
    left."""
    options = ["--http-thread-count=3", "--allow-cpu-metrics=false"]
    more = {"allow_apis": ["logging"], "extra_options": options, "metrics_host": METRICS_HOST}
    with toy_server(explicit=True, **more) as server:
        pattern = server._running_files().segments_pattern
        yield server
    assert glob.glob(pattern) == []


@pytest.mark.server
def test_apis_that_are_allowed_need_no_key_and_the_repository_of_an_explicit_server_does(
    explicit: TritonServer,
) -> None:
    assert {api: over_http(explicit, api) for api in HTTP} == {
        "shared-memory": 403,
        "trace": 403,
        "logging": 200,
        "model-repository": 403,
    }
    assert {api: over_grpc(explicit, api) for api in GRPC} == {
        "shared-memory": "UNAVAILABLE",
        "trace": "UNAVAILABLE",
        "logging": "OK",
        "model-repository": "UNAVAILABLE",
    }
    assert over_http(explicit, "model-repository", explicit.api_key) == 200
    assert over_grpc(explicit, "model-repository", explicit.api_key) == "OK"


@pytest.mark.server
def test_a_page_of_another_site_can_load_no_model(explicit: TritonServer) -> None:
    """Its requests without leave of the server have plain text and no headers of its choice."""
    url = f"http://{explicit.http_url}/v2/repository/models/other/load"
    headers = {"content-type": "text/plain", "origin": "http://elsewhere.example", "host": "elsewhere.example"}
    content = '{"parameters": {"config": "{}"}}'
    answer = httpx.post(url, content=content, headers=headers, timeout=10, trust_env=False, verify=False)
    assert answer.status_code == 403


@pytest.mark.server
def test_the_line_that_serve_shows_loads_a_model(explicit: TritonServer) -> None:
    shown = _key_lines(explicit)[-1]
    assert shown.endswith(f"/v2/repository/models/{explicit.model_name}/unload    # and .../load")
    line = shown.replace("/unload ", "/load ")
    for command, refused in ((line, False), (line.replace("$(cat", "$(echo"), True)):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
        assert ("error" in done.stdout) is refused, done.stdout
    explicit.keep_safe()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_explicit_does_not_open_the_repository(host: str) -> None:
    assert "model-repository" in TritonServer(explicit=True, host=host, environ={}).restricted_apis
    asked = TritonServer(explicit=True, host=host, allow_apis=["model-repository"], environ={})
    assert "model-repository" not in asked.restricted_apis


@pytest.mark.parametrize(("target", "is_demo"), [("", True), ("smollm2", False), ("some/model", False)])
def test_the_lines_to_try_ask_what_the_model_knows(target: str, is_demo: bool) -> None:
    """The demo pair its own questions, as text; another model in its chat template."""
    server = TritonServer({"target_model": target} if target else {}, environ={}, http_port=8000)
    generate, curl = _tries(server, "--url U")
    body = json.loads(shlex.split(curl)[-1])
    words = shlex.split(generate)
    if is_demo:
        assert EXAMPLE_PROMPT in words
        assert "--chat" not in words
        assert body["text_input"] == EXAMPLE_PROMPT
    else:
        assert words[words.index("--chat") + 1] == OTHER_PROMPT
        assert json.loads(body["messages"]) == [{"role": "user", "content": OTHER_PROMPT}]
    assert words[-2:] == ["--url", "U"]


@pytest.mark.parametrize("openai_url", [None, "http://127.0.0.1:9004"])
def test_the_lines_at_the_end_of_a_start_have_each_address_by_its_name(openai_url: str | None) -> None:
    ports = {"http_port": 9001, "grpc_port": 9002, "metrics_port": 9003}
    server = TritonServer(environ={}, metrics_host=METRICS_HOST, allow_apis=RESTRICTED_APIS, **ports)
    lines = _endpoints(server, openai_url).splitlines()
    found = dict(line.split(maxsplit=1) for line in lines[1 : lines.index("try:")])
    page = {} if openai_url is None else {"page": f"{openai_url}/", "OpenAI": f"{openai_url}/v1"}
    assert found == page | {
        "gRPC": "127.0.0.1:9002",
        "HTTP": "http://127.0.0.1:9001/v2/models/dflash/generate",
        "metrics": f"http://{METRICS_HOST}:9003/metrics",
    }
    assert "--url 127.0.0.1:9002 " in next(line for line in lines if " generate " in line)


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
def test_a_server_listens_on_this_machine_alone_unless_told_otherwise_and_for_metrics_where_told(
    explicit: TritonServer,
) -> None:
    assert TritonServer(environ={}).host == TritonServer(environ={}).metrics_host == "127.0.0.1"
    address = other_address()
    for port, host in (
        (explicit.http_port, "127.0.0.1"),
        (explicit.grpc_port, "127.0.0.1"),
        (explicit.metrics_port, METRICS_HOST),
    ):
        with socket.create_connection((host, port), timeout=5):
            pass
        for other in {address, "127.0.0.1", METRICS_HOST} - {host}:
            with pytest.raises(ConnectionRefusedError), socket.create_connection((other, port), timeout=5):
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
def test_shared_memory_is_the_owners_alone_also_after_a_reload_and_has_the_prefix_that_triton_protects(
    explicit: TritonServer,
) -> None:
    with DFlashClient(explicit.grpc_url, timeout_s=20) as client:
        for reload in (False, True):
            if reload:
                assert change_model(explicit, "unload").is_success
                assert change_model(explicit, "load").is_success
                explicit.keep_safe()
            assert client.generate("x" * (3 << 20), max_tokens=1).text == "x"
            segments = [Path(name) for name in glob.glob(explicit._running_files().segments_pattern)]
            assert segments
            for segment in segments:
                assert stat.S_IMODE(segment.stat().st_mode) == 0o600
                assert segment.name.startswith("triton_python_backend_shm_region_")
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
def test_other_options_reach_tritonserver(explicit: TritonServer) -> None:
    command = Path(f"/proc/{explicit.pid}/cmdline").read_bytes().split(b"\0")
    assert b"--http-thread-count=3" in command
    assert b"nv_cpu" not in httpx.get(f"http://{explicit.metrics_url}/metrics", trust_env=False, verify=False).content


@pytest.mark.server
@pytest.mark.parametrize("mutual", [False, True])
def test_grpc_is_encrypted_with_a_certificate_and_with_an_authority_clients_need_one_too(
    mutual: bool, tmp_path: Path
) -> None:
    made = Certificates.make(tmp_path)
    tls = GrpcTls(made.server, made.server_key, client_ca=made.ca if mutual else None)
    trust = {"ca_cert": made.ca}
    ours = trust | ({"client_cert": made.client, "client_key": made.client_key} if mutual else {})
    refused = [("grpc", {}), ("grpcs", trust)] if mutual else [("grpc", {})]
    with toy_server(tls=tls) as server:
        address = f"localhost:{server.grpc_port}"
        with DFlashClient(f"grpcs://{address}", timeout_s=10, **ours) as client:
            assert client.generate("hidden").text == "hidden"
        for scheme, options in refused:
            with (
                DFlashClient(f"{scheme}://{address}", timeout_s=3, **options) as client,
                pytest.raises(ClientError),
            ):
                client.generate("hidden")


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
    assert parser().parse_args(["openai"]).host == "0.0.0.0"
    monkeypatch.delenv(HOST_ENV)
    assert parser().parse_args(["openai"]).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ([], "http"),
        (["--tls-cert", "{server}", "--tls-key", "{server_key}"], "https"),
        (["--heartbeat-fd", "99"], None),
    ],
)
def test_openai_writes_down_what_says_whether_it_takes_requests_unless_serve_has_done_so(
    options: list[str], scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates.make(tmp_path)
    pkcs8(certificates.server_key)
    options = [word.format(**vars(certificates)) for word in options]
    noted: list[str] = []

    def serve(app: object, config: Any, on_ready: object) -> None:
        noted.extend(file.read_text() for file in temporary.glob("dflash-triton-*/ready-url"))
        assert noted == ([] if scheme is None else [f"{scheme}://127.0.0.1:{config.port}/health/ready\n"])

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for name in (HOST_ENV, "DFLASH_API_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("dflash_openai.app.create_app", lambda config: None)
    monkeypatch.setattr("dflash_openai.server.serve", serve)
    monkeypatch.setattr("dflash_cli.commands.openai._log_to", lambda lines: None)
    assert main(["openai", "--port", "0", *options]) == 0
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said", "unsaid"),
    [
        ([], ["is for trying out on one machine"], ["WARNING"]),
        (
            ["--host", "0.0.0.0"],
            ["is for trying out", "WARNING: other machines reach this Triton at 0.0.0.0", "CVE-2025-23310"],
            [],
        ),
        (["--host", "0.0.0.0", "--explicit"], ["WARNING: other machines"], ["can run code as"]),
        (
            ["--host", "0.0.0.0", "--explicit", "--allow-api", "model-repository"],
            ["whoever reaches 0.0.0.0, and any web page in a browser on this machine, can run code as the user"],
            [],
        ),
        (["--explicit"], [], ["WARNING"]),
        (
            ["--explicit", "--allow-api", "model-repository"],
            ["WARNING: ", "every user of this machine, and any web page in a browser on this machine, can run code as"],
            [],
        ),
    ],
)
def test_what_is_not_safe_is_said_before_the_start(argv: list[str], said: list[str], unsaid: list[str]) -> None:
    text = "\n".join(warnings(parsed(*argv)))
    assert all(words in text for words in said)
    assert not any(words in text for words in unsaid)


@pytest.mark.parametrize(
    ("host", "http", "grpc_address"),
    [
        ("127.0.0.3", "127.0.0.3", "127.0.0.3"),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0"),
        ("::1", "ipv6:::1", "[::1]"),
        ("::", "ipv6:::", "[::]"),
        ("four.example", "10.1.2.3", "10.1.2.3"),
        ("six.example", "ipv6:fd00::7", "[fd00::7]"),
    ],
)
def test_triton_is_told_an_address_as_each_of_its_servers_reads_it(
    host: str, http: str, grpc_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"four.example": "10.1.2.3", "six.example": "fd00::7"}
    find = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *more, **options: find(known.get(name, name), *more, **options)
    )
    assert addresses(host, "127.0.0.9") == [
        f"--http-address={http}",
        f"--grpc-address={grpc_address}",
        "--metrics-address=127.0.0.9",
    ]
    assert addresses("127.0.0.9", host)[2] == f"--metrics-address={http}"


@pytest.mark.server
@pytest.mark.parametrize(
    "host", [by_night("localhost"), *([by_night("::1")] if Path("/proc/net/if_inet6").exists() else [])]
)
def test_a_server_listens_where_a_name_or_an_address_of_ipv6_says(host: str) -> None:
    with toy_server(host=host) as server, DFlashClient(server.grpc_url) as client:
        assert client.ready()
        for url in (f"{server.http_url}/v2/health/ready", f"{server.metrics_url}/metrics"):
            assert httpx.get(f"http://{url}", trust_env=False).status_code == 200

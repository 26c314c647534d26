"""Two small servers over TLS on loopback, as a proxy in front of Triton is: gRPC and HTTP. Both echo the prompt and
keep the headers that came with it."""

from __future__ import annotations

import json
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc


@dataclass(frozen=True)
class Certificates:
    """An authority of our own, and what it certified, as PEM files. `other` is an authority that no client trusts."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    other: Path
    elsewhere: Path
    elsewhere_key: Path

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        """Write them to `directory`."""
        authority = trustme.CA()
        made = cls(*(directory / f"{name}.pem" for name in cls.__dataclass_fields__))
        authority.cert_pem.write_to_path(made.ca)
        trustme.CA().cert_pem.write_to_path(made.other)
        for names, certificate, key in (
            (("localhost", "127.0.0.1"), made.server, made.server_key),
            (("client.example",), made.client, made.client_key),
            (("elsewhere.example",), made.elsewhere, made.elsewhere_key),
        ):
            leaf = authority.issue_cert(*names)
            leaf.cert_chain_pems[0].write_to_path(certificate)
            leaf.private_key_pem.write_to_path(key)
        return made


@dataclass
class Seen:
    """A running server: its `host:port`, the headers of each request, and the paths of those over HTTP."""

    address: str
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)


class _Echo(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def ModelReady(self, request: Any, context: Any) -> Any:
        self._seen.headers.append(dict(context.invocation_metadata()))
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        headers = dict(context.invocation_metadata())
        self._seen.headers.append(headers)
        if headers.get("authorization") == "Bearer wrong":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "unknown key")
        if headers.get("authorization") == "Bearer other":
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not yours")
        for request in requests:
            response = service_pb2.ModelStreamInferResponse()
            response.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
            described = any(tensor.name == "describe" for tensor in request.inputs)
            text = struct.pack("<I", 2) + b"{}" if described else request.raw_input_contents[0]
            response.infer_response.raw_output_contents.append(text)
            yield response
            (length,) = struct.unpack_from("<I", text)
            if text[4 : 4 + length] == b"wait":
                self._seen.released.wait(20)


class _Handler(BaseHTTPRequestHandler):
    seen: Seen

    def do_GET(self) -> None:
        self._note()
        self._answer(200, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._note()
        status = {"Bearer wrong": 401, "Bearer other": 403}.get(self.headers.get("authorization", ""), 200)
        if status != 200:
            self._answer(status, b"<html>go away</html>")
            return
        text = "{}" if body.get("describe") else body["text_input"]
        answer = json.dumps({"text_output": text}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + answer + b"\n\n" if body.get("stream") else answer)
        self.wfile.flush()
        if text == "wait":
            self.seen.released.wait(20)

    def _note(self) -> None:
        self.seen.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.seen.paths.append(self.path)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    context: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust us, or that we cut off, is what some tests are about."""


@contextmanager
def running(server: ThreadingHTTPServer, released: threading.Event) -> Iterator[None]:
    """Serve in a thread. At the end what handlers wait for is `released`."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        released.set()
        server.shutdown()
        thread.join()


@contextmanager
def grpc_server(certificates: Certificates | None, mutual: bool = False, elsewhere: bool = False) -> Iterator[Seen]:
    """Without `certificates` in the clear. `mutual` asks clients for theirs; `elsewhere` shows another host's."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    seen = Seen("")
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Echo(seen), server)
    if certificates is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        key = certificates.elsewhere_key if elsewhere else certificates.server_key
        shown = certificates.elsewhere if elsewhere else certificates.server
        credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), shown.read_bytes())], certificates.ca.read_bytes() if mutual else None, mutual
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
    seen.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield seen
    finally:
        seen.released.set()
        server.stop(0).wait(10)


@contextmanager
def http_server(certificates: Certificates | None, mutual: bool = False, elsewhere: bool = False) -> Iterator[Seen]:
    """As `grpc_server`."""
    seen = Seen("")
    with _HttpServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"seen": seen})) as server:
        if certificates is not None:
            server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            shown = certificates.elsewhere if elsewhere else certificates.server
            server.context.load_cert_chain(shown, certificates.elsewhere_key if elsewhere else certificates.server_key)
            if mutual:
                server.context.verify_mode = ssl.CERT_REQUIRED
                server.context.load_verify_locations(certificates.ca)
        seen.address = f"127.0.0.1:{server.server_address[1]}"
        with running(server, seen.released):
            yield seen

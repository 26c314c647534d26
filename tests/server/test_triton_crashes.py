"""Single requests that end an old Triton, with any model: a newer one refuses them, and `serve` replaces an old one.

The versions are those that mended each (docs/operators.md, Security): 2.60 is 25.08, 2.68 is 26.04, 2.69 is 26.05.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_cli.launcher.server import TritonServer
from tests.cli.test_restarts import kept
from tests.support.waiting import eventually


def send_grpc(server: TritonServer, message: service_pb2.ModelInferRequest) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel, contextlib.suppress(grpc.RpcError):
        list(service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message]), timeout=3))


def send_http(server: TritonServer, head: bytes, body: bytes) -> None:
    start = b"POST /v2/models/dflash/generate HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as wire:
        wire.sendall(start + body)
        wire.settimeout(3)
        wire.recv(4096)


def classified_text(server: TritonServer) -> None:
    """A division by the size of a BYTES element, which is 0."""
    message = service_pb2.ModelInferRequest(model_name="dflash")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(b"\2\0\0\0Hi")
    message.outputs.add(name="text_output").parameters["classification"].int64_param = 1
    send_grpc(server, message)


def shape_that_overflows(server: TritonServer) -> None:
    """2^61 elements of 8 bytes are 0 bytes modulo 2^64, as many as are sent."""
    message = service_pb2.ModelInferRequest(model_name="dflash")
    message.inputs.add(name="input_ids", datatype="INT64", shape=[2**61])
    message.raw_input_contents.append(b"")
    send_grpc(server, message)


def deep_json(server: TritonServer) -> None:
    """A JSON reader that calls itself once a level."""
    body = b'{"text_input":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    send_http(server, b"Content-Length: %d" % len(body), body)


def chunk_after_chunk(server: TritonServer) -> None:
    """A million chunks of one byte: memory on the stack for each (CVE-2025-23310, CVE-2025-23311)."""
    text = b'{"text_input":"' + b"a" * 1_000_000
    send_http(server, b"Transfer-Encoding: chunked", b"".join(b"1\r\n%c\r\n" % c for c in text) + b"0\r\n\r\n")


def version(server: TritonServer) -> tuple[int, int]:
    text = httpx.get(f"http://{server.http_url}/v2", timeout=10, trust_env=False, verify=False).json()["version"]
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


@pytest.mark.parametrize(
    ("crash", "mended_in"),
    [
        (classified_text, (2, 60)),
        (shape_that_overflows, (2, 68)),
        (deep_json, (2, 69)),
        (chunk_after_chunk, (2, 60)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_request_that_ends_an_old_triton_is_refused_by_a_newer_one_and_the_old_one_comes_back(
    crash: Callable[[TritonServer], None], mended_in: tuple[int, int]
) -> None:
    with kept() as one:
        mended = version(one.server) >= mended_in
        pid = one.server.pid
        crash(one.server)
        if not mended:
            one.wait_until_ready_again()
        eventually(one.answers, "an answer", 60.0)
        assert (one.server.pid == pid) is mended

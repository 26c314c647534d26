"""Outputs in Triton's gRPC messages, and how gRPC is told to carry them."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from dflash_client import DFlashClient
from dflash_client.address import Location
from dflash_client.errors import ClientError, ConnectionFailed, ConnectionLost, Unavailable
from dflash_client.grpc_messages import UNCONFIRMED_S, decode, translate


@pytest.mark.parametrize("dtype", ["i4", "i8", "u4", "u8", "f4", "f8"])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_numbers_of_each_type_are_read_in_any_number(dtype: str, count: int) -> None:
    kind = {"i": "INT", "u": "UINT", "f": "FP"}[dtype[0]] + str(8 * int(dtype[1]))
    largest = np.finfo(dtype).max if dtype[0] == "f" else np.iinfo(dtype).max
    values = np.array([largest, 3, 0, 1, 2, 5, 7][:count], dtype=f"<{dtype}")
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.outputs.add(name="numbers", datatype=kind, shape=[count])
    message.infer_response.raw_output_contents.append(values.tobytes())
    found = decode(message)["numbers"]
    assert found == values.tolist()
    assert all(type(value) is (float if dtype[0] == "f" else int) for value in found)


def test_what_a_vanished_machine_does_not_confirm_ends_its_connection() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with DFlashClient(f"127.0.0.1:{port}") as client:
            client.probe(5)
            assert unconfirmed_ms(port) == [UNCONFIRMED_S * 1000]
    finally:
        server.stop(0)


def unconfirmed_ms(port: int) -> list[int]:
    """TCP_USER_TIMEOUT of each of this process's sockets that are connected to `port`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(Path("/proc/self/fd", name)).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connected:
                if connected.family in (socket.AF_INET, socket.AF_INET6) and connected.getpeername()[1] == port:
                    found.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


@pytest.mark.parametrize(
    ("details", "kind", "words"),
    [
        ("Received http2 header with status: 502", ConnectionLost, "the proxy at host:1 got no answer from the server"),
        ("Received http2 header with status: 504", ConnectionLost, "(HTTP status 504)"),
        ("Received http2 header with status: 503", Unavailable, "host:1 takes no request (HTTP status 503)"),
        ("Received http2 header with status: 429", Unavailable, "(HTTP status 429)"),
        ("Received http2 header with status: 200", ConnectionFailed, "is no gRPC server (HTTP status 200)"),
        *(
            (details, ConnectionLost, "the connection to host:1 broke")
            for details in (
                "ping timeout",
                "keepalive watchdog timeout",
                "Transport closed",
                "upstream connect error or disconnect/reset before headers. reset reason: connection termination",
            )
        ),
        # The request did not get further than the proxy, so it may be sent again.
        (
            "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure",
            Unavailable,
            "remote connection failure",
        ),
        ("failed to connect to all addresses; last error: Socket closed", ConnectionFailed, "no gRPC server answers"),
    ],
)
def test_what_stands_between_is_told_from_the_server(details: str, kind: type[ClientError], words: str) -> None:
    error = SimpleNamespace(code=lambda: grpc.StatusCode.UNAVAILABLE, details=lambda: details)
    found = translate(error, Location("grpc", "host:1"))
    assert type(found) is kind
    assert words in str(found)

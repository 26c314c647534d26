"""Requests and responses as Triton's gRPC messages, and gRPC's errors as ours. Shared by both gRPC transports."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from dflash_client.address import Location
from dflash_client.connection import CONNECT_TIMEOUT_S, Tls
from dflash_client.errors import (
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Internal,
    error_for,
    error_in_text,
    no_tls,
    refused_caller,
    timed_out,
    untrusted,
)
from dflash_client.request import Request
from dflash_client.responses import Outputs

UNCONFIRMED_S = 20.0  # for how long a machine may confirm nothing of what it was sent

# No bound on message sizes, which the server sets anyway; no proxy, which would swallow calls to a server of one's own.
# gRPC's default pause between attempts to connect grows to two minutes: a server that came back would wait for it. Its
# least pause is also how long it tries to connect. A machine that vanishes says nothing more: a connection ends that
# has something unconfirmed (TCP_USER_TIMEOUT, which gRPC sets where it pings), else its requests wait for all of their
# time, and so do those after them. Triton takes pings more often than each five minutes for an attack.
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.keepalive_time_ms", 360_000),
    ("grpc.keepalive_timeout_ms", int(UNCONFIRMED_S * 1000)),
]
# How gRPC's core words an UNAVAILABLE that comes from the connection and not from the server.
_NO_SUCH_HOST = ("dns resolution failed", "name resolution", "address lookup", "domain name")
_NOT_CONNECTED = ("failed to connect",)
_BROKEN = (
    *("socket closed", "connection reset", "broken pipe", "goaway", "connection dropped", "recvmsg", "sendmsg"),
    *("ping timeout", "keepalive", "transport closed"),
    # As Envoy words it, of the connection behind it.
    *("reset before headers", "connection termination"),
)
# What Envoy adds where that connection was never made: the server did not get the request.
_NOT_SENT = ("connection failure", "reset reason: overflow")

# Elements of the outputs by Triton's name of their type, as `struct` and numpy call them; BYTES is read apart.
_ELEMENTS = {"INT32": "<i", "INT64": "<q", "UINT32": "<I", "UINT64": "<Q", "FP32": "<f", "FP64": "<d"}
# Of a single element, as most outputs have: numpy would take several times as long for it.
_SINGLE = {datatype: struct.Struct(letter) for datatype, letter in _ELEMENTS.items()}


def encode(request: Request, delta_stream: str = "") -> Any:
    """The `ModelInferRequest` of a request. delta_stream: what it names, where it names one."""
    message = service_pb2.ModelInferRequest(model_name=request.model)
    strings = request.strings() | ({"delta_stream": delta_stream} if delta_stream else {})
    for name, text in strings.items():
        data = text.encode("utf-8")
        _add_input(message, name, "BYTES", [1], struct.pack("<I", len(data)) + data)
    if request.token_ids is not None:
        ids = np.array(request.token_ids, dtype="<i8")
        _add_input(message, "input_ids", "INT64", [len(ids)], ids.tobytes())
    for name, flag in request.flags().items():
        _add_input(message, name, "BOOL", [1], bytes([flag]))
    return message


def _add_input(message: Any, name: str, datatype: str, shape: list[int], data: bytes) -> None:
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(data)


def read_response(data: bytes) -> Outputs:
    """The outputs in the bytes of a `ModelStreamInferResponse`. Raises as `decode`, and `Internal` for other bytes."""
    try:
        message = service_pb2.ModelStreamInferResponse.FromString(data)
    except DecodeError as error:
        raise Internal(f"the server sent what is no response of its: {error}") from None
    return decode(message)


def decode(message: Any) -> Outputs:
    """The outputs in a `ModelStreamInferResponse`. Raises the error that it holds instead, if it does."""
    if message.error_message:
        # The header `triton_grpc_error` would end the stream with the error's own status instead, but Triton 2.51
        # crashes of it after some hundreds of errors.
        raise error_in_text(message.error_message)
    response = message.infer_response
    return {
        output.name: _elements(output.datatype, data)
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _elements(datatype: str, data: bytes) -> list[Any]:
    if datatype == "BYTES":
        return _strings(data)
    if len(data) == _SINGLE[datatype].size:
        return list(_SINGLE[datatype].unpack(data))
    elements: list[Any] = np.frombuffer(data, dtype=_ELEMENTS[datatype]).tolist()
    return elements


def _strings(data: bytes) -> list[str]:
    """The elements of a BYTES tensor: each a 4-byte length, then the bytes."""
    strings, at, view = [], 0, memoryview(data)
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        strings.append(str(view[at : at + length], "utf-8", errors="replace"))
        at += length
    return strings


def credentials(tls: Tls) -> Any:
    """The credentials of a channel over TLS. Raises `OSError` for files that have gone since they were checked."""
    paths = (tls.ca_cert, tls.client_key, tls.client_cert)
    return grpc.ssl_channel_credentials(*(None if path is None else Path(path).read_bytes() for path in paths))


def translate(error: Any, location: Location) -> ClientError:
    """Our error for a `grpc.RpcError`."""
    code, details = error.code(), error.details() or "no details"
    words = details.lower()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return timed_out()
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return refused_caller(code.name, location.address, details)
    if "http2 header with status" in words:
        # Something that speaks HTTP/2 and not gRPC: a proxy without a server or without gRPC, or a web server.
        status = words.rpartition(" ")[2]
        if status in ("502", "504"):
            return ConnectionLost(
                f"the proxy at {location.address} got no answer from the server behind it (HTTP status {status})"
            )
        if status in ("429", "503"):
            return error_for(
                "UNAVAILABLE", f"what answers at {location.address} takes no request (HTTP status {status})"
            )
        return ConnectionFailed(
            f"what answers at {location.address} is no gRPC server (HTTP status {status}); check the address, or use "
            f"{'https' if location.secure else 'http'}:// if it is Triton's HTTP port"
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unreachable(words, details, location)
    return error_for(code.name, details)


def _unreachable(words: str, details: str, location: Location) -> ClientError:
    """The error for an UNAVAILABLE, which may be the server's own or the connection's."""
    if location.secure and "verify_failed" in words:
        return untrusted(location.address, "its certificate leads to no authority that is trusted here")
    if location.secure and "hostname verification" in words:
        return untrusted(location.address, "its certificate is for another host")
    if location.secure and "wrong_version_number" in words:
        return no_tls(location.address, "grpc://")
    if any(known in words for known in _NO_SUCH_HOST):
        return ConnectionFailed(f"the host of {location.address} has no address; check its name")
    if any(known in words for known in _NOT_CONNECTED):
        closed = not location.secure and any(known in words for known in _BROKEN)
        hint = " (If it expects TLS, begin the URL with grpcs://.)" if closed else ""
        return ConnectionFailed(
            f"no gRPC server answers at {location.address}; is it running, and is this its gRPC port?{hint}"
        )
    if any(known in words for known in _BROKEN) and not any(known in words for known in _NOT_SENT):
        return ConnectionLost(f"the connection to {location.address} broke: {details}")
    return error_for("UNAVAILABLE", details)

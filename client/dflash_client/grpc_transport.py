"""Requests over gRPC: one `ModelStreamInfer` stream for each, on the stubs that `tritonclient` ships.

`tritonclient`'s own streaming client hands responses to a callback in a thread of its own; the stubs give an iterator
that can be cancelled and carries a deadline, which is all that is needed here.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Generator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_client.errors import (
    ClientError,
    ConnectionFailed,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    Unavailable,
    error_for,
)
from dflash_client.request import Request
from dflash_client.results import Delta

CONNECT_TIMEOUT_S = 5.0
# Makes Triton end a stream with the error's own gRPC status; without it a stream's errors are text only.
_REAL_STATUS = (("triton_grpc_error", "true"),)
# No bound on message sizes, which the server sets anyway; no proxy, which would swallow calls to a server of one's own.
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]
# How gRPC's core words an UNAVAILABLE that comes from the connection and not from the server.
_BROKEN = ("failed to connect", "socket closed", "connection reset", "broken pipe", "connection refused", "goaway")


class GrpcTransport:
    """A gRPC channel to `address`. Connects with the first request."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._connect_lock = threading.Lock()
        self._connected = False

    def send(self, request: Request, deadline: float) -> Generator[Delta, None, None]:
        """See `Transport.send`."""
        self._connect(deadline)
        remaining = max(deadline - time.monotonic(), 0.001)
        call = self._stub.ModelStreamInfer(iter([encode(request)]), timeout=remaining, metadata=_REAL_STATUS)
        try:
            for response in call:
                if response.error_message:
                    raise _refusal(response.error_message)
                yield decode(response.infer_response)
        except grpc.RpcError as error:
            raise self._translate(error) from error
        finally:
            # Nothing happens if the stream has ended; else the server sees the cancellation.
            call.cancel()

    def close(self) -> None:
        """Close the channel, which cancels its streams."""
        self._channel.close()

    def _connect(self, deadline: float) -> None:
        """Wait until the channel is up, once, so that an absent server is told from one that is busy."""
        with self._connect_lock:
            if self._connected:
                return
            patience = max(0.001, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            try:
                grpc.channel_ready_future(self._channel).result(timeout=patience)
            except grpc.FutureTimeoutError:
                raise ConnectionFailed(
                    f"no gRPC server answers at {self._address}; is it running, and is this its gRPC port?"
                ) from None
            self._connected = True

    def _translate(self, error: Any) -> ClientError:
        code, details = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return RequestTimeout("the request took longer than the client's timeout_s; it was cancelled")
        if code is grpc.StatusCode.UNAVAILABLE and any(words in details.lower() for words in _BROKEN):
            return ConnectionFailed(f"the connection to {self._address} broke: {details}")
        return error_for(code.name, details)


def _refusal(message: str) -> ClientError:
    """The error of a request that Triton refuses before the model sees it, which it sends without a status."""
    if "unknown model" in message:
        unavailable = "no available versions" in message
        return Unavailable(message) if unavailable else NotFound(message)
    return InvalidArgument(message)


def encode(request: Request) -> Any:
    """The `ModelInferRequest` of a request."""
    message = service_pb2.ModelInferRequest(model_name=request.model)
    for name, text in request.strings().items():
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


def decode(response: Any) -> Delta:
    """The delta in a `ModelInferResponse`. An output that is missing or empty leaves its field at the default."""
    raw = {output.name: data for output, data in zip(response.outputs, response.raw_output_contents, strict=True)}
    finish_reason = _string(raw.get("finish_reason"))
    stats = _string(raw.get("spec_stats"))
    num_input = _integers(raw.get("num_input_tokens"), "<u4")
    num_output = _integers(raw.get("num_output_tokens"), "<u4")
    token_ids = _integers(raw.get("token_ids"), "<i4")
    return Delta(
        text=_string(raw.get("text_output")) or "",
        token_ids=token_ids,
        num_output_tokens=num_output[0] if num_output else len(token_ids),
        num_input_tokens=num_input[0] if num_input else None,
        finish_reason=None if finish_reason in (None, "", "None") else finish_reason,
        spec_stats=json.loads(stats) if stats else None,
    )


def _string(data: bytes | None) -> str | None:
    """The first element of a BYTES tensor: a 4-byte length, then the bytes."""
    if not data:
        return None
    (length,) = struct.unpack_from("<I", data)
    return data[4 : 4 + length].decode("utf-8", errors="replace")


def _integers(data: bytes | None, dtype: str) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype=dtype).tolist()) if data else ()

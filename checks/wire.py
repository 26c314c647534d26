"""gRPC requests tensor by tensor, right or wrong. The project's own client would refuse to send some of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from load_tests.server_state import MODEL

TIMEOUT_S = 120.0


def request(parameters: Mapping[str, Any] | None = None, **inputs: Any) -> Any:
    """A `ModelInferRequest`. Inputs by name: texts and bytes become BYTES, booleans BOOL, lists INT64."""
    message = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, value in inputs.items():
        if isinstance(value, bool):
            add(message, name, "BOOL", [1], bytes([value]))
        elif isinstance(value, list):
            add(message, name, "INT64", [len(value)], np.array(value, dtype="<i8").tobytes())
        else:
            add(message, name, "BYTES", [1], packed(value))
    for name, value in (parameters or {}).items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
        setattr(message.parameters[name], field, value)
    return message


def add(message: Any, name: str, datatype: str, shape: list[int], data: bytes) -> None:
    """Add an input tensor as it is, right or wrong."""
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(data)


def packed(*elements: str | bytes) -> bytes:
    """BYTES elements as Triton reads them: each after its length."""
    raw = [element.encode() if isinstance(element, str) else element for element in elements]
    return b"".join(struct.pack("<I", len(element)) + element for element in raw)

"""Outputs in Triton's gRPC messages."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from dflash_client.grpc_messages import decode


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

"""Requests as clients of Triton's vLLM backend write them: `tritonclient.grpc`, tensors and a callback."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

WAIT_S = 60.0


def tensor(name: str, datatype: str, values: Any) -> triton_grpc.InferInput:
    """One input; texts become BYTES."""
    kinds: dict[str, Any] = {"BYTES": np.object_, "BOOL": bool, "INT64": np.int64, "INT32": np.int32}
    array = np.array(values, dtype=kinds[datatype])
    made = triton_grpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def inputs_of(**values: Any) -> list[triton_grpc.InferInput]:
    """Inputs of one element, by name: texts and booleans; lists are token ids. Those that are None are left out."""
    made = []
    for name, value in values.items():
        if isinstance(value, bool):
            made.append(tensor(name, "BOOL", [value]))
        elif isinstance(value, list):
            made.append(tensor(name, "INT64", value))
        elif value is not None:
            made.append(tensor(name, "BYTES", [value.encode() if isinstance(value, str) else value]))
    return made


def infer(
    url: str, inputs: list[triton_grpc.InferInput], parameters: dict[str, Any] | None = None, **options: Any
) -> tuple[list[triton_grpc.InferResult], InferenceServerException | None]:
    """Send one request over a stream of its own; its responses, and the error that ended it, if one did."""
    results: list[triton_grpc.InferResult] = []
    errors: list[InferenceServerException] = []
    ended = threading.Event()

    def on_response(result: triton_grpc.InferResult | None, error: InferenceServerException | None) -> None:
        if error is not None or result is None:
            if error is not None:
                errors.append(error)
            ended.set()
            return
        results.append(result)
        if result.get_response().parameters["triton_final_response"].bool_param:
            ended.set()

    with triton_grpc.InferenceServerClient(url) as client:
        # Without the header `triton_grpc_error` an error has no status; with it, this Triton crashes now and then.
        client.start_stream(on_response)
        client.async_stream_infer("dflash", inputs, parameters=parameters, **options)
        try:
            assert ended.wait(WAIT_S), "no answer"
        finally:
            # Closing a stream waits without end for the answers that are missing.
            client.stop_stream(cancel_requests=not ended.is_set())
    return results, errors[0] if errors else None


def text_of(results: list[triton_grpc.InferResult], index: int = 0) -> str:
    """The text of one completion, over all responses."""
    return "".join(result.as_numpy("text_output")[index].decode() for result in results)

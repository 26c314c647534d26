"""What the checks over the wire share: raw gRPC and HTTP requests, the metrics page, and the memory of the processes.

Used by `checks.malformed` and `checks.mixed`, which write their requests without the project's own client: that
one would refuse to send some of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tritonclient.grpc import service_pb2

from dflash_cli.launcher.processes import family

MODEL = "dflash"
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


class MetricsPage:
    """The metrics of one model, as they were when the page was read."""

    def __init__(self, url: str) -> None:
        text = httpx.get(f"http://{url}/metrics", timeout=10, trust_env=False).text
        self._lines = [line for line in text.splitlines() if f'model="{MODEL}"' in line]

    def __getitem__(self, name: str) -> float:
        """The sum of a metric over its labels; 0 for one that was never counted."""
        return sum(float(line.rpartition(" ")[2]) for line in self._lines if line.startswith(f"{name}{{"))

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric by the values of one of its labels."""
        values: dict[str, float] = {}
        for line in self._lines:
            if line.startswith(f"{name}{{") and f'{label}="' in line:
                key = line.split(f'{label}="')[1].split('"')[0]
                values[key] = values.get(key, 0.0) + float(line.rpartition(" ")[2])
        return values


def memory_mb(pid: int) -> dict[str, float]:
    """Resident memory in MB of a `tritonserver`, its stub and its engine process, by what they are."""
    sizes: dict[str, float] = {}
    for process in family(pid):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        kind = "engine" if "engine_process" in command else "stub" if "python_backend_stub" in command else "server"
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        resident = next((line for line in status.splitlines() if line.startswith("VmRSS")), "VmRSS: 0 kB")
        sizes[kind] = sizes.get(kind, 0.0) + int(resident.split()[1]) / 1024
    return sizes

"""Messages to ranks whose tensors are on a GPU: the tensors go from device to device, and the host waits for none.

Of a step that is queued behind another the host knows no token yet. So a message has the shapes of its tensors, and
these follow in one broadcast, in the order of the streams. What was captured in a graph is broadcast at each replay.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any, Protocol

import torch

ALIGNMENT = 64
"""Bytes between the beginnings of tensors in a broadcast."""
Spec = tuple[torch.dtype, tuple[int, ...]]


class Broadcast(Protocol):
    """As `GpuSum`."""

    def broadcast(self, x: torch.Tensor) -> None:
        """What rank 0 has in `x`, on all ranks."""


class DeviceMessages:
    """What rank 0 sends and the others receive, in the same order."""

    def __init__(self, group: Broadcast, device: torch.device) -> None:
        """device: of this rank's tensors that are broadcast. Others are sent as they are."""
        self._group = group
        self._device = device
        self._gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)

    def send(self, message: object, send: Callable[[bytes], None]) -> int:
        """Give `message` to all ranks. send: what takes bytes to them. Returns how many there were, of one rank."""
        out = io.BytesIO()
        pickler = _Pickler(out, self._device)
        pickler.dump(message)
        tensors = [tensor.contiguous() for tensor in pickler.tensors]
        data = pickle.dumps(([_spec(tensor) for tensor in tensors], out.getvalue()))
        send(data)
        if tensors:
            self._group.broadcast(self._joined(tensors))
        return len(data)

    def received(self, data: bytes, before: Callable[[], None] = lambda: None) -> Any:
        """The message of these bytes. Its tensors are views of what was received. before: called ahead of a broadcast,
        if there is one."""
        specs, body = pickle.loads(data)
        tensors: list[torch.Tensor] = []
        if specs:
            before()
            sizes = [_num_bytes(spec) for spec in specs]
            buffer = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=self._device)
            self._group.broadcast(buffer)
            first = 0
            for (dtype, shape), size in zip(specs, sizes, strict=True):
                tensors.append(buffer[first : first + size].view(dtype).view(shape))
                first += _aligned(size)
        return _Unpickler(io.BytesIO(body), tensors).load()

    def _joined(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """All of them in one piece of memory, by one copy."""
        parts = []
        for tensor in tensors:
            parts += [tensor.view(-1).view(torch.uint8), self._gap[: _aligned(tensor.nbytes) - tensor.nbytes]]
        return torch.cat(parts)


def _spec(tensor: torch.Tensor) -> Spec:
    return tensor.dtype, tuple(tensor.shape)


def _num_bytes(spec: Spec) -> int:
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Tensors of a device by their number."""

    def __init__(self, out: io.BytesIO, device: torch.device) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._device_type = device.type
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or value.device.type != self._device_type:
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(body)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        return self._tensors[number]

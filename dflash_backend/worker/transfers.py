"""Copies between host and device without a wait for them.

A copy runs when the device comes to it, from memory that the device can read by itself (pinned). So the host's side of
a copy must stay as it is until then: there are as many buffers as steps can be in flight, used in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# The step that the device runs, and the one behind it.
MAX_STEPS_IN_FLIGHT = 2
# Where an array begins on the device: kernels are compiled anew for addresses that are less round than that.
ALIGNMENT = 16


def share(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """What `Uploader.send` is to a CPU: tensors over the arrays' own memory."""
    return [torch.from_numpy(array) for array in arrays]


class _Turn:
    """One host buffer, and the event after which the device needs it no more."""

    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8)
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class Uploader:
    """Sends some arrays to the device as one copy.

    What was sent lies in one buffer on the device, which the next copy overwrites: the device has run everything that
    was queued before by then. The buffer begins at the same address as long as `num_bytes` suffices, so a captured
    graph can read it; with `grows` it is replaced by a larger one when it does not.
    """

    def __init__(self, num_bytes: int, device: torch.device, grows: bool = False) -> None:
        self._grows = grows
        self._pinned = device.type == "cuda"
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._turns = [_Turn() for _ in range(MAX_STEPS_IN_FLIGHT)]
        self._next = 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays on the device, one after the other, each at a round address. Raises `ValueError` when they do not
        fit a buffer that does not grow."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self._reserve(end)
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        turn.wait()
        if len(turn.host) < end:
            turn.host = torch.empty(len(self.buffer), dtype=torch.uint8, pin_memory=self._pinned)
        host = turn.host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        self.buffer[:end].copy_(turn.host[:end], non_blocking=self._pinned)
        if self._pinned:
            turn.event = turn.event or torch.cuda.Event()
            turn.event.record()
        return [
            self.buffer[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes <= len(self.buffer):
            return
        if not self._grows:
            raise ValueError(f"{num_bytes} bytes of a step's layout do not fit the {len(self.buffer)} that it may have")
        size = 1 << (num_bytes - 1).bit_length()
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=self.buffer.device)


@dataclass(frozen=True)
class Download:
    """Numbers on their way to the host."""

    numbers: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> np.ndarray:
        """The numbers, once they are there. Those of a `Downloader` are valid until it has begun `MAX_STEPS_IN_FLIGHT`
        more."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers.numpy()


def fetch(tensor: torch.Tensor) -> Download:
    """Queue a copy of `tensor` to memory of its own on the host, behind what the device has to do."""
    if tensor.device.type != "cuda":
        return Download(tensor.clone(), None)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Download(host, event)


class Downloader:
    """Brings int64 vectors to the host, `capacity` numbers at most."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(capacity, dtype=torch.int64, pin_memory=self._pinned) for _ in range(MAX_STEPS_IN_FLIGHT)
        ]
        self._events = [torch.cuda.Event() for _ in self._hosts] if self._pinned else []
        self._next = 0

    def begin(self, numbers: torch.Tensor) -> Download:
        """Queue the copy of `numbers` (int64 `[n]`) behind what the device has to do."""
        if not self._pinned:
            return Download(numbers.clone(), None)
        host, event = self._hosts[self._next][: len(numbers)], self._events[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        host.copy_(numbers, non_blocking=True)
        event.record()
        return Download(host, event)

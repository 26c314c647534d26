"""When the phases of a step end, noted by the device itself. Used by the device step.

A time that the device writes down among its other work needs no event of the host's, works within a captured graph, and
stays that step's own while the next one is queued, which events in a graph would not.
"""

from __future__ import annotations

import time

import torch

from dflash_kernels import timestamp


class DeviceClock:
    """Times in ns, whose differences count. On a CPU they are the host's; on a GPU without Triton they are all 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def marks(self, count: int) -> torch.Tensor:
        """Room for `count` times, int64 `[count]`."""
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def note(self, marks: torch.Tensor, index: int) -> None:
        """Set `marks[index]` when everything that was queued before has run."""
        if self._device.type != "cuda":
            marks[index] = time.perf_counter_ns()
        elif timestamp.triton is not None:
            timestamp.timestamp(marks, index)

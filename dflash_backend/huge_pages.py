"""Memory of the host in huge pages, for what is read in any order.

A core's TLB knows 4 to 8 MiB of small pages, and where they lie in memory differs from one allocation to another:
engines that do the same differed by up to 16 % in their attention, for as long as they lived.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
import torch

HUGE_PAGE = 2 << 20
"""Bytes, on x86 and, with usual pages, on Arm."""


def zeroed_memory(num_bytes: int) -> np.ndarray:
    """Zeros, uint8 `[num_bytes]`, at a multiple of `HUGE_PAGE`. The system gives their memory when it is first written,
    in huge pages if it has some. Raises `MemoryError` where the system will never give as much."""
    try:
        mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {num_bytes} bytes of memory: {error}") from error
    with contextlib.suppress(OSError):  # of a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + num_bytes]


class Scratch(threading.local):
    """Memory that each thread writes anew again and again, `num_bytes` of it. For less than `least_bytes` a buffer from
    the heap is as good, and quicker to have."""

    def __init__(self, num_bytes: int, least_bytes: int = 0) -> None:
        self.num_bytes, self.least_bytes = num_bytes, least_bytes
        self._memory = zeroed_memory(num_bytes)

    def empty(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The calling thread's memory as `[num_rows, num_columns]`, valid until it asks again; None where that is less
        than `least_bytes`, or more than there is."""
        num_bytes = num_rows * num_columns * dtype.itemsize
        if not self.least_bytes <= num_bytes <= self.num_bytes:
            return None
        return torch.from_numpy(self._memory[:num_bytes]).view(dtype).view(num_rows, num_columns)

"""Memory of the host in huge pages, for KV, which is read in any order, and weights, all of which each step reads.

A core's TLB knows 4 to 8 MiB of small pages, and where they lie in memory differs from one allocation to another:
engines that do the same differed by up to 16 % in their attention, for as long as they lived. Products of one row read
weights in huge pages 1.4 times as fast, which is as fast as memory is (`benchmarks.cpu_products`).
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
import torch

HUGE_PAGE = 2 << 20
"""Bytes, on x86 and, with usual pages, on Arm."""
ARENA = 32 << 20
"""Bytes of an arena for weights. A weight of more has memory of its own: of its last huge page, and of an arena's, some
is not used."""
ALIGNMENT = 64
"""Bytes of a cache line, at which a weight begins."""


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


class _Arena(threading.local):
    """Memory that a thread gives to its weights, one after the other, and how many bytes of it are given."""

    memory: np.ndarray | None = None
    given: int = 0


_arena = _Arena()


def weight_memory(num_bytes: int) -> torch.Tensor:
    """Memory for a weight, uint8 `[num_bytes]`, a storage of its own at a multiple of `ALIGNMENT`: zeros. Small weights
    lie one after the other in an arena, whose memory goes back to the system with the last of them. Raises
    `MemoryError` as `zeroed_memory` does."""
    if num_bytes > ARENA:
        return torch.from_numpy(zeroed_memory(num_bytes))
    start = -(-_arena.given // ALIGNMENT) * ALIGNMENT
    if _arena.memory is None or start + num_bytes > ARENA:
        _arena.memory, start = zeroed_memory(ARENA), 0
    _arena.given = start + num_bytes
    return torch.from_numpy(_arena.memory[start : _arena.given])  # of the array's part alone


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

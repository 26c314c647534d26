"""The sum over all ranks, in memory that they share: the same bits on each; and what each has, for rank 0."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch

from dflash_backend.parallel.shard import Shard

SLOT_BYTES = 1 << 20
"""What a rank gives at a time. Larger tensors are summed in pieces."""
# Between counters of ranks, so that two of them do not share a line of a core's cache.
COUNTER_BYTES = 64
HEAD_BYTES = 4096
# How often a rank looks whether the others have come before it sleeps between two looks: where each has a core, and
# where a rank that looks may keep another from coming.
LOOKS, FEW_LOOKS = 2000, 20
NAP_S = 50e-6


class SharedSum:
    """A sum over ranks of one machine, through memory that all have mapped.

    A rank writes its term to a slot of its own and then counts up its counter; once all counters have come as far, it
    adds all terms, in the order of ranks. Two sets of slots take turns: a rank that writes for the sum after the next
    has seen the others come to the next one, so they have read what it overwrites. Stores and loads of x86-64 keep
    their order, which is what this relies on. num_bytes: of all terms that this rank has given.
    """

    def __init__(self, memory: int, shard: Shard, lost: Callable[[], str] = lambda: "") -> None:
        """memory: a file descriptor of `sum_memory`, the same for all ranks. lost: why a rank is lost, empty while none
        is; asked while this one waits."""
        self._shard = shard
        self._lost = lost
        self._looks = LOOKS if shard.size <= len(os.sched_getaffinity(0)) else FEW_LOOKS
        self._count = 0
        self.num_bytes = 0
        mapped = mmap.mmap(memory, memory_bytes(shard.size))
        self._counters = memoryview(mapped)[:HEAD_BYTES].cast("q")
        data = torch.frombuffer(mapped, dtype=torch.uint8)[HEAD_BYTES:]
        self._slots = data.view(2, shard.size, SLOT_BYTES)
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `parallel.target.Reduce`. Raises `RuntimeError` when a rank is lost."""
        self.num_bytes += x.nbytes
        x = x.contiguous()
        flat, step = x.view(-1), SLOT_BYTES // x.element_size()
        for first in range(0, len(flat), step):
            self._add(flat[first : first + step])
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As `models.vocabulary.Sums.gather`. Raises `RuntimeError` when a rank is lost."""
        self.num_bytes += x.nbytes
        flat, step = x.contiguous().view(-1), SLOT_BYTES // x.element_size()
        found = [x.new_empty(x.shape) for _ in range(self._shard.size if self._shard.rank == 0 else 0)]
        for first in range(0, len(flat), step):
            # All wait for all here too: that is what lets the sets of slots take turns.
            for whole, term in zip(found, self._exchanged(flat[first : first + step]), strict=False):
                whole.view(-1)[first : first + step] = term
        return found

    def _add(self, x: torch.Tensor) -> None:
        """Sum at most one slot's numbers, in place."""
        add_terms(self._exchanged(x), x)

    def _exchanged(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has given, at most one slot's numbers, until the exchange after the next."""
        self._count += 1
        views = self._views.get(x.dtype) or self._typed(x.dtype)
        terms = [slot[: len(x)] for slot in views[self._count % 2]]
        terms[self._shard.rank].copy_(x)
        self._counters[self._shard.rank * COUNTER_BYTES // 8] = self._count
        for rank in range(self._shard.size):
            self._wait(rank)
        return terms

    def _typed(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        views = [[slot.view(dtype) for slot in slots] for slots in self._slots]
        self._views[dtype] = views
        return views

    def _wait(self, rank: int) -> None:
        """Until that rank has come to this sum."""
        counters, index = self._counters, rank * COUNTER_BYTES // 8
        looks = 0
        while counters[index] < self._count:
            looks += 1
            if looks < self._looks:
                os.sched_yield()
                continue
            if reason := self._lost():
                raise RuntimeError(reason)
            time.sleep(NAP_S)


def add_terms(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The sum of at least two terms, added in their order, of 16 bits in float32."""
    if out.dtype in (torch.float32, torch.float64):
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        return
    total = terms[0].float()
    for term in terms[1:]:
        total += term
    out.copy_(total)


def sum_memory(size: int) -> int:
    """Memory for `SharedSum` over that many ranks: a file descriptor that other processes may inherit. It is gone with
    the last process that has it."""
    memory = os.memfd_create("dflash-ranks")
    os.truncate(memory, memory_bytes(size))
    return memory


def memory_bytes(size: int) -> int:
    """Bytes of the memory that `size` ranks share."""
    assert size * COUNTER_BYTES <= HEAD_BYTES
    return HEAD_BYTES + 2 * size * SLOT_BYTES

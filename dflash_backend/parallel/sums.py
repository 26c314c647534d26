"""The sum over all ranks on CPUs, the same bits on each, and what each has, for rank 0.

On one machine terms lie in memory that all have mapped. Over a network gloo (torch.distributed) exchanges them, in the
clear. Both add terms in the order of ranks, so that no number's sum depends on where in a tensor it lies.
"""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, GatherOptions, ProcessGroupGloo, TCPStore

from dflash_backend.cores import usable_cores
from dflash_backend.listening import listening_socket
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


class PiecewiseSum(ABC):
    """A sum that is taken a piece at a time. num_bytes: of all terms that this rank has given."""

    piece_bytes: int

    def __init__(self, shard: Shard, lost: Callable[[], str]) -> None:
        """lost: why a rank is lost, empty while none is; asked while this one waits."""
        self._shard, self._lost = shard, lost
        self.num_bytes = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in its memory where it is contiguous. Raises `RuntimeError` when a rank
        is lost."""
        self.num_bytes += x.nbytes
        x = x.contiguous()
        flat, step = x.view(-1), self.piece_bytes // x.element_size()
        for first in range(0, len(flat), step):
            self._add(flat[first : first + step])
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As `parallel.vocabulary.Sums.gather`. Raises `RuntimeError` when a rank is lost."""
        self.num_bytes += x.nbytes
        flat, step = x.contiguous().view(-1), self.piece_bytes // x.element_size()
        found = [x.new_empty(x.shape) for _ in range(self._shard.size if self._shard.rank == 0 else 0)]
        for first in range(0, len(flat), step):
            self._give(flat[first : first + step], [whole.view(-1)[first : first + step] for whole in found])
        return found

    @abstractmethod
    def _add(self, x: torch.Tensor) -> None:
        """Sum at most one piece's numbers, in place."""

    @abstractmethod
    def _give(self, x: torch.Tensor, found: list[torch.Tensor]) -> None:
        """Bring at most one piece's numbers of each rank to rank 0, whose `found` they fill."""


class SharedSum(PiecewiseSum):
    """A sum over ranks of one machine, through memory that all have mapped.

    A rank writes its term to a slot of its own and then counts up its counter; once all counters have come as far, it
    adds all terms, in the order of ranks. Two sets of slots take turns: a rank that writes for the sum after the next
    has seen the others come to the next one, so they have read what it overwrites. Stores and loads of x86-64 keep
    their order, which is what this relies on.
    """

    piece_bytes = SLOT_BYTES

    def __init__(self, memory: int, shard: Shard, lost: Callable[[], str] = lambda: "") -> None:
        """memory: a file descriptor of `sum_memory`, the same for all ranks. lost: as of `PiecewiseSum`."""
        super().__init__(shard, lost)
        self._looks = LOOKS if shard.size <= usable_cores() else FEW_LOOKS
        self._count = 0
        mapped = mmap.mmap(memory, memory_bytes(shard.size))
        self._counters = memoryview(mapped)[:HEAD_BYTES].cast("q")
        data = torch.frombuffer(mapped, dtype=torch.uint8)[HEAD_BYTES:]
        self._slots = data.view(2, shard.size, SLOT_BYTES)
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    def _give(self, x: torch.Tensor, found: list[torch.Tensor]) -> None:
        # All wait for all here too: that is what lets the sets of slots take turns.
        for whole, term in zip(found, self._exchanged(x), strict=False):
            whole.copy_(term)

    def _add(self, x: torch.Tensor) -> None:
        add_terms(self._exchanged(x), x)

    def _exchanged(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has given, at most one slot's numbers, until the exchange after the next."""
        self._count += 1
        if (views := self._views.get(x.dtype)) is None:
            views = self._views[x.dtype] = [[slot.view(x.dtype) for slot in slots] for slots in self._slots]
        terms = [slot[: len(x)] for slot in views[self._count % 2]]
        terms[self._shard.rank].copy_(x)
        self._counters[self._shard.rank * COUNTER_BYTES // 8] = self._count
        for rank in range(self._shard.size):
            self._wait(rank)
        return terms

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


JOIN_S = 60.0
"""How long ranks may take to find each other once all have loaded."""
SUM_S = 60.0
"""How long a rank waits for the others in a sum. Gloo itself gives up after `JOIN_S`."""
LOOK_S = 0.2
"""How often it looks meanwhile whether one is lost."""


PIECE_BYTES = 4 << 20
"""What is summed at a time, which bounds the memory that a long prompt takes."""
SCATTER_BYTES = 64 << 10
"""From this size on bytes count for more than exchanges."""


class SumError(RuntimeError):
    """A sum failed since another rank has gone, or did not come in time."""


class NetworkSum(PiecewiseSum):
    """A sum over ranks that reach each other over a network. It raises `SumError`. `join` comes first."""

    piece_bytes = PIECE_BYTES

    def __init__(
        self, shard: Shard, lost: Callable[[], str] = lambda: "", cause: Callable[[], str] = lambda: ""
    ) -> None:
        """lost: as of `PiecewiseSum`. cause: the same, asked when a sum has failed: it may wait for the answer."""
        super().__init__(shard, lost)
        self._cause = cause
        # ProcessGroupGloo, whose operations its stubs leave out.
        self._group: Any = None
        self._store: TCPStore | None = None

    def serve_store(self, host: str) -> int:
        """On rank 0: open the port by which ranks find each other, at this address of the machine alone. Returns it."""
        listener = listening_socket(host, 0, backlog=128)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    def join(self, own_host: str, store_host: str = "", store_port: int = 0) -> None:
        """Connect to all other ranks, which do the same now. own_host: this machine's address towards them. The others
        than rank 0 give where its store is. Raises `SumError` when one does not come."""
        try:
            if self._store is None:
                limit = timedelta(seconds=JOIN_S)
                self._store = TCPStore(store_host, store_port, timeout=limit, wait_for_workers=False)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
            options._timeout = timedelta(seconds=JOIN_S)
            self._group = ProcessGroupGloo(self._store, self._shard.rank, self._shard.size, options)
        except (RuntimeError, DistNetworkError, DistStoreError) as error:
            raise SumError(f"the ranks did not find each other within {JOIN_S:g} s: {error}") from error

    def _give(self, x: torch.Tensor, found: list[torch.Tensor]) -> None:
        pieces = [piece.view(torch.uint8) for piece in found]
        self._wait(self._group.gather([pieces] if pieces else [], [x.view(torch.uint8)], GatherOptions()))

    def _add(self, x: torch.Tensor) -> None:
        size = self._shard.size
        if size == 2 or x.nbytes < SCATTER_BYTES:
            add_terms(self._gathered(x), x)
            return
        # Each rank adds one part and gives the others the sum: 2 / size of the bytes, in two exchanges.
        part = -(-len(x) // size)
        given = x.new_zeros(size * part)
        given[: len(x)] = x
        terms = torch.empty_like(given)
        self._wait(self._group.alltoall_base(terms.view(torch.uint8), given.view(torch.uint8), [], []))
        own = x.new_empty(part)
        add_terms(tuple(terms.view(size, part)), own)
        x.copy_(torch.cat(self._gathered(own))[: len(x)])

    def _gathered(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each rank has."""
        rows = x.new_empty(self._shard.size, len(x))
        # As bytes: gloo has not every type, and adds nothing here.
        self._wait(self._group.allgather([list(rows.view(torch.uint8))], [x.view(torch.uint8)]))
        return tuple(rows)

    def _wait(self, work: torch.distributed.Work) -> None:
        """Until all terms are here."""
        deadline = time.monotonic() + SUM_S
        while True:
            # Asked before the wait: a sum may be complete, and well, a moment after a wait for it has given up.
            is_completed = work.is_completed()
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if reason := self._lost():
                    raise SumError(reason) from error
                if is_completed:
                    raise SumError(self._cause() or f"a sum over the ranks failed: {error}") from error
                if time.monotonic() > deadline:
                    raise SumError(self._cause() or f"a rank did not come to a sum within {SUM_S:g} s") from error

"""The sum over ranks of several machines, over the network: the same bits on each.

Terms are exchanged by gloo (torch.distributed) and added in the order of ranks, as `SharedSum` does, so that no
number's sum depends on where in a tensor it lies. Numbers cross the network in the clear.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, GatherOptions, ProcessGroupGloo, TCPStore

from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.sums import add_terms

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


class NetworkSum:
    """A sum over ranks that reach each other over a network. num_bytes: of all terms that this rank has given."""

    def __init__(
        self, shard: Shard, lost: Callable[[], str] = lambda: "", cause: Callable[[], str] = lambda: ""
    ) -> None:
        """lost: why a rank is lost, empty while none is; asked while this one waits. cause: the same, asked when a sum
        has failed: it may wait for the answer. `join` comes first."""
        self._shard = shard
        self._lost = lost
        self._cause = cause
        # ProcessGroupGloo, whose operations its stubs leave out.
        self._group: Any = None
        self._store: TCPStore | None = None
        self.num_bytes = 0

    def serve_store(self, host: str) -> int:
        """On rank 0: open the port by which ranks find each other, at this address of the machine alone. Returns it."""
        listener = socket.create_server((host, 0), backlog=128)
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `parallel.target.Reduce`. Raises `SumError` when a rank is lost."""
        assert self._group is not None, "join comes first"
        self.num_bytes += x.nbytes
        x = x.contiguous()
        flat, step = x.view(-1), PIECE_BYTES // x.element_size()
        for first in range(0, len(flat), step):
            self._add(flat[first : first + step])
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As `models.vocabulary.Sums.gather`. Raises `SumError` when a rank is lost."""
        assert self._group is not None, "join comes first"
        self.num_bytes += x.nbytes
        given = x.contiguous().view(-1).view(torch.uint8)
        found = [x.new_empty(x.shape) for _ in range(self._shard.size if self._shard.rank == 0 else 0)]
        slots = [whole.view(-1).view(torch.uint8) for whole in found]
        for first in range(0, len(given), PIECE_BYTES):
            taken = slice(first, first + PIECE_BYTES)
            pieces = [slot[taken] for slot in slots]
            self._wait(self._group.gather([pieces] if pieces else [], [given[taken]], GatherOptions()))
        return found

    def _add(self, x: torch.Tensor) -> None:
        """Sum at most one piece's numbers, in place."""
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

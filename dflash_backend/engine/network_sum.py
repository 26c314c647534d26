"""The sum over ranks of several machines, over the network: the same bits on each.

Terms are gathered by gloo (torch.distributed) and added by each rank in the order of ranks, as `SharedSum` does, so
that no number's sum depends on where in a tensor it lies. Numbers cross the network in the clear.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroupGloo, TCPStore

from dflash_backend.engine.sums import add_terms
from dflash_backend.models.shard import Shard

JOIN_S = 60.0
"""How long ranks may take to find each other once all have loaded."""
SUM_S = 60.0
"""How long a rank waits for the others in a sum. Gloo itself gives up after `JOIN_S`."""
LOOK_S = 0.5
"""How often it looks meanwhile whether one is lost."""


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
        self._group: ProcessGroupGloo | None = None
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
        """As `models.parallel.Reduce`. Raises `SumError` when a rank is lost."""
        assert self._group is not None, "join comes first"
        self.num_bytes += x.nbytes
        x = x.contiguous()
        flat = x.view(-1)
        terms = flat.new_empty(self._shard.size, len(flat))
        # As bytes: gloo has not every type, and adds nothing here.
        rows = list(terms.view(torch.uint8))
        self._wait(self._group.allgather([rows], [flat.view(torch.uint8)]))  # type: ignore[attr-defined]
        add_terms(tuple(terms), flat)
        return x

    def _wait(self, work: torch.distributed.Work) -> None:
        """Until all terms are here."""
        deadline = time.monotonic() + SUM_S
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if reason := self._lost():
                    raise SumError(reason) from error
                if work.is_completed():
                    raise SumError(self._cause() or f"a sum over the ranks failed: {error}") from error
                if time.monotonic() > deadline:
                    raise SumError(self._cause() or f"a rank did not come to a sum within {SUM_S:g} s") from error

"""The sum over ranks on GPUs, by NCCL, in CUDA graphs as outside of them; and what each has, for rank 0.

NCCL reduces each number in one place and gives all ranks that result, so all have the same bits; `join` looks whether
that holds. In which order terms are added follows from where a number lies in the tensor. With `ordered` it does not:
terms are gathered and added in the order of ranks, as `SharedSum` does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from dflash_backend.parallel.nccl import Communicator, Nccl
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.sums import add_terms

_log = logging.getLogger(__name__)

JOIN_S = 60.0
"""How long ranks may take to find each other once all have loaded."""
LOOK_S = 0.1
ABORT_S = 5.0
"""How long work that waits for a lost rank may take to end once it is told to. After that only the process' end helps,
and a new engine takes its place."""
PROBE_NUMBERS = 4096


class Collectives(Protocol):
    """As `nccl.Communicator`."""

    def sum(self, x: torch.Tensor) -> None: ...

    def broadcast(self, x: torch.Tensor) -> None: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def abort(self) -> None: ...


Connect = Callable[[], Collectives]
"""Meets all other ranks. It may wait for ever for one that is lost."""


class GpuSum:
    """As `rank_links.Reduce`. num_bytes: of all terms that were given; those of a captured graph count once."""

    def __init__(self, shard: Shard, device: torch.device, connect: Connect, ordered: bool = False) -> None:
        """device: this rank's. `join` comes before the first sum."""
        self._shard = shard
        self._device = device
        self._connect = connect
        # The sum of two terms has no order.
        self._ordered = ordered and shard.size > 2
        self._group: Collectives | None = None
        self.num_bytes = 0

    @classmethod
    def by_nccl(cls, shard: Shard, device: torch.device, nccl: Nccl, unique_id: bytes, ordered: bool) -> GpuSum:
        """unique_id: as rank 0 has made it."""

        def connect() -> Communicator:
            torch.cuda.set_device(device)
            return Communicator(nccl, unique_id, shard.rank, shard.size)

        return cls(shard, device, connect, ordered)

    def join(self, lost: Callable[[], str] = lambda: "") -> None:
        """Meet the other ranks, which do the same now, and see that sums are equal on all. lost: why a rank is lost,
        empty while none is. Raises `RuntimeError` when one does not come."""
        found: list[Collectives | Exception] = []

        def connect() -> None:
            try:
                found.append(self._connect())
            except Exception as error:  # noqa: BLE001, raised below
                found.append(error)

        # It cannot be interrupted, so it waits in a thread that ends with the process.
        thread = threading.Thread(target=connect, name="nccl-join", daemon=True)
        thread.start()
        deadline = time.monotonic() + JOIN_S
        while thread.is_alive():
            thread.join(LOOK_S)
            if reason := lost():
                raise RuntimeError(reason)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the ranks did not find each other by NCCL within {JOIN_S:g} s: see that the machines reach each "
                    "other (NCCL_SOCKET_IFNAME names the network), and what NCCL_DEBUG=INFO says"
                )
        if isinstance(found[0], Exception):
            raise RuntimeError(f"the ranks did not find each other by NCCL: {found[0]}") from found[0]
        self._group = found[0]
        self._check()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `parallel.target.Reduce`."""
        self.num_bytes += x.nbytes
        x = x.contiguous()
        if not self._ordered:
            self._joined.sum(x)
            return x
        add_terms(tuple(self._gathered(x)), x)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As `models.vocabulary.Sums.gather`."""
        self.num_bytes += x.nbytes
        found = self._gathered(x.contiguous())
        return list(found) if self._shard.rank == 0 else []

    def broadcast(self, x: torch.Tensor) -> None:
        """What rank 0 has in `x`, which is contiguous, on all ranks."""
        self._joined.broadcast(x)

    def abort(self) -> None:
        """End what waits for a rank that is lost: a kernel that waits for it would do so for ever, and with it the
        thread that waits for the device. Where that does not help, this process ends."""
        group = self._group
        if group is None:
            return
        thread = threading.Thread(target=group.abort, name="nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_S)
        if thread.is_alive():
            _log.critical("work that waits for a lost rank does not end, so this process does; a new one may start")
            os._exit(1)

    @property
    def _joined(self) -> Collectives:
        assert self._group is not None, "join comes first"
        return self._group

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self._shard.size, *x.shape)
        self._joined.all_gather(x, out)
        return out

    def _check(self) -> None:
        """Raises `RuntimeError` on rank 0 where a sum differs between ranks: each chooses its experts by such sums, so
        they would add terms of different ones. It is the first exchange of each kind too, at which NCCL connects, as it
        may not while a graph is captured."""
        generator = torch.Generator().manual_seed(self._shard.rank)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(PROBE_NUMBERS, generator=generator).to(self._device, dtype)
            self.broadcast(x.clone())
            rows = self.gather(self(x))
            if any(not torch.equal(row, rows[0]) for row in rows[1:]):
                raise RuntimeError(
                    "a sum by NCCL has other bits on some ranks, and ranks must agree on them: update NCCL and the "
                    "driver"
                )

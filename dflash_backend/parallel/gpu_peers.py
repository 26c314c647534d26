"""What rank 0 asks of ranks on GPUs beside the target's passes: graphs of their own, memory, KV.

Rank 0 decides all of it: which graphs there are, when they are replayed, how many KV blocks each rank has. Ranks are
told in the order of the passes, so collectives have one order on all, in graphs as outside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_backend.models.peers import Peers, RankLostError
from dflash_backend.models.vocabulary import Sums
from dflash_backend.worker.memory import MemoryUse


@dataclass(frozen=True)
class BeginCapture:
    """What follows is captured and not run."""


@dataclass(frozen=True)
class EndCapture:
    """What was captured is kept as graph `number`; dropped where that is None."""

    number: int | None


@dataclass(frozen=True)
class Replay:
    """Run a graph."""

    number: int


@dataclass(frozen=True)
class Variants:
    """From now on passes run every kernel that they may need, or no longer."""

    every: bool


@dataclass(frozen=True)
class ReportFree:
    """Give the free bytes of the device."""


@dataclass(frozen=True)
class ReportUse:
    """Give what the memory goes to, and what the largest step since the weights were loaded took."""


@dataclass(frozen=True)
class AllocateKV:
    """Take a KV cache of this many blocks, in place of the one that there is."""

    num_blocks: int


Control = BeginCapture | EndCapture | Replay | Variants | ReportFree | ReportUse | AllocateKV
"""What rank 0 sends beside `parallel.target.Shared`."""


class Ranks(Protocol):
    """As `RankGroup`. num_sent: messages that were sent."""

    num_sent: int

    @property
    def lost(self) -> str: ...

    def send(self, step: Control) -> None: ...


class GpuPeers(Peers):
    """As `Peers`, of rank 0."""

    def __init__(self, ranks: Ranks, sums: Sums, device: torch.device) -> None:
        self._ranks = ranks
        self._sums = sums
        self._device = device
        self._num_graphs = 0

    def check(self) -> None:
        if reason := self._ranks.lost:
            raise RankLostError(reason)

    @contextmanager
    def every_variant(self) -> Iterator[None]:
        self._send(Variants(True))
        try:
            yield
        finally:
            self._send(Variants(False))

    @contextmanager
    def capturing(self) -> Iterator[Callable[[], None]]:
        number, self._num_graphs = self._num_graphs, self._num_graphs + 1
        self._send(BeginCapture())
        before, kept = self._ranks.num_sent, [False]
        completed = False

        def replay() -> None:
            if kept[0]:
                self._send(Replay(number))

        try:
            yield replay
            completed = True
        finally:
            # Half of a step may need nothing of the others.
            kept[0] = completed and self._ranks.num_sent > before
            self._send(EndCapture(number if kept[0] else None))

    def least_free(self, num_bytes: int) -> int:
        return min(row[0] for row in self._reports(ReportFree(), [num_bytes]))

    def uses(self, own: MemoryUse) -> list[MemoryUse]:
        """What each rank's memory goes to, rank 0's first, `own`. What graphs take is taken to be as here: a step of
        the others needs less."""
        rows = self._reports(ReportUse(), [own.total, own.weights, own.others, own.step or 0])
        others = [MemoryUse(total, weights, rest, step, own.graphs) for total, weights, rest, step in rows[1:]]
        return [own, *others]

    def allocate(self, num_blocks: int) -> None:
        """Let the others take their KV caches."""
        self._send(AllocateKV(num_blocks))

    def _reports(self, question: Control, own: list[int]) -> list[list[int]]:
        """What each rank answers, rank 0's first."""
        self._send(question)
        rows = self._sums.gather(torch.tensor(own, dtype=torch.int64, device=self._device))
        found = [row.tolist() for row in rows]
        self.check()
        return found

    def _send(self, message: Control) -> None:
        try:
            self._ranks.send(message)
        except RuntimeError as error:
            raise RankLostError(f"{type(message).__name__} did not reach all ranks: {error}") from error

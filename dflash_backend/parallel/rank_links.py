"""What rank 0 has of the other ranks, wherever they run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from dflash_backend.parallel.gpu_sum import GpuSum
from dflash_backend.parallel.rank_messages import RankSetup

BEAT_S = 0.5
"""How often a rank says that it lives."""
HANG_S = 10.0
"""The longest silence of a rank that serves. With more work than cores it may be seconds without a fault."""
NETWORK_SILENCE_S = 3.5
"""How long another machine may leave ZeroMQ's heartbeats without an answer. Its I/O thread answers them, so a rank that
is busy, even one that holds the interpreter lock, is not silent."""
START_SILENCE_S = 120.0
"""The longest silence of a rank that starts: Python and torch are loaded before it speaks."""
CAUSE_S = 1.0
"""How long a rank's end may take to show once a sum with it has failed."""


class Reduce(Protocol):
    """As `models.vocabulary.Sums`. num_bytes: of all terms that this rank has given."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]: ...


class RankLinks(Protocol):
    """The other ranks, numbered from 1. lost: why they were ended, empty while they serve."""

    lost: str

    @property
    def reduce(self) -> Reduce:
        """The sum over all ranks, once they serve."""

    def sum_by(self, gpu_sum: GpuSum) -> None:
        """Let `reduce` be that one, as of ranks on GPUs."""

    def start(self, setups: Sequence[RankSetup]) -> None:
        """Start a rank for each, which loads its part. Raises `ConfigError` where they cannot be started."""

    def num_beside(self, rank: int) -> int:
        """How many ranks share the machine of one, itself among them. Rank 0 is this process."""

    def device_index(self, rank: int) -> int:
        """Which of the GPUs that its process sees a rank runs on."""

    def name(self, rank: int) -> str:
        """For errors: its number, and where it runs if that is another machine."""

    def start_error(self, rank: int) -> str:
        """Wait until the rank has loaded; why it cannot, in its own words, empty when it has. Raises `RuntimeError`
        when it has ended or is silent without a word, as one that was killed: to start it again may help then."""

    def serve(self) -> None:
        """All have loaded: watch them from now on, and end all once one is lost, so that rank 0's sum with them fails.
        Raises `RuntimeError` when sums cannot be taken."""

    def send(self, data: bytes) -> None:
        """Give it to all. Raises `OSError` when one has gone."""

    def end(self) -> None:
        """End all ranks. It may be called twice."""


def cause_of(links: RankLinks) -> str:
    """Which rank is lost, once something has failed: that may show before its end does. Empty when none is."""
    deadline = time.monotonic() + CAUSE_S
    while not links.lost and time.monotonic() < deadline:
        time.sleep(CAUSE_S / 50)
    return links.lost

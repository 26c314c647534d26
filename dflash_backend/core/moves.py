"""Moves of KV between the device and the tiers, as the core asks for them: ids and hashes, no tensors.

A record is what one group of layers (`core/kv/groups.py`, by its number) keeps of one block: K and V of all its layers
with their scales, or a copy of a recurrent state. It lies at a slot, a number: on the device that is a block id or a
slot; in host memory a slot; a tier that finds records by their hashes alone ignores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

DEVICE = "device"
HOST = "host"
DISK = "disk"

MEDIUMS = {HOST: "CPU", DISK: "DISK"}
"""What KV events call the tiers, as vLLM does where it has one."""


class Record(NamedTuple):
    """A record to move from slot `source` to slot `target`; `replaces` is the hash of the one whose slot it takes
    in the tier, None where the slot was free."""

    group: int
    block_hash: bytes
    source: int
    target: int
    replaces: bytes | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Records that go from one of the device and the tiers, by name, to another, one after the other."""

    move_id: int
    source: str
    target: str
    records: tuple[Record, ...]

    @property
    def is_load(self) -> bool:
        """Whether a request waits for it."""
        return self.target == DEVICE


@dataclass(frozen=True, slots=True)
class Moved:
    """A move that has ended. arrived: for each record whether it is there, whole; its target's memory is not written
    any more in any case. seconds: that it took, the waits of `kv_move_mb_s` included. missing: of the records that did
    not arrive, the numbers of those that the source does not have (any more)."""

    move_id: int
    arrived: tuple[bool, ...]
    num_bytes: int
    seconds: float
    missing: frozenset[int] = frozenset()


class KVMover(Protocol):
    """Moves records in the background, loads before others, each kind in the order in which they were submitted.

    `worker.kv_mover.BackgroundMover` is one; tests have a toy.
    """

    def submit(self, move: Move) -> None:
        """Begin a move; returns at once. What steps that were submitted before have yet to read or write comes
        first."""
        ...

    def finished(self) -> list[Moved]:
        """The moves that have ended since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a move has ended that `finished` has not given yet, `timeout_s` at most."""
        ...

    def cancel(self, move_ids: frozenset[int]) -> None:
        """Stop these moves. Returns once none of them writes any more; `finished` gives each with what arrived."""
        ...

    def remove(self, tier: str, group: int, block_hash: bytes) -> None:
        """Remove a record from a tier that keeps it by its hash."""
        ...

    def kept(self, tier: str) -> list[tuple[int, bytes]]:
        """The records that a tier brought from before the start, as group and hash, the oldest use first."""
        ...

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
REMOTE = "remote"
"""Another server, which keeps the KV of a prompt for one request here (`docs/disaggregation.md`)."""

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


class Peer(NamedTuple):
    """Where another server keeps KV: its address, and the name of what it keeps, which is the hash of the last block.
    Who knows it knows the whole prompt and its salt."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Move:
    """Records that go from one of the device and the tiers, by name, to another, one after the other. peer: of those
    from `REMOTE`; a move without records tells it that nothing of it is needed."""

    move_id: int
    source: str
    target: str
    records: tuple[Record, ...]
    peer: Peer | None = None

    @property
    def is_load(self) -> bool:
        """Whether it comes to the device."""
        return self.target == DEVICE

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for it."""
        return self.is_load and bool(self.records)


@dataclass(frozen=True, slots=True)
class Moved:
    """A move that has ended. arrived: for each record whether it is there, whole; its target's memory is not written
    any more in any case. seconds: that it took, with the waits of `kv_move_mb_s` and without the steps before it.
    missing: of the records that did not arrive, the numbers of those that the source does not have (any more)."""

    move_id: int
    arrived: tuple[bool, ...]
    num_bytes: int
    seconds: float
    missing: frozenset[int] = frozenset()


class Kept(NamedTuple):
    """KV that is kept for another server: records by group, hash and slot (`Record.source`). key: as of `Peer`."""

    number: int
    key: bytes
    records: tuple[Record, ...]


class KVSender(Protocol):
    """Lets other servers read what is kept for them. `worker.kv_transfer.TransferServer` is one; tests have a toy."""

    host: str
    port: int
    engine_id: str

    def keep(self, kept: Kept) -> None:
        """What is kept has a name from now on; a reader that asks for it waits for `ready`."""
        ...

    def ready(self, number: int) -> None:
        """It can be read: what the device has yet to write of it comes first."""
        ...

    def withdraw(self, number: int) -> None:
        """It is kept no more. Who reads it now is told so in the end, and uses nothing of it."""
        ...

    def taken(self) -> list[int]:
        """The numbers of what others have read since the last call, or do not need; it is kept no more."""
        ...


class KVMover(Protocol):
    """Moves records in the background, what requests wait for before others, each kind in the order in which it was
    submitted.

    `worker.kv_mover.BackgroundMover` is one; tests have a toy. sender: of what is kept for other servers, None where
    nothing is.
    """

    sender: KVSender | None

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

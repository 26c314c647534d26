"""Which record of a group of layers lies at which slot: copies of recurrent states on the device, and what tiers have.

A record is known by its hash, which covers every token before its end, so it stays right whatever becomes of others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dflash_backend.core.scheduler_config import TierConfig

# Of the slots, those of records that were found may be at most this share: the rest lets new ones earn it.
MAX_USED_SHARE = 0.75


class RecordSlots:
    """`num_slots` slots for records.

    A slot is free, or reserved for what is being written, or has a record that can be found. Those never found since
    they came give way before those found, the one longest unused first; those that are read do not.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_given = 0  # slots given out so far, the lowest first
        self._free: list[int] = []
        self._reserved: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, int] = OrderedDict()
        self._used: OrderedDict[bytes, int] = OrderedDict()
        # Those that are read, and whether they were found: they do not give way, so no search passes them.
        self._pinned: dict[bytes, tuple[int, bool]] = {}
        self._readers: dict[bytes, int] = {}
        self.version = 0
        """Grows whenever a record can be found, or no longer."""

    def __len__(self) -> int:
        """Records that can be found."""
        return len(self._unused) + len(self._used) + len(self._pinned)

    def slot(self, block_hash: bytes) -> int | None:
        """Where a record is that can be found, which does not use it; None: nowhere."""
        if (pinned := self._pinned.get(block_hash)) is not None:
            return pinned[0]
        return self._unused.get(block_hash, self._used.get(block_hash))

    def reserved(self, block_hash: bytes) -> int | None:
        """The slot of a record that is being written; None: it is not."""
        return self._reserved.get(block_hash)

    def pin(self, block_hash: bytes) -> None:
        """Keep a record that can be found where it is, until `unpin`: it is read."""
        self._readers[block_hash] = self._readers.get(block_hash, 0) + 1
        for records in (self._unused, self._used):
            if block_hash in records:
                self._pinned[block_hash] = records.pop(block_hash), records is self._used

    def unpin(self, block_hash: bytes) -> None:
        """One reader fewer. After the last one the record stays as if it had come, or been found, now."""
        self._readers[block_hash] -= 1
        if self._readers[block_hash]:
            return
        del self._readers[block_hash]
        if (pinned := self._pinned.pop(block_hash, None)) is not None:
            slot, was_found = pinned
            if was_found:
                self._add_used(block_hash, slot)
            else:
                self._unused[block_hash] = slot

    def touch(self, block_hash: bytes, reused: bool) -> None:
        """Let a record that can be found stay longer; reused: since it was found."""
        if block_hash in self._pinned:
            slot, was_found = self._pinned[block_hash]
            self._pinned[block_hash] = slot, was_found or reused
            return
        records = self._unused if block_hash in self._unused else self._used
        if not reused or records is self._used:
            records.move_to_end(block_hash)
            return
        self._add_used(block_hash, records.pop(block_hash))

    def _add_used(self, block_hash: bytes, slot: int) -> None:
        """Add the latest one that was found, in place of the oldest where these are too many."""
        self._used[block_hash] = slot
        if len(self._used) > MAX_USED_SHARE * self.num_slots:
            oldest, slot = self._used.popitem(last=False)
            self._unused[oldest] = slot

    def reserve(self, block_hash: bytes, but: Collection[bytes] = ()) -> tuple[int, bytes | None] | None:
        """A slot for a record that is to be written, and the hash of the one that gives way for it; None: there is
        none, or the record is there, or will be. but: records that do not give way for it."""
        if block_hash in self._reserved or self.slot(block_hash) is not None:
            return None
        oldest = None
        if self._free:
            slot = self._free.pop()
        elif self._num_given < self.num_slots:
            slot, self._num_given = self._num_given, self._num_given + 1
        else:
            there = (each for records in (self._unused, self._used) for each in records)
            oldest = next((each for each in there if each not in but), None)
            if oldest is None:
                return None
            slot = self._take(oldest)
        self._reserved[block_hash] = slot
        return slot, oldest

    def settle(self, block_hash: bytes, is_there: bool) -> None:
        """A reserved record was written and can be found, or was not."""
        slot = self._reserved.pop(block_hash)
        if is_there:
            if block_hash in self._readers:  # of one that was here before
                self._pinned[block_hash] = slot, False
            else:
                self._unused[block_hash] = slot
            self.version += 1
        else:
            self._free.append(slot)

    def remove(self, block_hash: bytes) -> None:
        """A record that was to be found is not there."""
        if self.slot(block_hash) is not None:
            self._free.append(self._take(block_hash))

    def clear(self) -> list[bytes]:
        """No record can be found any more. Those that are being written stay. Returns which could be."""
        gone = [*self._unused, *self._used, *self._pinned]
        for block_hash in gone:
            self._free.append(self._take(block_hash))
        return gone

    def _take(self, block_hash: bytes) -> int:
        self.version += 1
        if block_hash in self._pinned:
            return self._pinned.pop(block_hash)[0]
        return self._unused.pop(block_hash) if block_hash in self._unused else self._used.pop(block_hash)


@dataclass
class KVTier:
    """name: as the mover knows it. groups: by their numbers in records."""

    name: str
    groups: Sequence[RecordSlots]

    @classmethod
    def of(cls, config: TierConfig) -> KVTier:
        """A tier that takes what leaves the device: host memory, or a disk."""
        return cls(config.name, [RecordSlots(num_slots) for num_slots in config.num_slots])

    @property
    def num_records(self) -> int:
        """Records that can be found."""
        return sum(map(len, self.groups))

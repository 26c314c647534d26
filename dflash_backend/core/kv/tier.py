"""One tier of KV: which records it has, by group and hash, where they are, and which of them gives way."""

from __future__ import annotations

from collections import OrderedDict

from dflash_backend.core.scheduler_config import TierConfig

# Of the slots of a tier, those of records that were found may be at most this share: the rest lets new ones earn it.
MAX_USED_SHARE = 0.75


class KVTier:
    """Where records are beside the device, by group and hash. By itself it has none, and takes none: a tier whose
    records come from elsewhere says where they are, and how long they stay."""

    def __init__(self, name: str) -> None:
        """name: as the mover knows it."""
        self.name = name

    @property
    def num_records(self) -> int:
        """Records that can be found."""
        return 0

    @property
    def most_records(self) -> int:
        """Records that it can take."""
        return 0

    def slot(self, group: int, block_hash: bytes) -> int | None:
        """Where a record is that can be found; None: nowhere."""
        return None

    def touch(self, group: int, block_hash: bytes, reused: bool) -> None:
        """Let a record that can be found stay longer; reused: since it was found."""

    def pin(self, group: int, block_hash: bytes) -> None:
        """Keep a record that can be found where it is, until `unpin`: it is read."""

    def unpin(self, group: int, block_hash: bytes) -> None:
        """One reader fewer."""

    def is_reserved(self, group: int, block_hash: bytes) -> bool:
        """Whether a record is being written."""
        return False

    def reserve(self, group: int, block_hash: bytes) -> tuple[int, bytes | None] | None:
        """A slot for a record that is to be written, and the hash of the one that gives way for it; None: there is
        none, or the record is there, or will be."""
        return None

    def settle(self, group: int, block_hash: bytes, is_there: bool) -> None:
        """A reserved record was written and can be found, or was not."""

    def remove(self, group: int, block_hash: bytes) -> None:
        """A record that was to be found is not there."""

    def check(self) -> int:
        """Raise AssertionError when slots are lost; how many reads are under way. For tests."""
        return 0


class TierSlots:
    """Which record of one group lies at which of a tier's slots.

    A slot is free, or reserved for what is being written, or has a record that can be found. Those never found since
    they came give way before those found, the one longest unused first; those that are read do not.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_given = 0  # slots given out so far, the lowest first
        self._free: list[int] = []
        self._reserved: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, int] = OrderedDict()
        self._used: OrderedDict[bytes, int] = OrderedDict()
        self._readers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._unused) + len(self._used)

    def slot(self, block_hash: bytes) -> int | None:
        """As `KVTier.slot`."""
        return self._unused.get(block_hash, self._used.get(block_hash))

    def pin(self, block_hash: bytes) -> None:
        """As `KVTier.pin`."""
        self._readers[block_hash] = self._readers.get(block_hash, 0) + 1

    def unpin(self, block_hash: bytes) -> None:
        """As `KVTier.unpin`."""
        self._readers[block_hash] -= 1
        if not self._readers[block_hash]:
            del self._readers[block_hash]

    def is_reserved(self, block_hash: bytes) -> bool:
        """Whether a record is being written."""
        return block_hash in self._reserved

    def touch(self, block_hash: bytes, reused: bool) -> None:
        """Let a record that can be found stay longer; reused: since it was found."""
        records = self._unused if block_hash in self._unused else self._used
        if not reused or records is self._used:
            records.move_to_end(block_hash)
            return
        slot = records.pop(block_hash)
        self._used[block_hash] = slot
        if len(self._used) > MAX_USED_SHARE * self._num_slots:
            oldest, other = self._used.popitem(last=False)
            self._unused[oldest] = other

    def reserve(self, block_hash: bytes) -> tuple[int, bytes | None] | None:
        """As `KVTier.reserve`."""
        if block_hash in self._reserved or self.slot(block_hash) is not None:
            return None
        oldest = None
        if self._free:
            slot = self._free.pop()
        elif self._num_given < self._num_slots:
            slot, self._num_given = self._num_given, self._num_given + 1
        else:
            oldest = self._oldest()
            if oldest is None:
                return None
            slot = self._take(oldest)
        self._reserved[block_hash] = slot
        return slot, oldest

    def settle(self, block_hash: bytes, is_there: bool) -> None:
        """As `KVTier.settle`."""
        slot = self._reserved.pop(block_hash)
        if is_there:
            self._unused[block_hash] = slot
        else:
            self._free.append(slot)

    def remove(self, block_hash: bytes) -> None:
        """As `KVTier.remove`."""
        if self.slot(block_hash) is not None:
            self._free.append(self._take(block_hash))

    def _oldest(self) -> bytes | None:
        for records in (self._unused, self._used):
            for block_hash in records:
                if block_hash not in self._readers:
                    return block_hash
        return None

    def _take(self, block_hash: bytes) -> int:
        return self._unused.pop(block_hash) if block_hash in self._unused else self._used.pop(block_hash)

    def check(self) -> int:
        """As `KVTier.check`."""
        slots = [*self._free, *self._reserved.values(), *self._unused.values(), *self._used.values()]
        assert sorted(slots) == list(range(self._num_given)), "a slot is lost, or is in two lists"
        hashes = [*self._reserved, *self._unused, *self._used]
        assert len(set(hashes)) == len(hashes), "a record has two slots"
        assert self._num_given <= self._num_slots, "a slot too many"
        return sum(self._readers.values())


class StoredTier(KVTier):
    """A tier that takes what leaves the device: host memory, or a disk."""

    def __init__(self, config: TierConfig) -> None:
        super().__init__(config.name)
        self._groups = [TierSlots(num_slots) for num_slots in config.num_slots]
        self._most = sum(config.num_slots)

    @property
    def num_records(self) -> int:
        return sum(map(len, self._groups))

    @property
    def most_records(self) -> int:
        return self._most

    def slot(self, group: int, block_hash: bytes) -> int | None:
        return self._groups[group].slot(block_hash)

    def touch(self, group: int, block_hash: bytes, reused: bool) -> None:
        self._groups[group].touch(block_hash, reused)

    def pin(self, group: int, block_hash: bytes) -> None:
        self._groups[group].pin(block_hash)

    def unpin(self, group: int, block_hash: bytes) -> None:
        self._groups[group].unpin(block_hash)

    def is_reserved(self, group: int, block_hash: bytes) -> bool:
        return self._groups[group].is_reserved(block_hash)

    def reserve(self, group: int, block_hash: bytes) -> tuple[int, bytes | None] | None:
        return self._groups[group].reserve(block_hash) if group < len(self._groups) else None

    def settle(self, group: int, block_hash: bytes, is_there: bool) -> None:
        self._groups[group].settle(block_hash, is_there)

    def remove(self, group: int, block_hash: bytes) -> None:
        self._groups[group].remove(block_hash)

    def check(self) -> int:
        return sum(slots.check() for slots in self._groups)

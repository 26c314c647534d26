"""Copies of recurrent states at block borders of prompts, which let a prompt go on after blocks that are cached.

A target with recurrent layers keeps one state of a request for all positions, so cached K and V are of no use without
the state after them. The worker has `num_slots` slots for such copies beside those of requests. Here is what each
holds: the state after the block with a hash, which covers every token before it, so a copy stays right whatever
becomes of the blocks. Nothing is held: who starts with a copy has it copied before the step's rows run, and a slot that
is given away is written after that. A load from a tier does not wait for that step, and gets none that it reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

# At most this share of the slots may hold copies that were used; the rest lets new ones earn a use.
MAX_USED_SHARE = 0.75


class StateSnapshots:
    """Which slot holds the state after which block.

    A slot is free, or is to be written by a step that was planned (pending), or holds a copy that can be found. Those
    never used are given away before those used, the longest unused first.
    """

    def __init__(self, num_slots: int, removed: Callable[[bytes], None] | None = None) -> None:
        """removed: is told of copies that can no longer be found."""
        self.num_slots = num_slots
        self._removed = removed
        self._free = list(range(num_slots - 1, -1, -1))
        self._pending: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, int] = OrderedDict()
        self._used: OrderedDict[bytes, int] = OrderedDict()
        self.version = 0
        """Grows whenever a copy can be found, or no longer."""

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks a request can start after: up to the last with a copy."""
        for count in range(num_blocks, 0, -1):
            block_hash = hashes[count - 1]
            if block_hash in self._unused or block_hash in self._used:
                return count
        return 0

    def use(self, block_hash: bytes) -> int:
        """The slot of a copy that can be found; it is used."""
        slot = self._unused.pop(block_hash, None)
        if slot is None:
            self._used.move_to_end(block_hash)
            return self._used[block_hash]
        self._used[block_hash] = slot
        if len(self._used) > MAX_USED_SHARE * self.num_slots:
            longest_unused, other = self._used.popitem(last=False)
            self._unused[longest_unused] = other
        return slot

    def reserve(self, block_hash: bytes, but: Collection[bytes] = ()) -> int | None:
        """A slot for the state after a block, which a step will write; None where there is none to give away, or where
        the block has a copy, or will have. but: copies that are not given away for it."""
        if block_hash in self._pending or block_hash in self._unused or block_hash in self._used:
            return None
        if not self._free and not self._give_away(but):
            return None
        self._pending[block_hash] = slot = self._free.pop()
        return slot

    def _give_away(self, but: Collection[bytes]) -> bool:
        """Free the slot of a copy, but for these; False where there is no other."""
        for copies in (self._unused, self._used):
            for block_hash in copies:
                if block_hash not in but:
                    self._free.append(copies.pop(block_hash))
                    self.version += 1
                    if self._removed is not None:
                        self._removed(block_hash)
                    return True
        return False

    def slot(self, block_hash: bytes) -> int | None:
        """The slot of a copy that can be found, which does not use it."""
        return self._unused.get(block_hash, self._used.get(block_hash))

    def slot_of_pending(self, block_hash: bytes) -> int:
        """The slot of a pending copy."""
        return self._pending[block_hash]

    def publish(self, block_hash: bytes) -> None:
        """A pending copy was written: it can be found."""
        self._unused[block_hash] = self._pending.pop(block_hash)
        self.version += 1

    def drop(self, block_hash: bytes) -> None:
        """A pending copy will not be published. The step in flight may still write it, before any other's."""
        self._free.append(self._pending.pop(block_hash))

    def clear(self) -> None:
        """No copy can be found any more. Pending ones stay."""
        for copies in (self._unused, self._used):
            self._free.extend(copies.values())
            if self._removed is not None:
                for block_hash in copies:
                    self._removed(block_hash)
            copies.clear()
        self.version += 1

    def check(self, pending: Sequence[bytes]) -> None:
        """Raise AssertionError unless each slot is in one place, and `pending` are those of the requests. For tests."""
        slots = [*self._free, *self._pending.values(), *self._unused.values(), *self._used.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or is in two places"
        assert sorted(self._pending) == sorted(pending), "pending copies and requests differ"
        hashes = [*self._pending, *self._unused, *self._used]
        assert len(set(hashes)) == len(hashes), "a block has two copies"
        assert len(self._used) <= max(1, MAX_USED_SHARE * self.num_slots), "too many copies count as used"

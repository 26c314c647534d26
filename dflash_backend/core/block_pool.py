"""Which KV block is held by how many requests, which are free, and which still hold something worth finding again.

Called by `KVManager` only. A block id is a number from 0 to `num_blocks - 1`; it names the same positions in every
target layer and every drafter layer (invariant TOGETHER), so this file counts for both models at once. Every operation
costs O(1) per block, however full the prefix cache is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, the free blocks in the order in which they are given out, and digest -> cached block.

    A block is in one of three states::

        held       reference count >= 1; may be cached as well, then several requests may share it
        unused     free, holds nothing to find: given out first, the latest freed first
        evictable  free and cached: given out when no unused block is left, the longest free first
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._unused = list(range(num_blocks - 1, -1, -1))
        # An OrderedDict is a doubly linked list with an index: a hit takes a block out of the middle in O(1).
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out, the evictable ones included."""
        return len(self._unused) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def ref_count(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is in the prefix cache, so that nobody may write it any more."""
        return self._digests[block_id] is not None

    def lookup(self, digest: bytes) -> int | None:
        """The cached block with this digest, or None."""
        return self._cached.get(digest)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each held once and cached by nobody.

        Cached blocks among them leave the prefix cache. Raises ValueError when fewer are free; nothing is taken then.
        """
        if count > self.num_free:
            raise ValueError(f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are free")
        block_ids = []
        for _ in range(count):
            if self._unused:
                block_id = self._unused.pop()
            else:
                block_id, _ = self._evictable.popitem(last=False)
                self._evict(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold these cached blocks once more; free ones stop being evictable."""
        for block_id in block_ids:
            if self._digests[block_id] is None:
                raise ValueError(f"KV block {block_id} is not cached, so it cannot be shared")
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up a request's blocks, listed from its first to its last position.

        They are freed from the tail, so that the tail is evicted first: the head is what other prompts share, and a
        later block cannot be hit without all before it.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] == 0:
                raise ValueError(f"KV block {block_id} is freed and nobody holds it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._digests[block_id] is None:
                    self._unused.append(block_id)
                else:
                    self._evictable[block_id] = None

    def publish(self, block_id: int, digest: bytes) -> bool:
        """Put a held block into the prefix cache; whether it went in.

        When another block has the digest already that one stays, and this one remains an ordinary block of its
        request: replacing it would change block tables that the worker has already been given.
        """
        if self._ref_counts[block_id] == 0 or self._digests[block_id] is not None:
            raise ValueError(f"KV block {block_id} is free or cached already, so it cannot be published")
        if digest in self._cached:
            return False
        self._cached[digest] = block_id
        self._digests[block_id] = digest
        return True

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless counts and lists agree with the block tables of all live requests.

        With no tables this is invariant RETURN: every block free, every reference count zero. For tests: O(blocks).
        """
        held = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block table names a block twice: {table}"
            for block_id in table:
                held[block_id] += 1
        assert held == self._ref_counts, "reference counts differ from the block tables"
        free = set(self._unused) | set(self._evictable)
        assert len(free) == self.num_free, "a block is in the free lists twice"
        assert free == {block_id for block_id, count in enumerate(held) if count == 0}, "free lists and counts differ"
        cached = {block_id: digest for block_id, digest in enumerate(self._digests) if digest is not None}
        assert {block_id: digest for digest, block_id in self._cached.items()} == cached, "the cache map is torn"
        assert cached.keys() >= self._evictable.keys(), "an evictable block is not cached"
        assert cached.keys().isdisjoint(self._unused), "an unused block is cached"

    def _evict(self, block_id: int) -> None:
        digest = self._digests[block_id]
        assert digest is not None, "only cached blocks are evictable"
        del self._cached[digest]
        self._digests[block_id] = None

"""Which KV block is held by how many requests, which are free, and which still hold something worth finding again.

Called by `KVManager` only. A block id is a number from 0 to `num_blocks - 1`; it names the same positions in every
target layer and every drafter layer (invariant TOGETHER), so this file counts for both models at once. Every operation
costs O(1) per block, however full the prefix cache is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from dflash_backend.core.block_lists import BlockLists

# The evictable blocks, by whether a request has found them since they were cached.
COLD, HOT = 0, 1
# Of a pool's blocks, free hot ones may be so many: the rest is left for new prompts to show that they are shared.
MAX_HOT_SHARE = 0.75
# A hot block that nobody found while so many pools' worth of blocks were evicted is cold again.
HOT_LIFE_IN_POOLS = 4


class BlockPool:
    """Reference counts, the free blocks in the order in which they are given out, and digest -> cached block.

    A block is in one of four states::

        held    reference count >= 1; may be cached as well, then several requests may share it
        unused  free, holds nothing to find: given out first, the latest freed first
        cold    free and cached, never found again: given out when no unused block is left, the longest free first
        hot     free, cached and found at least once: given out when no cold block is left, the longest free first

    That hot blocks outlive cold ones keeps a shared prefix through any number of prompts that nobody asks twice (the
    idea of segmented LRU: Karedla, Love, Wherry 1994). Hot blocks turn cold, and so go the way of the others, when they
    fill more than `MAX_HOT_SHARE` of the pool, the longest free first, and when they outlive `HOT_LIFE_IN_POOLS`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = array("q", bytes(8 * num_blocks))
        self._digests: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # For a cached block the one last published behind it, or -1. A hint for `find_chain`, never cleared.
        self._next_block = array("q", [-1]) * num_blocks
        self._unused = array("q", range(num_blocks - 1, -1, -1))
        self._evictable = BlockLists(num_blocks, num_lists=2)
        self._num_cold = 0
        self._num_hot = 0
        self._max_hot = int(num_blocks * MAX_HOT_SHARE)
        self._found = bytearray(num_blocks)  # 1 for a cached block that a request has found
        self.num_evicted = 0
        self._hot_since = array("q", bytes(8 * num_blocks))  # `num_evicted` when the block became free and hot

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out, the evictable ones included."""
        return len(self._unused) + self._num_cold + self._num_hot

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

    def find_chain(self, digests: Sequence[bytes], num_blocks: int) -> list[int]:
        """Ids of the cached blocks with the first digests, up to one that is not cached, `num_blocks` at most.

        Neighbours were mostly published one after the other. Following that order touches memory in order, where each
        look into the map would be a cache miss of its own in a pool of a million blocks. The digest decides.
        """
        found: list[int] = []
        cached, digest_of, next_block, hint = self._cached, self._digests, self._next_block, -1
        for index in range(num_blocks):
            digest = digests[index]
            block_id = hint if hint >= 0 and digest_of[hint] == digest else cached.get(digest)
            if block_id is None:
                break
            found.append(block_id)
            hint = next_block[block_id]
        return found

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each held once and cached by nobody.

        Cached blocks among them leave the prefix cache. Raises ValueError when fewer are free; nothing is taken then.
        """
        if count > self.num_free:
            raise ValueError(f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are free")
        block_ids = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int], found: bool = True) -> None:
        """Hold these cached blocks once more; free ones stop being evictable.

        `found` says that another request than the one that computed them has a use for them, which makes them hot.
        """
        for block_id in block_ids:
            if self._digests[block_id] is None:
                raise ValueError(f"KV block {block_id} is not cached, so it cannot be shared")
            if self._ref_counts[block_id] == 0:
                self._take_out(block_id)
            self._ref_counts[block_id] += 1
            if found:
                self._found[block_id] = 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up a request's blocks, listed from its first to its last position.

        They are freed from the tail, so that the tail is evicted first: the head is what other prompts share, and a
        later block cannot be hit without all before it.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id]
            if count == 0:
                raise ValueError(f"KV block {block_id} is freed and nobody holds it")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                if self._digests[block_id] is None:
                    self._unused.append(block_id)
                elif self._found[block_id]:
                    self._make_hot(block_id)
                else:
                    self._make_cold(block_id)

    def publish(self, block_id: int, digest: bytes, before: int | None = None) -> bool:
        """Put a held block into the prefix cache; whether it went in. `before` is the block before it in its request.

        When another block has the digest already that one stays, and this one remains an ordinary block of its
        request: replacing it would change block tables that the worker has already been given.
        """
        if self._ref_counts[block_id] == 0 or self._digests[block_id] is not None:
            raise ValueError(f"KV block {block_id} is free or cached already, so it cannot be published")
        if digest in self._cached:
            return False
        self._cached[digest] = block_id
        self._digests[block_id] = digest
        if before is not None:
            self._next_block[before] = block_id
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
        assert held == self._ref_counts.tolist(), "reference counts differ from the block tables"
        cold, hot = list(self._evictable.walk(COLD)), list(self._evictable.walk(HOT))
        assert (len(cold), len(hot)) == (self._num_cold, self._num_hot), "an eviction list and its count differ"
        assert len(hot) <= self._max_hot, "more free blocks are hot than may be"
        free = {*self._unused, *cold, *hot}
        assert len(free) == self.num_free, "a block is in the free lists twice"
        assert free == {block_id for block_id, count in enumerate(held) if count == 0}, "free lists and counts differ"
        cached = {block_id: digest for block_id, digest in enumerate(self._digests) if digest is not None}
        assert {block_id: digest for digest, block_id in self._cached.items()} == cached, "the cache map is torn"
        assert cached.keys() >= {*cold, *hot}, "an evictable block is not cached"
        assert cached.keys().isdisjoint(self._unused), "an unused block is cached"
        assert all(self._found[block_id] for block_id in hot), "a block is hot that nobody found"
        assert not any(self._found[block_id] for block_id in cold), "a block is cold that somebody found"

    def _make_cold(self, block_id: int) -> None:
        self._evictable.append(COLD, block_id)
        self._num_cold += 1

    def _make_hot(self, block_id: int) -> None:
        self._evictable.append(HOT, block_id)
        self._num_hot += 1
        self._hot_since[block_id] = self.num_evicted
        if self._num_hot > self._max_hot:
            self._cool()

    def _cool(self) -> None:
        """Turn the hot block that has been free for longest cold: it has to be found again to be hot again."""
        block_id = self._evictable.first(HOT)
        self._take_out(block_id)
        self._found[block_id] = 0
        self._make_cold(block_id)

    def _take_out(self, block_id: int) -> None:
        self._evictable.remove(block_id)
        if self._found[block_id]:
            self._num_hot -= 1
        else:
            self._num_cold -= 1

    def _evict(self) -> int:
        """Take the free block that is least worth keeping out of the prefix cache."""
        if self._num_hot:
            age = self.num_evicted - self._hot_since[self._evictable.first(HOT)]
            if not self._num_cold or age > HOT_LIFE_IN_POOLS * self.num_blocks:
                self._cool()
        block_id = self._evictable.first(COLD)
        self._take_out(block_id)
        digest = self._digests[block_id]
        assert digest is not None, "only cached blocks are evictable"
        del self._cached[digest]
        self._digests[block_id] = None
        self.num_evicted += 1
        return block_id

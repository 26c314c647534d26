"""Which KV block is held by how many requests, which are free, and which still hold something worth finding again.

A block id is a number from 0 to `num_blocks - 1`; it names the same positions in every target layer and every drafter
layer (TOGETHER), so one pool counts for both models at once; layers with a window may have a pool of their own. Every
operation costs O(1) per block, however full the prefix cache is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from dflash_backend.messages import DEVICE_MEDIUM, BlocksRemoved, BlocksStored, KVEvent


class BlockLists:
    """`num_lists` doubly linked lists, numbered from 0, over the block ids from 0 to `num_blocks - 1`.

    A block is in one list at most. The links are two integers a block in flat arrays: no object to allocate for a block
    and none for the garbage collector to visit, however many there are. Behind the blocks' links lie those of each
    list's end, which closes the list to a ring; in an empty list it points at itself.
    """

    def __init__(self, num_blocks: int, num_lists: int) -> None:
        self._num_blocks = num_blocks
        self._next = array("q", range(num_blocks + num_lists))
        self._prev = array("q", range(num_blocks + num_lists))

    def append(self, number: int, block_id: int) -> None:
        """Put a block that is in no list at the end of list `number`."""
        end = self._num_blocks + number
        last = self._prev[end]
        self._next[last] = block_id
        self._prev[block_id] = last
        self._next[block_id] = end
        self._prev[end] = block_id

    def remove(self, block_id: int) -> None:
        """Take a block out of the list that it is in."""
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before

    def first(self, number: int) -> int:
        """The block that has been in list `number` for longest, which must not be empty."""
        return self._next[self._num_blocks + number]


# The two lists of evictable blocks, by whether a request has reused them since they were cached.
PROBATIONARY, PROTECTED = 0, 1
# At most this share of the pool may be free protected blocks; the rest lets new prefixes earn a second hit.
MAX_PROTECTED_SHARE = 0.75
# A protected block becomes probationary when this many pools' worth of blocks were evicted since its last use.
PROTECTED_LIFE_IN_POOLS = 4


class BlockPool:
    """Reference counts, the free blocks in the order in which they are given out, and block hash -> cached block.

    A block is in one of four states::

        held          reference count >= 1; may be cached as well, then several requests may share it
        unused        free, holds nothing to find: given out first, the latest freed first
        probationary  free and cached, never reused: given out when no unused block is left, the longest free first
        protected     free, cached and reused at least once: given out last, the longest free first

    Protected blocks outlive probationary ones, which keeps a shared prefix through any number of prompts that are asked
    once (segmented LRU: Karedla, Love, Wherry 1994). Protected blocks become probationary when they fill more than
    `MAX_PROTECTED_SHARE` of the pool, the longest free first, and when they outlive `PROTECTED_LIFE_IN_POOLS`.
    """

    def __init__(self, num_blocks: int, removed: Callable[[bytes], None] | None = None) -> None:
        """removed: is told of blocks that leave the prefix cache, by their hashes."""
        self.num_blocks = num_blocks
        self._removed = removed
        self._ref_counts = array("q", bytes(8 * num_blocks))
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # For a cached block the one last published after it, or -1. A hint for `find_chain`, never cleared.
        self._next_block = array("q", [-1]) * num_blocks
        self._unused = array("q", range(num_blocks - 1, -1, -1))
        self._evictable = BlockLists(num_blocks, num_lists=2)
        self._num_evictable = [0, 0]  # in each of the two lists
        self._max_protected = int(num_blocks * MAX_PROTECTED_SHARE)
        self._reused = bytearray(num_blocks)  # `PROTECTED` for a cached block that another request has used
        self.num_evicted = 0
        self._num_published = 0
        self._protected_since = array(
            "q", bytes(8 * num_blocks)
        )  # `num_evicted` when the block became free and protected

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out, the evictable ones included."""
        return len(self._unused) + sum(self._num_evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    @property
    def cache_version(self) -> int:
        """Grows whenever a block enters or leaves the prefix cache."""
        return self.num_evicted + self._num_published

    def ref_count(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is in the prefix cache, so no request may write it any more."""
        return self._hashes[block_id] is not None

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash under which the block can be found; None where it cannot."""
        return self._hashes[block_id]

    def is_reused(self, block_id: int) -> bool:
        """Whether another request has found the cached block."""
        return bool(self._reused[block_id])

    def find_chain(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        """Ids of the cached blocks with the first hashes, up to one that is not cached, `num_blocks` at most.

        Neighbours were mostly published one after the other. Following that order touches memory in order, where each
        map lookup would be a cache miss of its own in a pool of a million blocks. The hash decides.
        """
        found: list[int] = []
        cached, hash_of, next_block, hint = self._cached, self._hashes, self._next_block, -1
        for index in range(num_blocks):
            block_hash = hashes[index]
            block_id = hint if hint >= 0 and hash_of[hint] == block_hash else cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
            hint = next_block[block_id]
        return found

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each held once and not cached.

        Cached blocks among them leave the prefix cache. Raises ValueError when fewer are free; nothing is taken then.
        """
        if count > self.num_free:
            raise ValueError(f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are free")
        block_ids = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int], reused: bool = True) -> None:
        """Hold these cached blocks once more; free ones stop being evictable.

        `reused`: another request than the one that computed them uses them, which makes them protected.
        """
        for block_id in block_ids:
            if self._hashes[block_id] is None:
                raise ValueError(f"KV block {block_id} is not cached, so it cannot be shared")
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
            self._ref_counts[block_id] += 1
            if reused:
                self._reused[block_id] = 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up a request's blocks, listed from its first to its last position.

        They are freed from the tail, so that the tail is evicted first: the head is what other prompts share, and a
        later block cannot be hit without all before it.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id]
            if count == 0:
                raise ValueError(f"KV block {block_id} is freed and not held")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                if self._hashes[block_id] is None:
                    self._unused.append(block_id)
                else:
                    self._link(block_id)

    def publish(self, block_id: int, block_hash: bytes, before: int | None = None) -> bool:
        """Put a held block into the prefix cache; whether it went in. `before` is the block before it in its request.

        When another block has the hash already, that one stays, and this one remains an ordinary block of its
        request: replacing it would change block tables that the worker has already been given.
        """
        if self._ref_counts[block_id] == 0 or self._hashes[block_id] is not None:
            raise ValueError(f"KV block {block_id} is free or cached already, so it cannot be published")
        if block_hash in self._cached:
            return False
        self._cached[block_hash] = block_id
        self._hashes[block_id] = block_hash
        self._num_published += 1
        if before is not None:
            self._next_block[before] = block_id
        return True

    def reset_prefix_cache(self) -> None:
        """Take every block out of the prefix cache. Those that requests hold stay theirs."""
        for block_hash, block_id in self._cached.items():
            self._hashes[block_id] = None
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
                self._unused.append(block_id)
            self._reused[block_id] = 0
            self.num_evicted += 1
            if self._removed is not None:
                self._removed(block_hash)
        self._cached.clear()

    def _link(self, block_id: int) -> None:
        """Put a free cached block into its list."""
        number = self._reused[block_id]
        self._evictable.append(number, block_id)
        self._num_evictable[number] += 1
        if number == PROTECTED:
            self._protected_since[block_id] = self.num_evicted
            if self._num_evictable[PROTECTED] > self._max_protected:
                self._demote()

    def _demote(self) -> None:
        """Make the protected block that has been free for longest probationary."""
        block_id = self._evictable.first(PROTECTED)
        self._unlink(block_id)
        self._reused[block_id] = PROBATIONARY
        self._link(block_id)

    def _unlink(self, block_id: int) -> None:
        self._evictable.remove(block_id)
        self._num_evictable[self._reused[block_id]] -= 1

    def _evict(self) -> int:
        """Take the least valuable free block out of the prefix cache."""
        if self._num_evictable[PROTECTED]:
            age = self.num_evicted - self._protected_since[self._evictable.first(PROTECTED)]
            if not self._num_evictable[PROBATIONARY] or age > PROTECTED_LIFE_IN_POOLS * self.num_blocks:
                self._demote()
        block_id = self._evictable.first(PROBATIONARY)
        self._unlink(block_id)
        block_hash = self._hashes[block_id]
        assert block_hash is not None, "only cached blocks are evictable"
        del self._cached[block_hash]
        self._hashes[block_id] = None
        self.num_evicted += 1
        if self._removed is not None:
            self._removed(block_hash)
        return block_id


class KVEventLog:
    """What entered and left the prefix cache since it was last asked for, in order: for a router of several engines.
    `with_tokens`: events name the tokens of blocks too."""

    def __init__(self, with_tokens: bool = False) -> None:
        self.with_tokens = with_tokens
        self._events: list[KVEvent] = []

    def stored(self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """A block was published. parent: the hash of the block before it in its text, None for the first. token_ids:
        the block's; they are ignored unless events name them."""
        own = list(token_ids) if self.with_tokens else []
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.medium == DEVICE_MEDIUM and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
            last.token_ids.extend(own)
        else:
            self._events.append(BlocksStored([block_hash], parent, own))

    def removed(self, block_hash: bytes) -> None:
        """A block was evicted."""
        self.moved(block_hash, DEVICE_MEDIUM, stored=False)

    def moved(self, block_hash: bytes, medium: str, stored: bool) -> None:
        """A block came to a tier, or left it; medium: what events call the tier."""
        kind = BlocksStored if stored else BlocksRemoved
        last = self._events[-1] if self._events else None
        if isinstance(last, kind) and last.medium == medium:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(kind([block_hash], medium=medium))

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

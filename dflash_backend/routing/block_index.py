"""Which engine holds which KV blocks, as far as the router knows.

A block's hash covers every token before it (`core/block_hashes.py`), so an engine that holds a block and can use it
holds those before it too. An engine frees the last blocks of a text first. The index does the same when it is full,
and so looks at a few of a prompt's hashes only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockIndex:
    """The block hashes of each engine, the longest unused first, and for each hash a bit mask of its engines."""

    def __init__(self, num_engines: int, blocks_per_engine: int) -> None:
        """blocks_per_engine: the most hashes kept of an engine, which is how many blocks its KV cache and
        tiers have."""
        self._capacity = blocks_per_engine
        self._recency: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]
        self._holders: dict[bytes, int] = {}

    def resize(self, blocks_per_engine: int) -> None:
        """Keep as many hashes of each engine from now on; what is more of an engine goes at its next `add`."""
        self._capacity = blocks_per_engine

    def __len__(self) -> int:
        """The number of different hashes."""
        return len(self._holders)

    def num_blocks(self, engine: int) -> int:
        """The number of hashes of one engine."""
        return len(self._recency[engine])

    def holds(self, engine: int, block_hash: bytes) -> bool:
        """Whether the engine has this block."""
        return block_hash in self._recency[engine]

    def add(self, engine: int, hashes: Sequence[bytes]) -> None:
        """The engine has, or will have, these blocks of one text, in order; they count as used now."""
        recency, holders, bit = self._recency[engine], self._holders, 1 << engine
        # From the end: so the last block of a text is the first to be removed.
        for block_hash in reversed(hashes[: self._capacity]):
            if block_hash in recency:
                recency.move_to_end(block_hash)
            else:
                recency[block_hash] = None
                holders[block_hash] = holders.get(block_hash, 0) | bit
        while len(recency) > self._capacity:
            self._remove_holder(recency.popitem(last=False)[0], bit)

    def remove(self, engine: int, hashes: Iterable[bytes]) -> None:
        """The engine no longer has these blocks; unknown ones are ignored."""
        recency, bit = self._recency[engine], 1 << engine
        for block_hash in hashes:
            if block_hash in recency:
                del recency[block_hash]
                self._remove_holder(block_hash, bit)

    def clear(self, engine: int) -> None:
        """The engine has no blocks."""
        bit = 1 << engine
        for block_hash in self._recency[engine]:
            self._remove_holder(block_hash, bit)
        self._recency[engine].clear()

    def cached_prefixes(self, hashes: Sequence[bytes], engines: int) -> list[tuple[int, int]]:
        """The number of blocks of a prompt that engines have from its beginning on, as `(number, engines)`, the longest
        first; engines without its first block are in none.

        hashes: of the prompt's full blocks, in order. engines: a bit mask of those that are asked for. It takes a
        logarithm of the number of blocks for each different number that is found.
        """
        found: list[tuple[int, int]] = []
        holders = self._holders
        start = 0
        while start < len(hashes):
            held = holders.get(hashes[start], 0) & engines
            if not held:
                break
            # The first block from `start` on that not all of `held` have.
            low, high = start + 1, len(hashes)
            while low < high:
                middle = (low + high) // 2
                if holders.get(hashes[middle], 0) & held == held:
                    low = middle + 1
                else:
                    high = middle
            left = holders.get(hashes[low], 0) & held if low < len(hashes) else 0
            found.append((low, held & ~left))
            start, engines = low, left
        found.reverse()
        return found

    def _remove_holder(self, block_hash: bytes, bit: int) -> None:
        left = self._holders[block_hash] & ~bit
        if left:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]

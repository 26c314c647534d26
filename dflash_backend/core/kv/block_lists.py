"""Lists of KV blocks from which any block can be taken out in O(1)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator


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

    def walk(self, number: int) -> Iterator[int]:
        """The blocks of list `number` from first to last."""
        end = self._num_blocks + number
        block_id = self._next[end]
        while block_id != end:
            yield block_id
            block_id = self._next[block_id]

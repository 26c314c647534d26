"""KV blocks of the target's layers with a sliding window, which go back to their pool once no query can see them.

Queries of such layers see the last positions alone, so a long request needs few of their blocks however long it is.
They have a pool and block ids of their own, and a request a second block table, parallel to `Request.block_ids`::

    block_ids          | b0 | b1 | b2 | b3 | b4 | b5 | b6 |    other layers, and the drafter's
    window_block_ids   |  - |  - |  - | w3 | w4 | w5 | w6 |    layers with a window
                        given back      ^ first block that a query at `num_computed` or later sees

A block that was published stays in the prefix cache when it is given back. A hit needs, of these blocks, only those
that the first query behind it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash_backend.core.kv.block_pool import BlockPool
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import WindowGroup


class WindowBlocks:
    """Which blocks of the layers with a window each request holds. OWN, PUBLISH and RETURN hold for them too."""

    def __init__(self, group: WindowGroup) -> None:
        self._group = group
        self.pool = BlockPool(group.num_blocks)
        # Blocks that requests in prefill hold at most until they decode, by id: what admission leaves free for them.
        self._promised: dict[str, tuple[Request, int]] = {}

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks, all cached for the other layers, a request can start behind, so
        that those are cached here which its first query sees."""
        end = num_blocks
        index = end - 1
        while end and index >= self._group.first_visible_behind(end):
            if self.pool.find_chain(hashes[index : index + 1], 1):
                index -= 1
            else:
                end, index = index, index - 1
        return end

    def find_hit(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        """The blocks that the first query behind a hit of `num_blocks` blocks sees, in order; all are cached."""
        first = self._group.first_visible_behind(num_blocks)
        return self.pool.find_chain(hashes[first:num_blocks], num_blocks - first)

    def fits(self, num_blocks: int, num_hit: int, hit: Sequence[int]) -> bool:
        """Whether a request that starts behind `num_hit` blocks, with `hit` here, can come to decode, with `num_blocks`
        blocks in the end, beside those that were promised so much."""
        group = self._group
        first = num_hit - len(hit)
        from_free = sum(1 for block_id in hit if self.pool.ref_count(block_id) == 0)
        promised = sum(max(0, most - self._num_held(each)) for each, most in self._promised.values())
        needed = min(num_blocks - first, group.most_blocks) - len(hit)
        return needed <= self.pool.num_free - from_free - promised

    def start(self, request: Request, num_hit: int, hit: list[int]) -> None:
        """Hold the blocks of a hit of `num_hit` blocks."""
        self.pool.touch(hit, reused=request.num_preemptions == 0)
        request.num_window_freed = num_hit - len(hit)
        request.window_block_ids = [0] * request.num_window_freed + hit
        most = min(request.num_blocks_to_decode - request.num_window_freed, self._group.steady_blocks)
        self._promised[request.request_id] = request, most

    def extend(self, request: Request, count: int) -> None:
        """Take `count` blocks more for the end of the request's table; as many must be free."""
        request.window_block_ids += self.pool.allocate(count)

    def publish(self, request: Request, index: int, block_hash: bytes) -> None:
        """Put the request's block `index`, which is full and final, into the prefix cache; one that was given back is
        there, or is not wanted."""
        if index >= request.num_window_freed:
            before = request.window_block_ids[index - 1] if index > request.num_window_freed else None
            self.pool.publish(request.window_block_ids[index], block_hash, before)

    def give_back(self, request: Request) -> None:
        """Give back the blocks that no query of the request sees any more. A step in flight may still read them: who
        gets them writes behind it."""
        first = self._group.first_visible(request.num_computed)
        if first > request.num_window_freed:
            self.pool.free(request.window_block_ids[request.num_window_freed : first])
            request.num_window_freed = first
        if request.num_tokens - request.num_computed <= 1:
            self._promised.pop(request.request_id, None)

    def release(self, request: Request) -> None:
        """Give back all blocks of the request."""
        self.pool.free(request.window_block_ids[request.num_window_freed :])
        request.window_block_ids = []
        request.num_window_freed = 0
        self._promised.pop(request.request_id, None)

    def writable(self, request: Request) -> frozenset[int]:
        """The blocks that a step may write for the request (invariant OWN)."""
        first = request.num_computed // self._group.block_size
        return frozenset(
            block_id
            for block_id in request.window_block_ids[first:]
            if self.pool.ref_count(block_id) == 1 and not self.pool.is_cached(block_id)
        )

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the pool and these requests, all that hold blocks, agree. For tests."""
        running = list(requests)
        self.pool.check([request.window_block_ids[request.num_window_freed :] for request in running])
        assert self._promised.keys() <= {request.request_id for request in running}, (
            "a promise to a request that is gone"
        )
        for request in running:
            assert len(request.window_block_ids) == len(request.block_ids), "the block tables are not parallel"
            assert request.num_window_freed <= self._group.first_visible(request.num_computed), (
                "a visible block is gone"
            )
            own = set(request.window_block_ids[request.num_computed // self._group.block_size :])
            assert own == self.writable(request), f"OWN: {request.request_id} would write a window block not its own"

    @staticmethod
    def _num_held(request: Request) -> int:
        return len(request.window_block_ids) - request.num_window_freed

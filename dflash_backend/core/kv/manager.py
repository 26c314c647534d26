"""The blocks of a request over its life: found in the prefix cache, reserved, published, released.

A running request's block table, from its first position to its last::

    |<--------------------------- request.block_ids --------------------------->|
    |  cached   |        computed        |   new   |  drafts  |  lookahead  |    |
    |___________|________________________|_________|__________|_____________|____|
    0        prefix hit            num_computed              end      num_positions
    |<-- maybe shared, never written --->|<--- written by this request alone --->|

cached     found at admission; held by reference, other requests may hold it too
computed   target KV and drafter context KV are final; full blocks are published here
new        known tokens that the target runs in this step
drafts     proposed in the step before, verified in this one
lookahead  where the drafter's queries write their KV

RESERVE: blocks cover everything below `num_positions` before the step runs. OWN: a hit is made of full blocks, so the
first position to write starts a block of the request's own, and only blocks below `num_computed` are ever published.

Where the target's layers with a window have blocks of their own, the request has a second table of them, as long
(`window_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dflash_backend.core.kv.block_pool import BlockPool
from dflash_backend.core.kv.events import KVEventLog
from dflash_backend.core.kv.state_snapshots import StateSnapshots
from dflash_backend.core.kv.window_blocks import WindowBlocks
from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig

# A state that covers fewer blocks is not worth a copy: they are soon computed anew.
MIN_SNAPSHOT_BLOCKS = 4


class KVManager:
    """Gives requests their blocks and takes them back."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self.blocks_for = config.cache_group.blocks_for
        self._caching = config.enable_prefix_caching
        self._num_behind = int(config.reads_next_tokens)
        self.events: KVEventLog | None = None
        if config.kv_events != "off":
            self.events = KVEventLog(with_tokens=config.kv_events == "tokens")
        self.pool = BlockPool(config.num_blocks, self.events)
        self.snapshots: StateSnapshots | None = None
        if config.num_state_snapshots is not None and config.enable_prefix_caching:
            self.snapshots = StateSnapshots(config.num_state_snapshots)
        group = config.window_group
        self.windows = None if group is None else WindowBlocks(group)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1: of the pool that has fewer left."""
        return self.pool.usage if self.windows is None else max(self.pool.usage, self.windows.pool.usage)

    def find_hit(self, request: Request) -> list[int]:
        """Cached blocks that the request's prefill can start after. Nothing is held yet. A second lookup costs nothing
        while the cache stays as it is.

        A cached block has the drafter's context KV too (PUBLISH, TOGETHER), so no block of the hit is dropped. At least
        one position is left to compute: a fresh prompt needs the logits of its last token, and a resumed request a row
        after which the drafter runs. So there is a token behind the last block, as the hashes need with a drafter that
        reads it. A request that wants log-probabilities of its prompt computes all of it. With recurrent layers a hit
        ends where there is a copy of the state; where layers with a window have blocks of their own, it ends where
        those that its first query sees are cached.
        """
        if not self._caching or request.wants_prompt_logprobs:
            return []
        version = self.pool.cache_version + (self.snapshots.version if self.snapshots is not None else 0)
        version += self.windows.pool.cache_version if self.windows is not None else 0
        if request.hit is None or request.hit[0] != version:
            num_blocks = (request.prefill_end - 1) // self._block_size
            hashes = request.block_hashes.first(num_blocks, request.token_ids)
            chain = self.pool.find_chain(hashes, num_blocks)
            request.num_cached_blocks = len(chain)
            if self.snapshots is not None or self.windows is not None:
                chain = chain[: self._longest(hashes, len(chain))]
            request.hit = version, chain
        return request.hit[1]

    def _longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of `num_blocks` cached blocks a request can start behind, as the other kinds of layers allow."""
        while True:
            least = num_blocks if self.snapshots is None else self.snapshots.longest(hashes, num_blocks)
            least = least if self.windows is None else self.windows.longest(hashes, least)
            if least == num_blocks:
                return least
            num_blocks = least

    def fits(self, request: Request, num_positions: int, hit: list[int], num_promised: int = 0) -> bool:
        """Whether the pools can cover `num_positions` now, for a request that starts with `hit`. `num_promised` free
        blocks are for others."""
        hit_from_free = sum(1 for block_id in hit if self.pool.ref_count(block_id) == 0)
        num_blocks = self.blocks_for(num_positions)
        if num_blocks - len(hit) > self.pool.num_free - hit_from_free - num_promised:
            return False
        return self.windows is None or self.windows.fits(num_blocks, len(hit), self._window_hit(request, len(hit)))

    def _window_hit(self, request: Request, num_blocks: int) -> list[int]:
        """The blocks of layers with a window that go with a hit of `num_blocks` blocks."""
        assert self.windows is not None
        hashes = request.block_hashes.first(num_blocks, request.token_ids) if num_blocks else ()
        return self.windows.find_hit(hashes, num_blocks)

    def start(self, request: Request, hit: list[int]) -> None:
        """Hold the hit; the request counts as computed up to its end.

        A preempted request that finds its own blocks does not make them protected.
        """
        if self.windows is not None:
            self.windows.start(request, len(hit), self._window_hit(request, len(hit)))
        self.pool.touch(hit, reused=request.num_preemptions == 0)
        request.hit = None
        request.block_ids = list(hit)
        request.num_published_blocks = len(hit)
        request.num_computed = len(hit) * self._block_size
        if self.snapshots is not None:
            self._start_state(request, len(hit))

    def _start_state(self, request: Request, num_blocks: int) -> None:
        """Choose where the request's recurrent state comes from, and where it is copied: behind the last block before
        the end of its prompt, where the next turn of a conversation goes on, and where it leaves the text of earlier
        prompts, of which others will share the beginning too. A resumed request has had its copies."""
        assert self.snapshots is not None
        size = self._block_size
        request.snapshot_slot = None
        if num_blocks:
            last = request.block_hashes.first(num_blocks, request.token_ids)[num_blocks - 1]
            request.snapshot_slot = self.snapshots.use(last)
        request.snapshot_borders = ()
        if request.num_preemptions == 0 and self.snapshots.num_slots:
            ends = {request.num_cached_blocks * size, (request.prefill_end - 1) // size * size}
            least = max(request.num_computed + 1, MIN_SNAPSHOT_BLOCKS * size)
            request.snapshot_borders = tuple(sorted(end for end in ends if end >= least))

    def with_snapshot(self, request: Request, row: ScheduledRequest) -> ScheduledRequest:
        """The row with a slot for its recurrent state if it ends where that is to be copied, and a slot is there."""
        end = row.num_computed + row.num_new
        if self.snapshots is None or row.num_draft or end not in request.snapshot_borders:
            return row
        block_hash = request.block_hashes.first(end // self._block_size, request.token_ids)[end // self._block_size - 1]
        if (end, block_hash) in request.pending_snapshots:  # the step that was to write it did not run
            return msgspec.structs.replace(row, snapshot_slot=self.snapshots.slot_of_pending(block_hash))
        slot = self.snapshots.reserve(block_hash)
        if slot is None:
            return row
        request.pending_snapshots.append((end, block_hash))
        return msgspec.structs.replace(row, snapshot_slot=slot)

    def reserve(self, request: Request, num_positions: int) -> list[int] | None:
        """Extend the block table to cover `num_positions`; the blocks added, or None when a pool has too few."""
        missing = -(-num_positions // self._block_size) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free or (self.windows is not None and missing > self.windows.pool.num_free):
            return None
        if self.windows is not None:
            self.windows.extend(request, missing)
        new_block_ids = self.pool.allocate(missing)
        request.block_ids += new_block_ids
        return new_block_ids

    def with_window_blocks(self, request: Request, row: ScheduledRequest) -> ScheduledRequest:
        """The row with the blocks that its table for layers with a window gained beside its `new_block_ids`."""
        if self.windows is None or not row.new_block_ids:
            return row
        new = request.window_block_ids[-len(row.new_block_ids) :]
        return msgspec.structs.replace(row, new_window_block_ids=new)

    def advance(self, request: Request) -> None:
        """Publish what a result made final; then give back the blocks that no query of the request sees any more."""
        self.publish(request)
        if self.windows is not None:
            self.windows.give_back(request)

    def publish(self, request: Request) -> None:
        """Put the request's blocks that are full and final into the prefix cache (invariant PUBLISH).

        Final are positions below `num_computed` whose token was kept: a stop may have dropped accepted ones. With a
        drafter that reads the token behind a position, that one must have been kept too.
        """
        if not self._caching:
            return
        if request.pending_snapshots:
            self._publish_snapshots(request)
        num_full = min(request.num_computed, request.num_tokens - self._num_behind) // self._block_size
        if num_full > request.num_published_blocks:
            hashes = request.block_hashes.first(num_full, request.token_ids)
            for index in range(request.num_published_blocks, num_full):
                before = request.block_ids[index - 1] if index else None
                is_new = self.pool.publish(request.block_ids[index], hashes[index], before)
                if is_new and self.events is not None:
                    tokens = request.token_ids[index * self._block_size : (index + 1) * self._block_size]
                    self.events.stored(hashes[index], hashes[index - 1] if index else None, tokens)
                if self.windows is not None:
                    self.windows.publish(request, index, hashes[index])
            request.num_published_blocks = num_full

    def _publish_snapshots(self, request: Request) -> None:
        """Let the copies be found that the steps so far have written."""
        assert self.snapshots is not None
        while request.pending_snapshots and request.pending_snapshots[0][0] <= request.num_computed:
            self.snapshots.publish(request.pending_snapshots.pop(0)[1])

    def release(self, request: Request) -> None:
        """Give up all blocks of the request; what it published can still be found."""
        if self.snapshots is not None:
            for _, block_hash in request.pending_snapshots:
                self.snapshots.drop(block_hash)
            request.pending_snapshots.clear()
            request.snapshot_borders = ()
        if self.windows is not None:
            self.windows.release(request)
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_published_blocks = 0
        request.num_computed = 0

    def writable_blocks(self, request: Request) -> frozenset[int]:
        """The blocks that a step may write for the request (invariant OWN): those from its first uncomputed position
        on, as far as no other request holds them or can find them."""
        first = request.num_computed // self._block_size
        return frozenset(
            block_id
            for block_id in request.block_ids[first:]
            if self.pool.ref_count(block_id) == 1 and not self.pool.is_cached(block_id)
        )

    def check(self, running: Iterable[Request]) -> None:
        """Raise AssertionError unless the pool and these requests, all that hold blocks, agree. For tests."""
        requests = list(running)
        if self.snapshots is not None:
            self.snapshots.check([each for request in requests for _, each in request.pending_snapshots])
        if self.windows is not None:
            self.windows.check(requests)
        self.pool.check([request.block_ids for request in requests])
        for request in requests:
            own = set(request.block_ids[request.num_computed // self._block_size :])
            assert own == self.writable_blocks(request), f"OWN: {request.request_id} would write a block not its own"

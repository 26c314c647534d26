"""What each group of layers keeps of a request: KV of all positions, KV of a window, or a recurrent state.

`KVManager` asks all groups alike, as vLLM's does its managers of a single type. A hit ends where every group lets it,
and block tables grow where every group has blocks. Every model has `FullBlocks`; it has `WindowBlocks` and
`RecurrentStates` where its target has such layers.

Layers with a window see the last positions alone, so a long request needs few of their blocks however long it is. They
have a pool and block ids of their own, and a request a second block table, parallel to `Request.block_ids`::

    block_ids          | b0 | b1 | b2 | b3 | b4 | b5 | b6 |    other layers, and the drafter's
    window_block_ids   |  - |  - |  - | w3 | w4 | w5 | w6 |    layers with a window
                        given back      ^ first block that a query at `num_computed` or later sees

A block that was published stays in the prefix cache when it is given back. A hit needs, of these blocks, only those
that the first query after it sees.

A target with recurrent layers keeps one state of a request for all positions, so cached K and V are of no use without
the state after them: a hit needs a copy of it at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dflash_backend.core.kv.block_pool import BlockPool, KVEventLog
from dflash_backend.core.kv.record_slots import RecordSlots
from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import WindowGroup

# A state that covers fewer blocks is not worth a copy: they are soon computed again.
MIN_SNAPSHOT_BLOCKS = 4


class KVGroup:
    """One group of layers. By default it has no blocks, and no part in what is asked."""

    @property
    def version(self) -> int:
        """Grows whenever something can be found that could not be before, or no longer."""
        return 0

    @property
    def usage(self) -> float:
        """Share of its blocks that requests hold, 0 to 1."""
        return 0.0

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks, all cached in the other groups, a request can start after."""
        return num_blocks

    def fits(self, request: Request, num_blocks: int, hit: Sequence[int], num_promised: int) -> bool:
        """Whether a request that starts with `hit`, blocks of `FullBlocks`, can come to decode, with `num_blocks`
        blocks in the end, beside what was promised to others: `num_promised` blocks of `FullBlocks`."""
        return True

    def start(self, request: Request, hit: Sequence[int]) -> None:
        """Hold what goes with a hit."""

    def has_free(self, num_blocks: int) -> bool:
        """Whether a block table can grow by as many blocks."""
        return True

    def extend(self, request: Request, row: ScheduledRequest, num_blocks: int) -> None:
        """Let the request's block table grow at its end, and note the new blocks in its row."""

    def publish(self, request: Request, index: int, block_hash: bytes) -> None:
        """Put block `index` of the request, which is full and final, into the prefix cache."""

    def advance(self, request: Request) -> None:
        """Take in that a result moved `num_computed` on."""

    def snapshot_slot(self, request: Request, end: int) -> int | None:
        """The slot for a copy of the state at position `end`, where a row ends; None: none is made."""
        return None

    def writable(self, request: Request) -> frozenset[int] | None:
        """The blocks that a step may write for the request (invariant OWN): those from its first uncomputed position
        on, as far as no other request holds them or can find them. None: the group has no blocks."""
        return None

    def release(self, request: Request) -> None:
        """Give up all that the request holds; what it published can still be found."""

    def reset_prefix_cache(self) -> None:
        """Let nothing be found any more that was published."""

    def begin_plan(self) -> None:
        """With tiers: the worker has been given every step that was planned, and another one is planned now."""

    def needed(self, num_blocks: int) -> range:
        """Which of the first `num_blocks` blocks a hit that ends after them needs in this group."""
        return range(0)

    def slot(self, block_hash: bytes) -> int | None:
        """Where on the device the record with this hash can be found (`core/moves.py`)."""
        return None

    def hold(self, load_id: int, hashes: Sequence[bytes], num_more: int) -> list[tuple[int, bool]] | None:
        """Hold the records with these hashes for a load: each one's slot, and whether it is new and yet to be loaded,
        in order; and `num_more` blocks more, for positions after the last one. None where there are too few slots;
        nothing is held then."""
        return []

    def loaded(self, load_id: int, request: Request, index: int, block_hash: bytes, slot: int) -> None:
        """What a load holds at `slot` was loaded: block `index` of the request can be found."""

    def let_go(self, load_id: int) -> None:
        """Give up what a load holds; what was loaded can still be found."""


@dataclass(frozen=True)
class Outlet:
    """Who takes what leaves the device's cache, of one group (`tiers.py`).

    released: a record that can be found is not held by a request that held it; it may leave soon; and whether another
    request has found it. removed: a record can no longer be found.
    """

    released: Callable[[bytes, bool], None]
    removed: Callable[[bytes], None]


class BlockGroup(KVGroup):
    """A group with a pool of blocks, and with a block table for each request."""

    def __init__(self, pool: BlockPool, block_size: int, outlet: Outlet | None) -> None:
        """outlet: None without tiers."""
        self.pool = pool
        self._block_size = block_size
        self._outlet = outlet
        # What loads hold, by their numbers, from the first position to the last.
        self.held: dict[int, list[int]] = {}

    @property
    def version(self) -> int:
        return self.pool.cache_version

    @property
    def usage(self) -> float:
        return self.pool.usage

    def has_free(self, num_blocks: int) -> bool:
        return num_blocks <= self.pool.num_free

    def reset_prefix_cache(self) -> None:
        self.pool.reset_prefix_cache()

    def slot(self, block_hash: bytes) -> int | None:
        found = self.pool.find_chain((block_hash,), 1)
        return found[0] if found else None

    def hold(self, load_id: int, hashes: Sequence[bytes], num_more: int) -> list[tuple[int, bool]] | None:
        cached = [self.slot(block_hash) for block_hash in hashes]
        there = [block_id for block_id in cached if block_id is not None]
        num_new = len(cached) - len(there) + num_more
        if num_new > self.pool.num_free - sum(1 for block_id in there if self.pool.ref_count(block_id) == 0):
            return None
        # Before others are given out, which may be these.
        self.pool.touch(there, reused=False)
        new = iter(self.pool.allocate(num_new))
        slots = [(next(new), True) if block_id is None else (block_id, False) for block_id in cached]
        self.held[load_id] = [slot for slot, _ in slots] + list(new)
        return slots

    def let_go(self, load_id: int) -> None:
        self.pool.free(self.held.pop(load_id, ()))

    def _give_back(self, block_ids: Sequence[int]) -> None:
        """Free blocks of a request, from its first to its last position."""
        if self._outlet is not None:
            for block_id in reversed(block_ids):
                if (block_hash := self.pool.hash_of(block_id)) is not None:
                    self._outlet.released(block_hash, self.pool.is_reused(block_id))
        self.pool.free(block_ids)

    def _table(self, request: Request) -> list[int]:
        raise NotImplementedError

    def _uncomputed(self, request: Request) -> list[int]:
        return self._table(request)[request.num_computed // self._block_size :]

    def writable(self, request: Request) -> frozenset[int]:
        pool, block_ids = self.pool, self._uncomputed(request)
        return frozenset(each for each in block_ids if pool.ref_count(each) == 1 and not pool.is_cached(each))


class FullBlocks(BlockGroup):
    """Blocks of all positions: those of the target's other layers and of the drafter's (TOGETHER). K and V of a
    rejected draft lie past `num_computed`, where the next step overwrites them."""

    def __init__(
        self, num_blocks: int, block_size: int, events: KVEventLog | None, outlet: Outlet | None = None
    ) -> None:
        """events: is told of blocks that enter and leave the prefix cache; of those that leave by `outlet`, where there
        is one."""
        told = outlet or events
        super().__init__(BlockPool(num_blocks, None if told is None else told.removed), block_size, outlet)
        self._events = events

    def _table(self, request: Request) -> list[int]:
        return request.block_ids

    def fits(self, request: Request, num_blocks: int, hit: Sequence[int], num_promised: int) -> bool:
        hit_from_free = sum(1 for block_id in hit if self.pool.ref_count(block_id) == 0)
        return num_blocks - len(hit) <= self.pool.num_free - hit_from_free - num_promised

    def start(self, request: Request, hit: Sequence[int]) -> None:
        # A preempted request that finds its own blocks does not make them protected.
        self.pool.touch(hit, reused=not request.is_resumed)
        request.block_ids = list(hit)

    def extend(self, request: Request, row: ScheduledRequest, num_blocks: int) -> None:
        new = self.pool.allocate(num_blocks)
        request.block_ids += new
        row.new_block_ids.extend(new)

    def publish(self, request: Request, index: int, block_hash: bytes) -> None:
        self._publish(request, request.block_ids, index, block_hash)

    def needed(self, num_blocks: int) -> range:
        return range(num_blocks)

    def loaded(self, load_id: int, request: Request, index: int, block_hash: bytes, slot: int) -> None:
        self._publish(request, self.held[load_id], index, block_hash)

    def _publish(self, request: Request, block_ids: Sequence[int], index: int, block_hash: bytes) -> None:
        """Put block `index` of a request, which lies at `block_ids[index]`, into the prefix cache."""
        before = block_ids[index - 1] if index else None
        is_new = self.pool.publish(block_ids[index], block_hash, before)
        if is_new and self._events is not None:
            parent = request.block_hashes.first(index, request.token_ids)[index - 1] if index else None
            tokens = request.token_ids[index * self._block_size : (index + 1) * self._block_size]
            self._events.stored(block_hash, parent, tokens)

    def release(self, request: Request) -> None:
        self._give_back(request.block_ids)
        request.block_ids = []


class WindowBlocks(BlockGroup):
    """Blocks of the target's layers with a window. OWN, PUBLISH and RETURN hold for them too."""

    def __init__(self, group: WindowGroup, outlet: Outlet | None = None) -> None:
        removed = None if outlet is None else outlet.removed
        super().__init__(BlockPool(group.num_blocks, removed), group.block_size, outlet)
        self._group = group
        # Blocks that requests in prefill hold at most until they decode, by id: what admission leaves free for them.
        self._promised: dict[str, tuple[Request, int]] = {}

    def _table(self, request: Request) -> list[int]:
        return request.window_block_ids

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        # Those must be cached here that the first query after the hit sees.
        end = num_blocks
        index = end - 1
        while end and index >= self._group.first_visible_after(end):
            if self.pool.find_chain(hashes[index : index + 1], 1):
                index -= 1
            else:
                end, index = index, index - 1
        return end

    def own_hit(self, request: Request, num_blocks: int) -> list[int]:
        """The blocks that the first query after a hit of `num_blocks` blocks sees, in order; all are cached."""
        first = self._group.first_visible_after(num_blocks)
        hashes = request.block_hashes.first(num_blocks, request.token_ids)
        return self.pool.find_chain(hashes[first:num_blocks], num_blocks - first)

    def fits(self, request: Request, num_blocks: int, hit: Sequence[int], num_promised: int) -> bool:
        # Others were promised blocks here as well, each as many as it can hold at a time.
        own = self.own_hit(request, len(hit))
        from_free = sum(1 for block_id in own if self.pool.ref_count(block_id) == 0)
        others = self._promised.values()
        promised = sum(max(0, most + each.num_window_freed - len(each.window_block_ids)) for each, most in others)
        needed = min(num_blocks - (len(hit) - len(own)), self._group.most_blocks) - len(own)
        return needed <= self.pool.num_free - from_free - promised

    def start(self, request: Request, hit: Sequence[int]) -> None:
        own = self.own_hit(request, len(hit))
        self.pool.touch(own, reused=not request.is_resumed)
        request.num_window_freed = len(hit) - len(own)
        request.window_block_ids = [0] * request.num_window_freed + own
        most = min(request.num_blocks_to_decode - request.num_window_freed, self._group.steady_blocks)
        self._promised[request.request_id] = request, most

    def extend(self, request: Request, row: ScheduledRequest, num_blocks: int) -> None:
        new = self.pool.allocate(num_blocks)
        request.window_block_ids += new
        row.new_window_block_ids.extend(new)

    def publish(self, request: Request, index: int, block_hash: bytes) -> None:
        # One that was given back is there, or is not wanted.
        if index >= request.num_window_freed:
            before = request.window_block_ids[index - 1] if index > request.num_window_freed else None
            self.pool.publish(request.window_block_ids[index], block_hash, before)

    def needed(self, num_blocks: int) -> range:
        return range(self._group.first_visible_after(num_blocks), num_blocks)

    def loaded(self, load_id: int, request: Request, index: int, block_hash: bytes, slot: int) -> None:
        self.pool.publish(slot, block_hash)

    def advance(self, request: Request) -> None:
        """Give back the blocks that no query of the request sees any more. A step in flight may still read them: who
        gets them writes after it."""
        first = self._group.first_visible(request.num_computed)
        if first > request.num_window_freed:
            self._give_back(request.window_block_ids[request.num_window_freed : first])
            request.num_window_freed = first
        if request.num_tokens - request.num_computed <= 1:
            self._promised.pop(request.request_id, None)

    def release(self, request: Request) -> None:
        self._give_back(request.window_block_ids[request.num_window_freed :])
        request.window_block_ids = []
        request.num_window_freed = 0
        self._promised.pop(request.request_id, None)


class RecurrentStates(KVGroup):
    """Copies of recurrent states at block borders of prompts, from which hits start.

    The worker has `num_slots` slots for them beside those of requests. Nothing is held: who starts with a copy has it
    copied before the step's rows run, and a slot that is given away is written after that. A load from a tier does not
    wait for that step, and gets none that it reads.
    """

    def __init__(self, num_slots: int, block_size: int, outlet: Outlet | None = None) -> None:
        """outlet: None without tiers."""
        self._block_size = block_size
        self._outlet = outlet
        self.snapshots = RecordSlots(num_slots)
        # What loads have reserved, by their numbers.
        self.held: dict[int, list[bytes]] = {}
        # With tiers, the copies that requests of the step that is planned start from.
        self._starting: set[bytes] = set()

    @property
    def version(self) -> int:
        return self.snapshots.version

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        copies = (count for count in range(num_blocks, 0, -1) if self.snapshots.slot(hashes[count - 1]) is not None)
        return next(copies, 0)

    def start(self, request: Request, hit: Sequence[int]) -> None:
        """Choose where the request's recurrent state comes from, and where it is copied: after the last block before
        the end of its prompt, where the next turn of a conversation goes on, and where it leaves the text of earlier
        prompts, of which others will share the beginning too. A resumed request has had its copies."""
        size = self._block_size
        request.snapshot_slot = None
        if hit:
            block_hash = self._hash(request, len(hit))
            self.snapshots.touch(block_hash, reused=True)
            request.snapshot_slot = self.snapshots.slot(block_hash)
            if self._outlet is not None:
                self._starting.add(block_hash)
        request.snapshot_borders = ()
        if not request.is_resumed and self.snapshots.num_slots:
            ends = {request.num_cached_blocks * size, (request.prefill_end - 1) // size * size}
            least = max(len(hit) * size + 1, MIN_SNAPSHOT_BLOCKS * size)
            request.snapshot_borders = tuple(sorted(end for end in ends if end >= least))

    def snapshot_slot(self, request: Request, end: int) -> int | None:
        if end not in request.snapshot_borders:
            return None
        block_hash = self._hash(request, end // self._block_size)
        if (end, block_hash) in request.pending_snapshots:  # the step that was to write it did not run
            return self.snapshots.reserved(block_hash)
        slot = self._reserve(block_hash)
        if slot is not None:
            request.pending_snapshots.append((end, block_hash))
        return slot

    def advance(self, request: Request) -> None:
        """Let the copies be found that the steps so far have written."""
        while request.pending_snapshots and request.pending_snapshots[0][0] <= request.num_computed:
            block_hash = request.pending_snapshots.pop(0)[1]
            self.snapshots.settle(block_hash, is_there=True)
            if self._outlet is not None:
                self._outlet.released(block_hash, False)

    def needed(self, num_blocks: int) -> range:
        return range(max(0, num_blocks - 1), num_blocks)

    def slot(self, block_hash: bytes) -> int | None:
        return self.snapshots.slot(block_hash)

    def hold(self, load_id: int, hashes: Sequence[bytes], num_more: int) -> list[tuple[int, bool]] | None:
        """A copy that is there is not held: where it is given away meanwhile, the hit ends before it. A load may write
        at once, before the step that is planned: so it gets no slot that a request of that step starts from."""
        slots: list[tuple[int, bool]] = []
        reserved = self.held[load_id] = []
        for block_hash in hashes:
            if (slot := self.snapshots.slot(block_hash)) is not None:
                slots.append((slot, False))
            elif (slot := self._reserve(block_hash, self._starting)) is not None:
                reserved.append(block_hash)
                slots.append((slot, True))
            else:
                self.let_go(load_id)
                return None
        return slots

    def begin_plan(self) -> None:
        self._starting.clear()

    def loaded(self, load_id: int, request: Request, index: int, block_hash: bytes, slot: int) -> None:
        self.held[load_id].remove(block_hash)
        self.snapshots.settle(block_hash, is_there=True)

    def let_go(self, load_id: int) -> None:
        for block_hash in self.held.pop(load_id, ()):
            self.snapshots.settle(block_hash, is_there=False)

    def release(self, request: Request) -> None:
        # A step in flight may still write them, before any other's.
        for _, block_hash in request.pending_snapshots:
            self.snapshots.settle(block_hash, is_there=False)
        request.pending_snapshots.clear()

    def reset_prefix_cache(self) -> None:
        self._tell_removed(self.snapshots.clear())

    def _reserve(self, block_hash: bytes, but: Collection[bytes] = ()) -> int | None:
        """A slot for a copy, as of `RecordSlots.reserve`."""
        if (found := self.snapshots.reserve(block_hash, but)) is None:
            return None
        slot, given_away = found
        self._tell_removed([] if given_away is None else [given_away])
        return slot

    def _tell_removed(self, hashes: Sequence[bytes]) -> None:
        if self._outlet is not None:
            for block_hash in hashes:
                self._outlet.removed(block_hash)

    def _hash(self, request: Request, num_blocks: int) -> bytes:
        """The hash of the last of the request's first blocks."""
        return request.block_hashes.first(num_blocks, request.token_ids)[num_blocks - 1]

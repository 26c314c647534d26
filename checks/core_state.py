"""Whether what an engine core keeps agrees: each request is in one queue, and each KV block is held as often as block
tables name it (OWN, RETURN).

`check_core(llm.engine.core)` between two steps raises AssertionError where it does not. It looks at every block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from dflash_backend.core.engine import EngineCore
from dflash_backend.core.kv import KVManager, KVTiers
from dflash_backend.core.kv.block_pool import PROBATIONARY, PROTECTED, BlockPool
from dflash_backend.core.kv.groups import BlockGroup, KVGroup, RecurrentStates, WindowBlocks
from dflash_backend.core.kv.record_slots import MAX_USED_SHARE, RecordSlots
from dflash_backend.core.moves import DEVICE, REMOTE
from dflash_backend.core.request import Request
from dflash_backend.core.tenants import FairQueue


def check_core(core: EngineCore) -> None:
    """A request is in no queue or in two, or OWN or RETURN is broken."""
    scheduler = core.scheduler
    compiling = {request_id: entry[0] for request_id, entry in core._grammars.waiting.items()}
    queues = (scheduler.running, scheduler.waiting, scheduler.loading, compiling)
    together = scheduler.running | scheduler.waiting | scheduler.loading | compiling
    assert together == core._requests, "a request is in no queue"
    assert sum(map(len, queues)) == len(core._requests), "a request is in two queues"
    check_queue(scheduler.queue)
    outside = [*compiling.values(), *scheduler.loading.values()]
    assert scheduler.queue.num_aside == len(outside), "requests that wait outside the queue are miscounted"
    assert scheduler.queue.num_aside_tokens == sum(request.num_tokens for request in outside)
    for name, aside in scheduler.queue._aside.items():
        assert aside.num_requests == sum(request.sampling.tenant == name for request in outside)
    assert len(scheduler.running) <= core.config.max_num_seqs, "more requests run than max_num_seqs"
    for request in (*scheduler.waiting.values(), *scheduler.loading.values()):
        assert not request.block_ids, f"{request.request_id} waits and holds blocks"
        assert request.num_computed == 0, f"{request.request_id} waits and has computed positions"
    for request in scheduler.running.values():
        assert request.num_computed < request.num_tokens, f"{request.request_id} has computed its last token"
    check_kv(scheduler.kv, list(scheduler.running.values()))


def check_queue(queue: FairQueue) -> None:
    """Counts or orders are broken."""
    for tenant in queue.tenants.values():
        waiting = [request for request in queue.waiting.values() if request.sampling.tenant == tenant.name]
        assert len(waiting) == tenant.num_waiting, f"tenant '{tenant.name}' miscounts who waits"
        assert sum(request.num_tokens for request in waiting) == tenant.num_waiting_tokens
        assert waiting or tenant.running, f"tenant '{tenant.name}' has no request"
        assert tenant.has_turn or not waiting, f"tenant '{tenant.name}' waits and never has its turn"
        queued = {id(request) for _, request in tenant.queue}
        for request in waiting:
            assert id(request) in queued, f"{request.request_id} waits and is in no queue"
            for other in tenant.running.values():
                overtaken = request.rank < other.rank and request.arrival < other.arrival
                # One with a grammar comes into the queue when that is compiled, and others may run by then; so does
                # one whose KV was loaded.
                overtaken = overtaken and request.grammar is None and not request.was_loading
                assert not overtaken, f"{other.request_id} overtook {request.request_id}"
    counts = {name: tenant.num_waiting for name, tenant in queue.tenants.items() if tenant.num_waiting}
    crowds = {name: queue.num_waiting_of(name)[0] for name in (*counts, *queue._aside)}
    assert {name: count for name, count in crowds.items() if count >= queue._crowd} == queue.crowded
    assert sum(counts.values()) == len(queue.waiting)
    assert sum(tenant.num_waiting_tokens for tenant in queue.tenants.values()) == queue.num_waiting_tokens


def check_kv(kv: KVManager, running: Sequence[Request]) -> None:
    """The pools and these requests, all that hold blocks, do not agree."""
    for group in kv.groups:
        check_group(group, running)
    if kv.tiers is not None:
        check_tiers(kv.tiers)


def check_group(group: KVGroup, requests: Sequence[Request]) -> None:
    """A group of layers and these requests, all that hold blocks, do not agree."""
    if isinstance(group, RecurrentStates):
        pending = [each for request in requests for _, each in request.pending_snapshots]
        check_slots(group.snapshots, [*pending, *(each for held in group.held.values() for each in held)])
    if not isinstance(group, BlockGroup):
        return
    if isinstance(group, WindowBlocks):
        tables = [request.window_block_ids[request.num_window_freed :] for request in requests]
        ids = {request.request_id for request in requests}
        assert group._promised.keys() <= ids, "a promise to a request that is gone"
        for request in requests:
            assert len(request.window_block_ids) == len(request.block_ids), "the block tables are not parallel"
            first = group._group.first_visible(request.num_computed)
            assert request.num_window_freed <= first, "a visible block is gone"
    else:
        tables = [request.block_ids for request in requests]
    check_pool(group.pool, [*tables, *group.held.values()])
    for request in requests:
        own = set(group._uncomputed(request))
        assert own == group.writable(request), f"OWN: {request.request_id} would write a block not its own"


def check_pool(pool: BlockPool, block_tables: Iterable[Sequence[int]]) -> None:
    """Counts and lists do not agree with the block tables of all live requests. With no tables this is invariant
    RETURN: every block free, every reference count zero."""
    held = [0] * pool.num_blocks
    for table in block_tables:
        assert len(set(table)) == len(table), f"a block table names a block twice: {table}"
        for block_id in table:
            held[block_id] += 1
    assert held == pool._ref_counts.tolist(), "reference counts differ from the block tables"
    probationary, protected = (list(evictable_blocks(pool, number)) for number in (PROBATIONARY, PROTECTED))
    assert [len(probationary), len(protected)] == pool._num_evictable, "an eviction list and its count differ"
    assert len(protected) <= pool._max_protected, "too many free blocks are protected"
    free = {*pool._unused, *probationary, *protected}
    assert len(free) == pool.num_free, "a block is in the free lists twice"
    assert free == {block_id for block_id, count in enumerate(held) if count == 0}, "free lists and counts differ"
    cached = {block_id: block_hash for block_id, block_hash in enumerate(pool._hashes) if block_hash is not None}
    found = {block_id: block_hash for block_hash, block_id in pool._cached.items()}
    assert found == cached, "the cache map is torn"
    assert cached.keys() >= {*probationary, *protected}, "an evictable block is not cached"
    assert cached.keys().isdisjoint(pool._unused), "an unused block is cached"
    assert all(pool.is_reused(block_id) for block_id in protected), "a block is protected that no request reused"
    reused = any(pool.is_reused(block_id) for block_id in probationary)
    assert not reused, "a block is probationary that a request reused"


def evictable_blocks(pool: BlockPool, number: int) -> Iterator[int]:
    """The blocks of one of the two lists, from first to last."""
    end = pool.num_blocks + number
    block_id = pool._evictable._next[end]
    while block_id != end:
        yield block_id
        block_id = pool._evictable._next[block_id]


def check_slots(slots: RecordSlots, reserved: Sequence[bytes] | None = None) -> int:
    """A slot is in no place or in two, or not `reserved` are reserved, where that is given. Returns how many reads are
    under way."""
    pinned = [slot for slot, _ in slots._pinned.values()]
    lying = [*slots._free, *slots._reserved.values(), *slots._unused.values(), *slots._used.values(), *pinned]
    assert sorted(lying) == list(range(slots._num_given)), "a slot is lost, or is in two places"
    hashes = [*slots._reserved, *slots._unused, *slots._used, *slots._pinned]
    assert slots._pinned.keys() == {each for each in slots._readers if slots.slot(each) is not None}
    assert len(set(hashes)) == len(hashes), "a record has two slots"
    assert slots._num_given <= slots.num_slots, "a slot too many"
    assert len(slots._used) <= max(1, MAX_USED_SHARE * slots.num_slots), "too many records count as used"
    assert reserved is None or sorted(slots._reserved) == sorted(reserved), "reserved slots and requests differ"
    return sum(slots._readers.values())


def check_tiers(tiers: KVTiers) -> None:
    """Slots or pins are lost."""
    moves = list(tiers._moves.values())
    pins = sum(check_slots(slots) for tier in tiers.tiers for slots in tier.groups)
    reading = sum(len(move.records) for move in moves if move.source not in (DEVICE, REMOTE))
    assert pins == reading + sum(map(len, tiers._outbox[1:])), "a record is pinned that nothing reads"
    for outbox, counted in zip(tiers._outbox, tiers._num_waiting, strict=True):
        assert Counter(group for group, _ in outbox) == +counted, "what waits for a tier is miscounted"
    from_device = [move for move in moves if move.source == DEVICE]
    leaving = [(record.group, record.block_hash) for move in from_device for record in move.records]
    assert sorted(leaving) == sorted(tiers._leaving), "copies from the device are miscounted"
    assert tiers._void <= tiers._leaving
    loads = {load.load_id for load in (*tiers._loads.values(), *tiers._load_of.values())}
    if tiers.kept is not None:
        loads |= {-number for number in tiers.kept._keeping}
    held = {load_id for group in tiers.groups for load_id in getattr(group, "held", {})}
    assert loads == held, "blocks are held for no load"

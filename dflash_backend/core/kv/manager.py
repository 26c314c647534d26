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

What layers with a window and recurrent layers keep of a request beside these blocks is in `groups.py`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from dflash_backend.core.kv.block_pool import KVEventLog
from dflash_backend.core.kv.groups import FullBlocks, KVGroup, Outlet, RecurrentStates, WindowBlocks
from dflash_backend.core.kv.tiers import KVTiers
from dflash_backend.core.moves import KVMover
from dflash_backend.core.plan import MAX_SHARED_PREFIXES, MIN_SHARING_ROWS, ScheduledRequest, SharedPrefix
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig, blocks_for

# A decode server that lives fetches a prompt within as many seconds of its end.
FETCH_S = 2.0


class KVManager:
    """Gives requests their blocks and takes them back, in all groups of layers."""

    def __init__(self, config: SchedulerConfig, mover: KVMover | None = None) -> None:
        """mover: of the tiers that `config` names."""
        self._block_size = config.block_size
        self._caching = config.enable_prefix_caching
        self._num_next = int(config.reads_next_tokens)
        self.drafter_epoch = 0
        """Drafters that were swapped so far. Blocks of a request that began with another one are not published."""
        self.events: KVEventLog | None = None
        if config.kv_events != "off":
            self.events = KVEventLog(with_tokens=config.kv_events == "tokens")
        self.tiers: KVTiers | None = None
        if (config.tiers or config.transfer is not None) and config.enable_prefix_caching:
            assert mover is not None, "tiers without a mover"
            self.tiers = KVTiers(config, mover, self.events)
        full = FullBlocks(config.num_blocks, config.block_size, self.events, self._outlet())
        self.pool = full.pool
        # Those besides the blocks of all positions.
        self._others: list[KVGroup] = []
        if (group := config.window_group) is not None:
            self._others.append(WindowBlocks(group, self._outlet()))
        if config.num_state_snapshots is not None and config.enable_prefix_caching:
            self._others.append(RecurrentStates(config.num_state_snapshots, config.block_size, self._outlet()))
        self.groups: list[KVGroup] = [full, *self._others]
        if self.tiers is not None:
            self.tiers.groups.extend(self.groups)

    def _outlet(self) -> Outlet | None:
        """Of the next group."""
        return None if self.tiers is None else self.tiers.outlet()

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1: of the pool that has fewer left."""
        return max(group.usage for group in self.groups)

    def find_hit(self, request: Request) -> list[int]:
        """Cached blocks that the request's prefill can start after. Nothing is held yet. A second lookup costs nothing
        while the cache stays as it is.

        A cached block has the drafter's context KV too (PUBLISH, TOGETHER), so no block of the hit is dropped. At least
        one position is left to compute: a fresh prompt needs the logits of its last token, and a resumed request a row
        after which the drafter runs. So there is a token after the last block, as the hashes need with a drafter that
        reads it. A request that wants log-probabilities of its prompt computes all of it. The hit ends where every
        group lets it: with recurrent layers where there is a copy of the state, with layers that have a window where
        the blocks are cached that its first query sees.
        """
        if not self._caching or request.wants_prompt_logprobs:
            return []
        version = sum(group.version for group in self.groups)
        if request.hit is None or request.hit[0] != version:
            num_blocks = (request.prefill_end - 1) // self._block_size
            hashes = request.block_hashes.first(num_blocks, request.token_ids)
            chain = self.pool.find_chain(hashes, num_blocks)
            request.num_cached_blocks = len(chain)
            request.hit = version, chain[: self._longest(hashes, len(chain))]
        return request.hit[1]

    def _longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of `num_blocks` cached blocks a request can start after in all groups."""
        while True:
            longest = num_blocks
            for group in self._others:
                longest = group.longest(hashes, longest)
            if longest == num_blocks:
                return longest
            num_blocks = longest

    def fits(self, request: Request, num_positions: int, hit: Sequence[int], num_promised: int = 0) -> bool:
        """Whether the pools can cover `num_positions` now, for a request that starts with `hit`. `num_promised` free
        blocks are for others."""
        num_blocks = blocks_for(num_positions, self._block_size)
        return all(group.fits(request, num_blocks, hit, num_promised) for group in self.groups)

    def make_admissible(self, request: Request, num_positions: int, hit: Sequence[int], num_promised: int) -> bool:
        """As `fits`, for a request that waits: of what is kept for other servers as much gives way as it takes, the
        oldest first. What is kept for less than `FETCH_S` stays, since its decode server may just ask for it."""
        while not self.fits(request, num_positions, hit, num_promised):
            if not self.evict_kept(FETCH_S):
                return False
        return True

    def evict_kept(self, least_age_s: float = 0.0) -> bool:
        """Let go of the prompt that is kept for another server for longest, if for at least `least_age_s`; False where
        there is none."""
        return self.tiers is not None and self.tiers.kept is not None and self.tiers.kept.evict_oldest(least_age_s)

    def start(self, request: Request, hit: list[int]) -> None:
        """Hold the hit; the request counts as computed up to its end."""
        for group in self.groups:
            group.start(request, hit)
        request.hit = None
        request.drafter_epoch = self.drafter_epoch
        request.num_published_blocks = len(hit)
        request.num_computed = len(hit) * self._block_size

    def reserve(self, request: Request, row: ScheduledRequest) -> bool:
        """Extend the block table to cover the row's positions, and note the new blocks in the row. False when a pool
        has too few; nothing is taken then."""
        missing = blocks_for(row.num_positions, self._block_size) - len(request.block_ids)
        if missing > 0:
            if not all(group.has_free(missing) for group in self.groups):
                return False
            for group in self.groups:
                group.extend(request, row, missing)
        return True

    def claim(self, request: Request, row: ScheduledRequest) -> bool:
        """As `reserve`, for a request that runs: loads give way to it, and of what is kept for other servers as much as
        it takes, the oldest first."""
        while not self.reserve(request, row):
            if self.tiers is None or not self.tiers.cancel_loads():
                return False
        return True

    def snapshot_slots(self, running: Mapping[str, Request], rows: Iterable[ScheduledRequest]) -> dict[str, int]:
        """Slots for copies of the recurrent states at the ends of a step's rows, by the ids of the requests whose
        states are to be copied there."""
        slots = {}
        for group in self._others:
            for row in rows:
                slot = group.snapshot_slot(running[row.request_id], row.num_computed + row.num_new)
                if slot is not None:
                    slots[row.request_id] = slot
        return slots

    def publish(self, request: Request) -> None:
        """Put the request's blocks that are full and final into the prefix cache (invariant PUBLISH). Then give back
        those that no query of it sees any more.

        Final are positions below `num_computed` whose token was kept: a stop may have dropped accepted ones. With a
        drafter that reads the token after a position, that one must have been kept too.
        """
        if self._caching and request.drafter_epoch == self.drafter_epoch:
            num_full = min(request.num_computed, len(request.token_ids) - self._num_next) // self._block_size
            if num_full > request.num_published_blocks:
                hashes = request.block_hashes.first(num_full, request.token_ids)
                for index in range(request.num_published_blocks, num_full):
                    for group in self.groups:
                        group.publish(request, index, hashes[index])
                request.num_published_blocks = num_full
        for group in self._others:
            group.advance(request)

    def release(self, request: Request) -> None:
        """Give up all blocks of the request; what it published can still be found."""
        for group in self.groups:
            group.release(request)
        request.num_published_blocks = 0
        request.num_computed = 0

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: of a step whose tokens were taken in, the drafter's KV or the copies of recurrent
        states were not written. Requests keep their blocks."""
        for group in self.groups:
            group.reset_prefix_cache()

    def begin_drafter(self) -> None:
        """Another drafter writes context KV from now on: blocks with that of the one before are found no more."""
        self.drafter_epoch += 1
        self.reset_prefix_cache()

    def writable_blocks(self, request: Request) -> list[frozenset[int]]:
        """The blocks that a step may write for the request (invariant OWN), for each group that has blocks."""
        return [blocks for group in self.groups if (blocks := group.writable(request)) is not None]


def share_prefixes(
    rows: list[ScheduledRequest], running: Mapping[str, Request], config: SchedulerConfig
) -> tuple[list[ScheduledRequest], list[SharedPrefix]]:
    """The rows of a step in an order in which those that share a prefix of at least `config.min_shared_positions`
    positions are neighbours, and these groups: those that save most, each of `MIN_SHARING_ROWS` rows at least. Where
    there is none the rows are in the order given. Attention then reads the beginning of their KV once.

    Two requests hold the same block only where one of them found it in the prefix cache, whose blocks follow from all
    tokens before them, so one block at the right place says that a prefix is shared. (Not all blocks before it need be
    the same ones: a prompt that two requests computed at the same time is there twice.)
    """
    place = -(-config.min_shared_positions // config.block_size) - 1
    by_block: dict[int, list[ScheduledRequest]] = {}
    for row in rows:
        blocks = running[row.request_id].block_ids
        if row.sample and row.num_new == 1 and place < len(blocks):
            by_block.setdefault(blocks[place], []).append(row)
    found = []
    for group in by_block.values():
        if len(group) >= MIN_SHARING_ROWS:
            num_blocks = _common([running[row.request_id] for row in group], config.block_size)
            if num_blocks > place and _pays(group, num_blocks * config.block_size, config):
                found.append((num_blocks, group))
    if not found:
        return rows, []
    found.sort(key=lambda each: each[0] * (len(each[1]) - 1), reverse=True)
    ordered: list[ScheduledRequest] = []
    prefixes = []
    for num_blocks, group in found[:MAX_SHARED_PREFIXES]:
        prefixes.append(SharedPrefix(len(ordered), len(group), num_blocks))
        ordered += group
    names = {row.request_id for row in ordered}
    return ordered + [row for row in rows if row.request_id not in names], prefixes


def _pays(group: Sequence[ScheduledRequest], num_positions: int, config: SchedulerConfig) -> bool:
    """Whether reading `num_positions` once for each tile of queries, and not for each row, saves more than twice what
    writing and reading partial results costs."""
    num_queries = sum(row.num_new + row.num_draft for row in group)
    num_tiles = -(-num_queries // config.shared_queries_per_tile)
    saved = (len(group) - num_tiles) * num_positions
    return saved > 2 * num_queries * config.positions_per_shared_query


def _common(requests: Sequence[Request], block_size: int) -> int:
    """How many of the first blocks all of `requests` have in common, and have computed."""
    first = requests[0].block_ids
    most = min(request.num_computed // block_size for request in requests)
    for request in requests[1:]:
        blocks = request.block_ids
        if first[:most] != blocks[:most]:
            most = bisect.bisect_left(range(most), True, key=lambda i: first[: i + 1] != blocks[: i + 1])
    return most

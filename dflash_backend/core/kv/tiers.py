"""What leaves the device's cache and is still found: records in tiers, by hash, and how they go out and come back.

Here are ids and hashes alone; a `KVMover` (`core/moves.py`) has the tensors. `docs/kv-tiers.md` says who owns a block
on its way. In short: what goes out is held by no one for that, and its copy is void if the block leaves the cache
meanwhile; what comes in is held by its load until the request that it is for starts, ends, or must give way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import msgspec

from dflash_backend.core.kv.block_pool import KVEventLog
from dflash_backend.core.kv.groups import KVGroup, Outlet
from dflash_backend.core.kv.record_slots import KVTier, RecordSlots
from dflash_backend.core.kv.transfer import KeptForOthers, OfferedRecords, RemoteTier
from dflash_backend.core.moves import DEVICE, MEDIUMS, REMOTE, KVMover, Move, Moved, Peer, Record
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig, blocks_for
from dflash_backend.messages import KVTransferParams, TierStats, TransferStats

# Records of a move, and moves to a tier that are under way, at most: what leaves the cache before its turn is lost.
RECORDS_PER_MOVE = 16
MOVES_UNDER_WAY = 2
# Part of a tier's slots whose records may wait for the tier below where the tier loses others for that: they stay until
# they are there, and a slow disk would leave no slot.
MAX_WAITING_SHARE = 1 / 4
# Blocks of the requests that one plan lets wait for loads, at most, but for the last one: looking for them takes time.
MAX_BLOCKS_SOUGHT = 4096
# Requests that wait for loads at most.
MAX_LOADS = 8
# As many from other servers, which have computed what would be computed twice.
MAX_REMOTE_LOADS = 64
# And prompts whose KV is not needed, of which other servers are yet to be told; more are kept there for their time.
MAX_TOLD = 64
# Part of the rate of loads that stays after another one.
RATE_KEPT = 0.8
# Loads from a tier that are refused for its rate before one is made to measure it again: at first, and at most, since
# the number doubles each time.
REFUSALS_BEFORE_PROBE, MAX_REFUSALS_BEFORE_PROBE = 16, 1024


@dataclass(slots=True, eq=False)
class KVLoad:
    """Records on their way to the device for a request that waits.

    The hit is of `end` blocks in the end, of which the first `start` need no load. tier_of: by the index of a block,
    where it comes from. under_way: the moves that have not ended. arrived: as group, index, hash and slot. followers:
    other requests that wait for it. given_up: `request` waits no more.
    """

    load_id: int
    request: Request
    start: int
    end: int
    tier_of: dict[int, str] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)
    arrived: list[tuple[int, int, bytes, int]] = field(default_factory=list)
    followers: list[Request] = field(default_factory=list)
    given_up: bool = False


class KVTiers:
    """All tiers below the device, the nearest first. Each takes its records from the one before it."""

    def __init__(self, config: SchedulerConfig, mover: KVMover, events: KVEventLog | None = None) -> None:
        self._mover = mover
        self._events = events
        self._block_size = config.block_size
        # An autoregressive drafter writes nothing before its request runs; a block drafter's queries have their slots.
        self._lookahead = 0 if config.autoregressive else config.lookahead[-1]
        self.groups: list[KVGroup] = []
        """The groups of layers, by their numbers in records; whoever makes this adds them."""
        self._num_outlets = 0
        self.tiers: list[KVTier] = [KVTier.of(each) for each in config.tiers]
        self.stats = {each.name: TierStats() for each in config.tiers}
        transfer = config.transfer
        self.remote: RemoteTier | None = None
        """What other servers keep for requests here."""
        if transfer is not None and transfer.receives:
            self.remote = RemoteTier(config.block_size)
            self.stats[REMOTE] = TierStats()
        self.kept: KeptForOthers | None = None
        """What is kept for requests of other servers."""
        if transfer is not None and transfer.sends:
            assert mover.sender is not None, "KV is to be kept for others, and nothing sends it"
            self.kept = KeptForOthers(mover.sender, self.groups, config.block_size, transfer.timeout_s)
        # What is to go to each tier, in order, and how much may wait for that: what is above it can have.
        self._outbox: list[dict[tuple[int, bytes], None]] = [{} for _ in self.tiers]
        self._num_waiting: list[Counter[int]] = [Counter() for _ in self.tiers]  # of each group in that
        on_device = config.num_blocks + config.num_window_blocks + (config.num_state_snapshots or 0)
        self._most_waiting = [on_device, *(sum(tier.num_slots) for tier in config.tiers)]
        self._moves: dict[int, Move] = {}
        self._num_out = [0] * len(self.tiers)  # moves under way to each tier
        self._num_moves = 0
        # Records being copied from the device, and those of them that have left it meanwhile.
        self._leaving: set[tuple[int, bytes]] = set()
        self._void: set[tuple[int, bytes]] = set()
        # The loads of requests that wait, or have not started since; those of moves; and requests whose wait is over.
        self._loads: dict[Request, KVLoad] = {}
        self._load_of: dict[int, KVLoad] = {}
        self._ended: list[Request] = []
        self._num_sought = 0  # blocks, in this plan
        self._told: set[int] = set()  # moves that tell another server that nothing is needed
        self._seconds_per_byte: dict[str, float] = {}
        # Of each tier: refused loads since one paid or was a probe, and how many there may be. And whose probes run.
        self._num_refused: dict[str, int] = {}
        self._max_refused: dict[str, int] = {}
        self._probed: set[str] = set()
        self._bytes_per_record: dict[int, float] = {}
        for tier in self.tiers:
            self._restore(tier)

    def outlet(self) -> Outlet:
        """That of the next group."""
        group, self._num_outlets = self._num_outlets, self._num_outlets + 1
        if self.remote is not None:
            self.remote.groups.append(OfferedRecords())
        return Outlet(partial(self.released, group), partial(self.removed, group))

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves, and nothing is to."""
        return not self._moves and not any(self._outbox) and not (self.kept is not None and self.kept.has_new)

    @property
    def is_keeping(self) -> bool:
        """Whether KV is kept for other servers, which may take it at any time."""
        return bool(self.kept)

    @property
    def is_loading(self) -> bool:
        """Whether something is on its way to the device."""
        return bool(self._load_of)

    def report(self) -> dict[str, TierStats]:
        """The counts of each tier as they are now."""
        return {
            tier.name: msgspec.structs.replace(self.stats[tier.name], num_records=tier.num_records)
            for tier in self._sources
        }

    @property
    def kept_stats(self) -> TransferStats:
        """The counts of what is kept for other servers, as they are now."""
        return TransferStats() if self.kept is None else msgspec.structs.replace(self.kept.stats)

    @property
    def _sources(self) -> list[KVTier]:
        """Where records may come from, the nearest first."""
        return self.tiers if self.remote is None else [*self.tiers, self.remote]

    def advance(self) -> None:
        """Take in the moves that have ended and begin others. The worker must have been given all steps that were
        planned, and those whose results were taken in must have drafted: only then is what they published final."""
        self._num_sought = 0
        for group in self.groups:
            group.begin_plan()
        if self._moves:
            self._take_finished()
        if self.kept is not None:
            self.kept.advance()
        for number, outbox in enumerate(self._outbox):
            while outbox and self._num_out[number] < MOVES_UNDER_WAY and self._send(number):
                pass

    def wait(self, timeout_s: float) -> None:
        """Wait for a move to end."""
        self._mover.wait(timeout_s)

    def _restore(self, tier: KVTier) -> None:
        """Take in what a tier brought from before the start."""
        for group, block_hash in self._mover.kept(tier.name):
            found = tier.groups[group].reserve(block_hash) if group < len(tier.groups) else None
            if found is None:
                self._mover.remove(tier.name, group, block_hash)
                continue
            self._settle(tier, group, block_hash, is_there=True)
            if found[1] is not None:
                self._mover.remove(tier.name, group, found[1])

    def _submit(self, source: str, target: str, records: Sequence[Record], peer: Peer | None = None) -> int:
        self._num_moves += 1
        move = Move(self._num_moves, source, target, tuple(records), peer)
        self._moves[move.move_id] = move
        self._mover.submit(move)
        return move.move_id

    # What goes out.

    def released(self, group: int, block_hash: bytes, reused: bool) -> None:
        """A record on the device is not held any more by a request: it goes to the first tier that does not have it,
        and from there on. In a tier that has it it stays the longer."""
        for number, tier in enumerate(self.tiers):
            if tier.groups[group].slot(block_hash) is None:
                self._put_out(number, (group, block_hash))
                return
            tier.groups[group].touch(block_hash, reused)

    def removed(self, group: int, block_hash: bytes) -> None:
        """A record left the device. What a copy of it has is not to be relied on: its slot may be written already."""
        if (group, block_hash) in self._leaving:
            self._void.add((group, block_hash))
        if self.kept is not None:
            self.kept.removed(group, block_hash)
        if self._events is not None and group == 0:
            self._events.removed(block_hash)

    def _put_out(self, number: int, key: tuple[int, bytes]) -> None:
        outbox, (group, block_hash) = self._outbox[number], key
        if key in outbox or self.tiers[number].groups[group].reserved(block_hash) is not None:
            return
        outbox[key] = None
        self._num_waiting[number][group] += 1
        if number:
            self.tiers[number - 1].groups[group].pin(block_hash)  # until it is in the tier below
        if len(outbox) > self._most_waiting[number]:
            self._lose(number, next(iter(outbox)))

    def _lose(self, number: int, key: tuple[int, bytes]) -> None:
        """A record does not come to a tier, since it left the one above before its turn. Where much of what the tier
        has of its group waits for the tier below, the oldest of that waits no more."""
        self._drop(number, key)
        self.stats[self.tiers[number].name].num_lost += 1
        if number + 1 == len(self.tiers):
            return
        group, below = key[0], number + 1
        num_over = self._num_waiting[below][group] - int(MAX_WAITING_SHARE * self.tiers[number].groups[group].num_slots)
        oldest = (each for each in self._outbox[below] if each[0] == group)
        for each in list(islice(oldest, max(0, num_over))):
            self._lose(below, each)

    def _take_out(self, number: int, key: tuple[int, bytes]) -> None:
        del self._outbox[number][key]
        self._num_waiting[number][key[0]] -= 1

    def _drop(self, number: int, key: tuple[int, bytes]) -> None:
        """A record does not go to a tier."""
        self._take_out(number, key)
        if number:
            self.tiers[number - 1].groups[key[0]].unpin(key[1])

    def _send(self, number: int) -> bool:
        """Begin a move to a tier; False where nothing is left of what was to go there, or there is no space until what
        the tier has is in the tier below it."""
        tier, outbox = self.tiers[number], self._outbox[number]
        above: Sequence[KVGroup | RecordSlots] = self.tiers[number - 1].groups if number else self.groups
        records: list[Record] = []
        while outbox and len(records) < RECORDS_PER_MOVE:
            key = group, block_hash = next(iter(outbox))
            source, slots = above[group].slot(block_hash), tier.groups[group]
            if source is None or slots.slot(block_hash) is not None or slots.reserved(block_hash) is not None:
                (self._lose if source is None else self._drop)(number, key)
                continue
            if (found := slots.reserve(block_hash)) is None:
                break
            self._take_out(number, key)
            if found[1] is not None:
                self._report(tier, group, found[1], stored=False)
            if number == 0:
                self._leaving.add(key)
            records.append(Record(group, block_hash, source, *found))
        if records:
            self._num_out[number] += 1
            self._submit(self.tiers[number - 1].name if number else DEVICE, tier.name, records)
        return bool(records)

    def _take_stored(self, move: Move, moved: Moved) -> None:
        number = next(i for i, tier in enumerate(self.tiers) if tier.name == move.target)
        self._num_out[number] -= 1
        tier = self.tiers[number]
        for record, arrived in zip(move.records, moved.arrived, strict=True):
            key = record.group, record.block_hash
            if move.source == DEVICE:
                self._leaving.remove(key)
                arrived = arrived and key not in self._void
                self._void.discard(key)
            else:
                self.tiers[number - 1].groups[record.group].unpin(record.block_hash)
            self._settle(tier, *key, is_there=arrived)
            if not arrived:
                self.stats[tier.name].num_lost += 1
            elif number + 1 < len(self.tiers) and (
                self.tiers[number + 1].groups[record.group].slot(record.block_hash) is None
            ):
                self._put_out(number + 1, key)

    def _settle(self, tier: KVTier, group: int, block_hash: bytes, is_there: bool) -> None:
        tier.groups[group].settle(block_hash, is_there)
        if is_there:
            self._report(tier, group, block_hash, stored=True)

    def _report(self, tier: KVTier, group: int, block_hash: bytes, stored: bool) -> None:
        if self._events is not None and group == 0:
            self._events.moved(block_hash, MEDIUMS[tier.name], stored)

    # What comes back.

    @property
    def has_begun_enough(self) -> bool:
        """Whether no more requests are to wait for loads before the next plan; one is under way then."""
        return self._num_sought >= MAX_BLOCKS_SOUGHT

    def begin(self, request: Request, hit: Sequence[int], seconds_per_token: float, wait_s: float) -> bool:
        """Load what lets a request start after more blocks than `hit`, where that takes less time than computing them;
        whether it does, and the request is to wait. `ended` says when it need not any more.

        seconds_per_token: that computing a prompt takes; 0: not known. wait_s: what is lost by waiting at all.
        """
        if request.has_loaded or request.wants_prompt_logprobs:
            return False
        versions = (
            sum(group.version for group in self.groups),
            sum(slots.version for tier in self.tiers for slots in tier.groups),
        )
        if request.nothing_to_load_at == versions and not request.has_remote_kv:
            return False
        if self.remote is not None:
            self.remote.offer(request, self.groups)
        num_blocks = (request.prefill_end - 1) // self._block_size
        hashes = request.block_hashes.first(num_blocks, request.token_ids)
        end = self._reach(hashes, num_blocks, len(hit))
        load = KVLoad(self._num_moves + 1, request, len(hit), end)
        wanted = self._wanted(load, hashes) if end > len(hit) else {}
        if not wanted:
            request.nothing_to_load_at = versions
            return False
        coming = self._coming(wanted)
        if coming is not None:
            coming.followers.append(request)
            self._num_sought += num_blocks
            return True
        request.has_loaded = True
        # Another server has computed it: it is not computed twice.
        is_remote = REMOTE in wanted.values()
        if len(self._load_of) >= (MAX_REMOTE_LOADS if is_remote else MAX_LOADS):
            return False
        if not is_remote and not self._pays(load, wanted, seconds_per_token, wait_s):
            return False
        if not self._hold(load, hashes):
            return False
        self._num_sought += num_blocks
        return True

    def _reach(self, hashes: Sequence[bytes], num_blocks: int, least: int) -> int:
        """How many of the first blocks a request can start after with all tiers; at most `least` where no more."""
        end = 0
        while end < num_blocks and self._source(0, hashes[end]) is not None:
            end += 1
        while end > least:
            missing = [
                index
                for number, group in enumerate(self.groups[1:], 1)
                for index in group.needed(end)
                if self._source(number, hashes[index]) is None
            ]
            if not missing:
                break
            end = max(missing)
        return end

    def _source(self, group: int, block_hash: bytes) -> str | None:
        """Where a record can be found, the nearest slot."""
        if self.groups[group].slot(block_hash) is not None:
            return DEVICE
        return next((tier.name for tier in self._sources if tier.groups[group].slot(block_hash) is not None), None)

    def _wanted(self, load: KVLoad, hashes: Sequence[bytes]) -> dict[tuple[int, bytes], str]:
        """The records to load, and the tier of each. Notes where blocks come from."""
        wanted: dict[tuple[int, bytes], str] = {}
        for number, group in enumerate(self.groups):
            for index in group.needed(load.end):
                source = self._source(number, hashes[index])
                if source is not None and source != DEVICE:
                    wanted[number, hashes[index]] = source
                    load.tier_of.setdefault(index, source)
        return wanted

    def _coming(self, wanted: Mapping[tuple[int, bytes], str]) -> KVLoad | None:
        """A load under way that brings some of these."""
        for move_id, load in self._load_of.items():
            if any((record.group, record.block_hash) in wanted for record in self._moves[move_id].records):
                return load
        return None

    def _pays(
        self, load: KVLoad, wanted: Mapping[tuple[int, bytes], str], seconds_per_token: float, wait_s: float
    ) -> bool:
        """Whether loading takes less time than computing. What was never measured is tried, and now and then what was
        too slow: one slow load says little of later ones."""
        load_s = wait_s
        for (group, _), name in wanted.items():
            load_s += self._bytes_per_record.get(group, 0.0) * self._seconds_per_byte.get(name, 0.0)
        names = set(wanted.values())
        if not seconds_per_token or load_s < (load.end - load.start) * self._block_size * seconds_per_token:
            for name in names:
                self._num_refused.pop(name, None)
                self._max_refused.pop(name, None)
            return True
        for name in names:
            most = self._max_refused.setdefault(name, REFUSALS_BEFORE_PROBE)
            self._num_refused[name] = number = self._num_refused.get(name, 0) + 1
            if number > most:
                self._num_refused[name] = 0
                self._max_refused[name] = min(2 * most, MAX_REFUSALS_BEFORE_PROBE)
                self._probed.add(name)
                return True
        for name in names:
            self.stats[name].num_computed += 1
        return False

    def _hold(self, load: KVLoad, hashes: Sequence[bytes]) -> bool:
        """Hold all that the hit needs, and begin to load what is missing; False where slots run out."""
        num_more = blocks_for(self._lookahead, self._block_size)
        tiers = {tier.name: tier for tier in self._sources}
        records: dict[str, list[Record]] = {}
        for number, group in enumerate(self.groups):
            needed = [hashes[index] for index in group.needed(load.end)]
            slots = group.hold(load.load_id, needed, num_more)
            if slots is None:
                self._let_go(load)
                return False
            for block_hash, (slot, is_new) in zip(needed, slots, strict=True):
                if is_new:
                    found = ((tier, tier.groups[number].slot(block_hash)) for tier in self._sources)
                    tier, source = next((tier, source) for tier, source in found if source is not None)
                    records.setdefault(tier.name, []).append(Record(number, block_hash, source, slot))
        self._loads[load.request] = load
        for name, of_tier in records.items():
            for record in of_tier:
                tiers[name].groups[record.group].pin(record.block_hash)
            peer = None
            if name == REMOTE and self.remote is not None:
                peer = self.remote.peer(load.request)
                load.request.has_remote_kv = False
            move_id = self._submit(name, DEVICE, of_tier, peer)
            load.under_way.add(move_id)
            self._load_of[move_id] = load
        return True

    def _take_loaded(self, move: Move, moved: Moved) -> None:
        load = self._load_of.pop(move.move_id)
        load.under_way.remove(move.move_id)
        tier = next(tier for tier in self._sources if tier.name == move.source)
        hashes = load.request.block_hashes.first(load.end, load.request.token_ids)
        index_of = {block_hash: index for index, block_hash in enumerate(hashes[: load.end])}
        for number, (record, arrived) in enumerate(zip(move.records, moved.arrived, strict=True)):
            slots = tier.groups[record.group]
            slots.unpin(record.block_hash)
            if arrived:
                slots.touch(record.block_hash, reused=True)
                load.arrived.append((record.group, index_of[record.block_hash], record.block_hash, record.target))
            elif number in moved.missing and tier is not self.remote:
                slots.remove(record.block_hash)
                self._report(tier, record.group, record.block_hash, stored=False)
        if load.under_way:
            return
        for group, index, block_hash, slot in sorted(load.arrived):
            self.groups[group].loaded(load.load_id, load.request, index, block_hash, slot)
        self._ended += load.followers
        if load.given_up:
            self._let_go(load)
        else:
            self._ended.append(load.request)

    def ended(self) -> list[Request]:
        """The requests that need not wait any more since the last call. What a load has brought is held until
        `release`."""
        ended, self._ended = self._ended, []
        return ended

    def release(self, request: Request, comes_back: bool = False) -> KVLoad | None:
        """A request starts, holding what it has found, or is gone: let go of what its load holds. A load under way goes
        on, for others. comes_back: it will be queued again, and may need what another server keeps for it. Returns the
        load, where it has ended."""
        if not comes_back and request.has_remote_kv and self.remote is not None:
            if (peer := self.remote.peer(request)) is not None:
                self._tell(peer)
            request.has_remote_kv = False
        load = self._loads.pop(request, None)
        if load is None:
            return None
        if load.under_way:
            load.given_up = True
            return None
        self._let_go(load)
        return load

    def _tell(self, peer: Peer) -> None:
        """Tell another server that what it keeps is not needed."""
        if len(self._told) < MAX_TOLD:
            self._told.add(self._submit(REMOTE, DEVICE, (), peer))

    def keep(self, request: Request) -> KVTransferParams | None:
        """Keep the KV of a prompt for another server, where its request, which has just ended and still has its blocks,
        asks for that. Returns by what it can be fetched."""
        params = request.sampling.kv_transfer_params
        if self.kept is None or params is None or not params.do_remote_decode:
            return None
        return self.kept.keep(request)

    def count_hit(self, load: KVLoad, num_blocks: int) -> dict[str, int]:
        """The tokens, by tier, that the request of a load needs not compute since it was loaded, when its hit has
        `num_blocks` blocks. Blocks that only became of use by what was loaded for others count as these."""
        counts: dict[str, int] = {}
        last = load.tier_of[max(load.tier_of)]
        for index in range(load.start, min(load.end, num_blocks)):
            name = load.tier_of.get(index, last)
            counts[name] = counts.get(name, 0) + self._block_size
        for name, count in counts.items():
            self.stats[name].num_hit_tokens += count
        return counts

    def cancel_loads(self) -> bool:
        """Let go of all that loads hold, and stop those under way, or of some of what is kept for other servers; False
        where there is neither. Requests that load need not wait any more."""
        if not self._loads and not self._load_of:
            return self.kept is not None and self.kept.evict_oldest()
        if self._load_of:
            self._mover.cancel(frozenset(self._load_of))
            self._take_finished()
        for load in self._loads.values():
            self._let_go(load)
        self._loads.clear()
        return True

    def _let_go(self, load: KVLoad) -> None:
        for group in self.groups:
            group.let_go(load.load_id)

    def _take_finished(self) -> None:
        for moved in self._mover.finished():
            move = self._moves.pop(moved.move_id)
            self._measure(move, moved)
            if move.move_id in self._load_of:
                self._take_loaded(move, moved)
            elif move.is_load:
                self._told.remove(move.move_id)
            else:
                self._take_stored(move, moved)

    def _measure(self, move: Move, moved: Moved) -> None:
        """Take in how long a move took."""
        if not move.is_load:
            stats = self.stats[move.target]
            stats.num_bytes_stored += moved.num_bytes
            stats.store_seconds += moved.seconds
        else:
            stats = self.stats[move.source]
            stats.num_bytes_loaded += moved.num_bytes
            stats.load_seconds += moved.seconds
        if not moved.num_bytes or not all(moved.arrived):
            return
        if len({record.group for record in move.records}) == 1:
            self._bytes_per_record[move.records[0].group] = moved.num_bytes / len(move.records)
        if move.is_load:
            now = moved.seconds / moved.num_bytes
            before = now if move.source in self._probed else self._seconds_per_byte.get(move.source, now)
            self._probed.discard(move.source)
            self._seconds_per_byte[move.source] = RATE_KEPT * before + (1 - RATE_KEPT) * now

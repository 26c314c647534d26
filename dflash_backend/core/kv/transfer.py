"""KV that one server computes and another goes on with (`docs/disaggregation.md`): what is kept of a prompt for a
decode server, and where that finds it. Ids and hashes alone, as in `tiers.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dflash_backend.core.kv.groups import KVGroup
from dflash_backend.core.kv.record_slots import KVTier, RecordSlots
from dflash_backend.core.moves import REMOTE, Kept, KVSender, Peer, Record
from dflash_backend.core.request import Request
from dflash_backend.messages import KVTransferParams, TransferStats

# Ids of blocks that a client is told: they are for people to read, and a request has to bring them back.
MAX_BLOCK_IDS = 1024


class KeptForOthers:
    """The blocks of prompts that decode servers are to fetch. They are held as a load's are, so no request can have
    them; a copy of a recurrent state is not, and what is kept goes with it."""

    def __init__(
        self,
        sender: KVSender,
        groups: Sequence[KVGroup],
        block_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_s: how long it is kept at most."""
        self._sender, self._groups = sender, groups
        self._block_size, self._timeout_s, self._clock = block_size, timeout_s, clock
        # What is kept, and until when (clock, s), by its number: the oldest first.
        self._keeping: dict[int, tuple[Kept, float]] = {}
        self._num_kept = 0
        # Of steps that have not drafted yet.
        self._new: list[int] = []
        # What has lost a record and is withdrawn; and which numbers have a record.
        self._broken: list[int] = []
        self._numbers: dict[tuple[int, bytes], list[int]] = {}
        self.stats = TransferStats()

    def __len__(self) -> int:
        return len(self._keeping)

    @property
    def has_new(self) -> bool:
        """Whether something is kept that cannot be read before the next `advance`."""
        return bool(self._new)

    def keep(self, request: Request) -> KVTransferParams | None:
        """Keep the KV of a request's prompt, which has just ended, before its blocks are given back: as many blocks as
        a request with this prompt can start after. Returns what the decode server must know; None: there is no
        block."""
        end = self._end(request)
        if end == 0:
            return None
        hashes = request.block_hashes.first(end, request.token_ids)
        self._num_kept = number = self._num_kept + 1
        records: list[Record] = []
        for group_number, group in enumerate(self._groups):
            needed = [hashes[index] for index in group.needed(end)]
            slots = group.hold(-number, needed, 0)
            assert slots is not None, "what is on the device already takes no slot"
            records += [
                Record(group_number, block_hash, slot, 0) for block_hash, (slot, _) in zip(needed, slots, strict=True)
            ]
        kept = Kept(number, hashes[end - 1], tuple(records))
        self._keeping[number] = kept, self._clock() + self._timeout_s
        for record in records:
            self._numbers.setdefault((record.group, record.block_hash), []).append(number)
        self._sender.keep(kept)
        self._new.append(number)
        self.stats.num_kept += 1
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._sender.engine_id,
            remote_block_ids=tuple(record.source for record in records[: min(end, MAX_BLOCK_IDS)]),
            remote_num_blocks=end,
            remote_host=self._sender.host,
            remote_port=self._sender.port,
        )

    def _end(self, request: Request) -> int:
        """How many first blocks of the prompt all groups have what a hit needs of."""
        end = (request.num_prompt_tokens - 1) // self._block_size
        hashes = request.block_hashes.first(end, request.token_ids)
        while end:
            missing = [
                index for group in self._groups for index in group.needed(end) if group.slot(hashes[index]) is None
            ]
            if not missing:
                break
            end = min(max(missing), end - 1)
        return end

    def advance(self) -> None:
        """Let go of what was taken, or was kept for too long; let be read what was kept since: the steps whose results
        were taken in must have drafted."""
        for number in self._sender.taken():
            if number in self._keeping:
                self._let_go(number)
                self.stats.num_taken += 1
        for number in self._broken:
            if number in self._keeping:
                self._let_go(number)
                self.stats.num_expired += 1
        self._broken.clear()
        now = self._clock()
        while self._keeping and next(iter(self._keeping.values()))[1] <= now:
            self._withdraw(next(iter(self._keeping)))
        for number in self._new:
            if number in self._keeping:
                self._sender.ready(number)
        self._new.clear()

    def removed(self, group: int, block_hash: bytes) -> None:
        """A record can no longer be found on the device: it may be written, or is not what it was to be."""
        for number in self._numbers.get((group, block_hash), ()):
            self._sender.withdraw(number)
            self._broken.append(number)

    def evict_oldest(self, least_age_s: float = 0.0) -> bool:
        """Let go of the oldest, if it is kept for at least `least_age_s`; False where there is none. Its decode server
        computes it."""
        if not self._keeping:
            return False
        number, (_, until) = next(iter(self._keeping.items()))
        if self._clock() < until - self._timeout_s + least_age_s:
            return False
        self._withdraw(number)
        return True

    def _withdraw(self, number: int) -> None:
        self._sender.withdraw(number)
        self._let_go(number)
        self.stats.num_expired += 1

    def _let_go(self, number: int) -> None:
        for record in self._keeping.pop(number)[0].records:
            numbers = self._numbers[record.group, record.block_hash]
            numbers.remove(number)
            if not numbers:
                del self._numbers[record.group, record.block_hash]
        for group in self._groups:
            group.let_go(-number)


class OfferedRecords(RecordSlots):
    """Those of one group that another server keeps for the request at hand. They take no slot here."""

    def __init__(self) -> None:
        super().__init__(0)
        self.offered: frozenset[bytes] = frozenset()

    def slot(self, block_hash: bytes) -> int | None:
        return 0 if block_hash in self.offered else None

    def touch(self, block_hash: bytes, reused: bool) -> None:
        """How long they stay is the other server's to say."""


class RemoteTier(KVTier):
    """What other servers keep, each for one request: no other finds it."""

    groups: list[OfferedRecords]

    def __init__(self, block_size: int) -> None:
        super().__init__(REMOTE, [])
        self._block_size = block_size

    def peer(self, request: Request) -> Peer | None:
        """Who keeps KV for a request that has neither fetched it nor let go of it; None: none does, or it is that of
        another prompt."""
        params = request.sampling.kv_transfer_params
        if not request.has_remote_kv or params is None:
            return None
        end = params.num_blocks
        if not 0 < end <= (request.num_prompt_tokens - 1) // self._block_size:
            return None
        key = request.block_hashes.first(end, request.token_ids)[end - 1]
        return Peer(params.remote_host, params.remote_port, key)

    def offer(self, request: Request, groups: Sequence[KVGroup]) -> None:
        """Let be found what is kept for this request, if anything is, and nothing else."""
        params = request.sampling.kv_transfer_params
        end = 0 if params is None or self.peer(request) is None else params.num_blocks
        hashes = request.block_hashes.first(end, request.token_ids)
        for offered, group in zip(self.groups, groups, strict=True):
            offered.offered = frozenset(hashes[index] for index in group.needed(end))

"""Moves between the toy worker's device and made-up tiers, half a record at a time, at times of their own.

A record is moved in two halves with steps between them, so a block that is overwritten while it is copied, or read
while it is loaded, has two halves of different texts. A move begins when the steps that were submitted before it have
run, as on a device with a queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_backend.core.moves import DEVICE, DISK, REMOTE, Kept, Move, Moved, Record
from tests.core.toy_worker import ToyWorker

Half = list[int]


@dataclass
class _Job:
    """A move under way: the step that comes before it, and how many halves of its records are there."""

    move: Move
    after: object | None
    num_halves: int = 0
    missing: set[int] = field(default_factory=set)
    kept: Kept | None = None


class ToySender:
    """A `KVSender`, whose readers are toy movers."""

    host, engine_id = "toy", "toy-engine"

    def __init__(self, port: int = 1) -> None:
        self.port = port
        self.kept: dict[int, Kept] = {}
        self.readable: set[int] = set()
        self._taken: list[int] = []

    def keep(self, kept: Kept) -> None:
        self.kept[kept.number] = kept

    def ready(self, number: int) -> None:
        self.readable.add(number)

    def withdraw(self, number: int) -> None:
        self.kept.pop(number, None)

    def taken(self) -> list[int]:
        taken, self._taken = self._taken, []
        return taken

    def take(self, number: int) -> bool:
        """Somebody has read it; whether it was kept all the while."""
        was_kept = self.kept.pop(number, None) is not None
        if was_kept:
            self._taken.append(number)
        return was_kept

    def named(self, key: bytes) -> Kept | None:
        return next((kept for kept in self.kept.values() if kept.key == key), None)


class ToyMover:
    """A `KVMover`. pace: how many halves are moved between two plans. fails: whether a record is not there when it is
    read from a tier. stuck: whether a move does not go on, which others go past. at_once: whether a move is done as
    soon as it is submitted, where the steps before it have run: a mover is a thread of its own, and may be quicker than
    the plan that begins a load."""

    def __init__(
        self, pace: Callable[[], int] = lambda: 1 << 30, fails: Callable[[Record], bool] = lambda record: False
    ) -> None:
        self.worker: ToyWorker
        self.sender: ToySender | None = None
        self.keepers: dict[int, ToyMover] = {}  # other servers, by their ports
        self.pace, self.fails = pace, fails
        self.stuck: Callable[[Move], bool] = lambda move: False
        self.tiers: dict[tuple[str, int, object, int], Half] = {}
        self._jobs: list[_Job] = []
        self._done: list[Moved] = []
        self.brought: list[tuple[int, bytes]] = []  # of the disk, from before the start
        self.removed: list[bytes] = []
        self.num_loaded = self.num_cancelled = 0
        self.at_once = False

    def submit(self, move: Move) -> None:
        queue = getattr(self.worker, "_queue", ())
        job = _Job(move, queue[-1] if queue else None)
        loads = [i for i, other in enumerate(self._jobs) if not other.move.is_load and not other.num_halves]
        self._jobs.insert(loads[0] if move.is_load and loads else len(self._jobs), job)
        if self.at_once:
            self._advance(1 << 30)

    def finished(self) -> list[Moved]:
        self._advance(self.pace())
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> None:
        self._advance(max(1, self.pace()))

    def cancel(self, move_ids: frozenset[int]) -> None:
        for job in [job for job in self._jobs if job.move.move_id in move_ids]:
            self.num_cancelled += 1
            self._end(job)

    def remove(self, tier: str, group: int, block_hash: bytes) -> None:
        assert tier == DISK
        self.removed.append(block_hash)
        for half in range(2):
            self.tiers.pop((tier, group, block_hash, half), None)

    def kept(self, tier: str) -> list[tuple[int, bytes]]:
        return self.brought if tier == DISK else []

    def content(self, tier: str, record: Record) -> list[int]:
        """What a tier has at a record's source."""
        return [value for half in range(2) for value in self.tiers[self._key(tier, record, record.source, half)]]

    def _advance(self, num_halves: int) -> None:
        while num_halves > 0:
            job = next((job for job in self._jobs if not self.stuck(job.move)), None)
            if job is None:
                return
            if job.after is not None and job.after in getattr(self.worker, "_queue", ()):
                return
            if job.move.source == REMOTE and not self._is_found(job):
                return
            if job.move.records:
                self._move_half(job)
            num_halves -= 1
            if job.num_halves == 2 * len(job.move.records):
                self._end(job)

    def _move_half(self, job: _Job) -> None:
        index, half = divmod(job.num_halves, 2)
        job.num_halves += 1
        move, record = job.move, job.move.records[index]
        if half == 0 and move.source != DEVICE and (self.fails(record) or (move.source == REMOTE and not job.kept)):
            job.missing.add(index)
        if index in job.missing:
            return
        if move.target == DISK and record.replaces is not None and half == 0:
            self.remove(DISK, record.group, record.replaces)
        if move.source == REMOTE:
            assert job.kept is not None
            assert move.peer is not None
            slots = {(each.group, each.block_hash): each.source for each in job.kept.records}
            slot = slots[record.group, record.block_hash]
            values = self.keepers[move.peer.port]._device_half(record.group, slot, half)
        elif move.source == DEVICE:
            values = self._device_half(record.group, record.source, half)
        else:
            values = self.tiers[self._key(move.source, record, record.source, half)]
        if move.target == DEVICE:
            self._put_half(record.group, record.target, half, values)
            self.num_loaded += half
        else:
            self.tiers[self._key(move.target, record, record.target, half)] = values

    def _is_found(self, job: _Job) -> bool:
        """Whether it is known by now what another server keeps, and whether it does."""
        assert job.move.peer is not None
        keeper = self.keepers.get(job.move.peer.port)
        sender = None if keeper is None else keeper.sender
        if job.kept is None and sender is not None and (kept := sender.named(job.move.peer.key)) is not None:
            if kept.number not in sender.readable:
                return False
            job.kept = kept
        return True

    def _end(self, job: _Job) -> None:
        self._jobs.remove(job)
        num = job.num_halves // 2
        if job.move.source == REMOTE:
            assert job.move.peer is not None
            keeper = self.keepers.get(job.move.peer.port)
            sender = None if keeper is None else keeper.sender
            is_whole = job.kept is not None and num == len(job.move.records)
            if not is_whole or sender is None or not sender.take(job.kept.number):  # type: ignore[union-attr]
                num = 0
        arrived = tuple(index < num and index not in job.missing for index in range(len(job.move.records)))
        self._done.append(
            Moved(job.move.move_id, arrived, 100 * sum(arrived), 0.001 * sum(arrived), frozenset(job.missing))
        )

    @staticmethod
    def _key(tier: str, record: Record, slot: int, half: int) -> tuple[str, int, object, int]:
        return tier, record.group, record.block_hash if tier == DISK else slot, half

    def _kv(self, group: int) -> list[list[int]] | dict[int, int]:
        worker = self.worker
        by_group: list[list[list[int]] | dict[int, int]] = [[worker.target_kv, worker.drafter_kv]]
        if worker.window_kv:
            by_group.append([worker.window_kv])
        by_group.append(worker.snapshots)
        return by_group[group]

    def _slice(self, slot: int, half: int) -> slice:
        size = self.worker._config.block_size
        middle = slot * size + size // 2
        return slice(middle, (slot + 1) * size) if half else slice(slot * size, middle)

    def _device_half(self, group: int, slot: int, half: int) -> Half:
        kv = self._kv(group)
        if isinstance(kv, dict):
            return [kv[slot]] if half else []
        return [value for of_model in kv for value in of_model[self._slice(slot, half)]]

    def _put_half(self, group: int, slot: int, half: int, values: Half) -> None:
        kv = self._kv(group)
        if isinstance(kv, dict):
            if half:
                kv[slot] = values[0]
            return
        where = self._slice(slot, half)
        size = where.stop - where.start
        for number, of_model in enumerate(kv):
            of_model[where] = values[number * size : (number + 1) * size]

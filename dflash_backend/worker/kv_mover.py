"""Moves records of KV between the device, host memory and a disk, on threads of its own (`core/moves.py`).

A thread for each tier: a slow disk does not hold up host memory. A record is a row of bytes: of each tensor of its
group what lies at its slot, one after the other. On a CPU numpy copies them, which uses one core and no interpreter
lock; on a GPU the copies run on a stream of their own, which begins after the steps that were queued before.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_backend.core.moves import DEVICE, KVSender, Move, Moved, Record
from dflash_backend.core.plan import SchedulerOutput
from dflash_backend.worker.kv_cache import KVWriteError
from dflash_kernels.huge_pages import zeroed_memory

_log = logging.getLogger(__name__)

# Of a thread that copies: steps come first.
NICENESS = 10
# Seconds that all threads together have to end in.
CLOSE_WAIT_S = 10.0
# Seconds after which a load no longer waits for a record: a store that answers at all takes less.
READ_TIMEOUT_S = 5.0
# Seconds that `cancel` waits for a record that is being read.
CANCEL_WAIT_S = 0.5


class RecordStore:
    """Where records lie: bytes in, bytes out."""

    num_threads = 1
    """How many moves from or to it may run at a time."""
    bounds_reads = False
    """Whether each `read` ends in time by itself; else a load leaves one that takes `READ_TIMEOUT_S`."""

    def opened(self, move: Move) -> RecordStore:
        """What the records of a move are read from, one after the other, until `ended`."""
        return self

    def ended(self, is_whole: bool) -> bool:
        """The move has ended. is_whole: it was not stopped. Whether what was read may be used."""
        return True

    def interrupt(self) -> None:
        """Let a `read` of another thread end soon; for what is `opened`."""

    def space(self, record: Record) -> np.ndarray | None:
        """Memory that the record may be written to directly, uint8 `[size]`; None where there is none."""
        return None

    def read(self, record: Record, into: np.ndarray) -> np.ndarray | None:
        """The record at `record.source`, uint8 `[size]`, in `into` or in memory of its own; None where it is not there,
        or is not whole."""
        raise NotImplementedError

    def write(self, record: Record, data: np.ndarray) -> bool:
        """Put a record at `record.target`; False where that fails."""
        raise NotImplementedError

    def kept(self) -> list[tuple[int, bytes]]:
        """As `core.moves.KVMover.kept`."""
        return []

    def remove(self, group: int, block_hash: bytes) -> None:
        """Remove a record that is found by its hash, if it is there."""


class DeviceRecords(RecordStore):
    """The records of the device's KV cache and of its copies of recurrent states.

    groups: for each group the tensors that its records are of, `[layers, slots, ...]`, and the first slot that is
    meant by number 0.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[torch.Tensor], int]]) -> None:
        self.parts: list[list[torch.Tensor]] = [
            [tensor.view(torch.uint8).flatten(2) if tensor.dim() > 2 else _bytes_of(tensor) for tensor in tensors]
            for tensors, _ in groups
        ]
        """Of each group its tensors as bytes, uint8 `[layers, slots, bytes]`."""
        self.first = [first for _, first in groups]
        """Of each group the slot that is meant by number 0."""
        self.sizes = [sum(part.shape[0] * part.shape[2] for part in parts) for parts in self.parts]
        """Bytes of a record of each group."""
        self.device = self.parts[0][0].device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def after(self) -> torch.cuda.Event | None:
        """What a copy must wait for that begins now."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Wait for `event`, which the calling thread's copies come after."""
        if event is not None:
            event.synchronize()

    def read(self, record: Record, into: np.ndarray) -> np.ndarray:
        self._copy(record.group, record.source, into, reads=True)
        return into

    def write(self, record: Record, data: np.ndarray) -> bool:
        self._copy(record.group, record.target, data, reads=False)
        return True

    def _copy(self, group: int, slot: int, host: np.ndarray, reads: bool) -> None:
        slot += self.first[group]
        offset = 0
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            for part in self.parts[group]:
                size = part.shape[0] * part.shape[2]
                row = host[offset : offset + size].reshape(part.shape[0], part.shape[2])
                offset += size
                if self._stream is None:
                    own = part.numpy()[:, slot]
                    np.copyto(*((row, own) if reads else (own, row)))
                elif reads:
                    torch.from_numpy(row).copy_(part[:, slot], non_blocking=True)
                else:
                    part[:, slot].copy_(torch.from_numpy(row), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A vector of one number for each slot, as bytes `[1, slots, bytes]`."""
    return tensor.view(-1, 1).view(torch.uint8)[None]


class HostRecords(RecordStore):
    """Records in host memory, of each group as many as it has slots. On a GPU's machine it is pinned, so that the
    device copies by itself."""

    def __init__(self, sizes: Sequence[int], num_slots: Sequence[int], pinned: bool) -> None:
        """Raises `MemoryError` or `RuntimeError` where the system does not have as much."""
        self._chunks = [_record_chunks(size, slots, pinned) for size, slots in zip(sizes, num_slots, strict=True)]
        # Of each group the slot after the last one of each chunk.
        self._ends = [list(itertools.accumulate(map(len, chunks))) for chunks in self._chunks]

    def _at(self, group: int, slot: int) -> np.ndarray:
        number = bisect.bisect_right(self._ends[group], slot)
        chunk = self._chunks[group][number]
        return chunk[slot - self._ends[group][number] + len(chunk)]

    def space(self, record: Record) -> np.ndarray:
        return self._at(record.group, record.target)

    def read(self, record: Record, into: np.ndarray) -> np.ndarray:
        return self._at(record.group, record.source)

    def write(self, record: Record, data: np.ndarray) -> bool:
        own = self.space(record)
        if own.ctypes.data != data.ctypes.data:
            np.copyto(own, data)
        return True


def _record_chunks(size: int, num_slots: int, pinned: bool) -> list[np.ndarray]:
    """Memory for `num_slots` records of `size` bytes each, uint8 `[slots, size]`, one after the other. Pinned memory is
    given in powers of two: so are its chunks, each at most as large as what is left, but for a last record."""
    if not pinned:
        return [host_memory(size * num_slots, pinned).reshape(num_slots, size)]
    chunks: list[np.ndarray] = []
    while num_slots:
        num_bytes = 1 << (size * num_slots).bit_length() - 1
        if num_bytes < size:
            num_bytes *= 2
        count = num_bytes // size
        chunks.append(host_memory(num_bytes, pinned)[: count * size].reshape(count, size))
        num_slots -= count
    return chunks


def host_memory(num_bytes: int, pinned: bool) -> np.ndarray:
    """Memory of the host, uint8 `[num_bytes]`; pinned: for copies of a GPU. Raises as `HostRecords`."""
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return zeroed_memory(num_bytes)


@dataclass(eq=False)
class _Job:
    """A move that was submitted, and what it comes after."""

    move: Move
    after: torch.cuda.Event | None
    arrived: list[bool] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    num_bytes: int = 0
    began: float = 0.0
    is_cancelled: bool = False
    source: RecordStore | None = None
    record_since: float = 0.0
    """Since when its record is being moved (monotonic, s); 0: it is between two."""
    is_writing: bool = False
    """Whether the record's target may be written right now."""
    is_left: bool = False
    """Whether it was reported before its thread came back: that writes nothing any more."""

    def stop(self) -> None:
        """End it soon."""
        self.is_cancelled = True
        if self.source is not None:
            self.source.interrupt()


class BackgroundMover:
    """A `core.moves.KVMover`, and the threads that move."""

    def __init__(
        self,
        device: DeviceRecords,
        tiers: Mapping[str, RecordStore],
        max_bytes_s: float = 0.0,
        max_stored_bytes_s: float = 0.0,
    ) -> None:
        """tiers: by their names in moves, `REMOTE` too. max_bytes_s: bytes a second of all moves together;
        max_stored_bytes_s: of those that no request waits for; 0: no bound."""
        self._device = device
        self._stores: dict[str, RecordStore] = {DEVICE: device, **tiers}
        self._of_all, self._of_stores = _Pace(max_bytes_s), _Pace(max_stored_bytes_s)
        self.sender: KVSender | None = None
        """As `core.moves.KVMover.sender`."""
        # Guards all below; the threads and who waits for them are told of changes.
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Job]] = {name: deque() for name in tiers}
        self._running: set[_Job] = set()
        self._done: list[Moved] = []
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, args=(name,), name=f"kv-{name}", daemon=True)
            for name, store in tiers.items()
            for _ in range(store.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, move: Move) -> None:
        """As `core.moves.KVMover.submit`."""
        job = _Job(move, self._device.after())
        with self._changed:
            self._queue(self._queues[self._thread_of(move)], job)
            self._changed.notify_all()

    def finished(self) -> list[Moved]:
        """As `core.moves.KVMover.finished`."""
        if not self._done and not self._running:
            return []
        with self._changed:
            self._leave_hung()
            done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> None:
        """As `core.moves.KVMover.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout_s)

    def cancel(self, move_ids: frozenset[int]) -> None:
        """As `core.moves.KVMover.cancel`: waits for the record that is being copied, at most one for each tier, and
        `CANCEL_WAIT_S` for one that is being read."""

        def stopping() -> list[_Job]:
            return [job for job in self._running if job.move.move_id in move_ids and not job.is_left]

        with self._changed:
            for queue in self._queues.values():
                for job in [job for job in queue if job.move.move_id in move_ids]:
                    queue.remove(job)
                    self._end(job)
            for job in stopping():
                job.stop()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not stopping() or self._closing, CANCEL_WAIT_S)
            self._changed.wait_for(lambda: not any(job.is_writing for job in stopping()) or self._closing)
            for job in stopping():
                if not job.is_writing:
                    self._leave(job)

    def remove(self, tier: str, group: int, block_hash: bytes) -> None:
        """As `core.moves.KVMover.remove`."""
        self._stores[tier].remove(group, block_hash)

    def kept(self, tier: str) -> list[tuple[int, bytes]]:
        """As `core.moves.KVMover.kept`."""
        return self._stores[tier].kept()

    def check(self, plan: SchedulerOutput) -> None:
        """With `kv_write_guard`, raise `KVWriteError` where a step may write what a move is writing."""
        allowed = [plan.writable_block_ids or {}, plan.writable_window_block_ids or {}]
        with self._changed:
            jobs = [
                *(job for job in self._running if not job.is_left),
                *(job for queue in self._queues.values() for job in queue),
            ]
            for record in (record for job in jobs if job.move.is_load for record in job.move.records):
                for request_id, blocks in allowed[record.group].items() if record.group < len(allowed) else ():
                    if record.target in blocks:
                        raise KVWriteError(
                            f"kv_write_guard: step {plan.step_id}: request {request_id} may write block "
                            f"{record.target}, which is being loaded from a tier"
                        )

    def close(self) -> None:
        """End the threads, after the records that they are at. What is left is not moved. A thread whose disk hangs is
        left after `CLOSE_WAIT_S`; it ends with the process."""
        with self._changed:
            self._closing = True
            for job in self._running:
                job.stop()
            self._changed.notify_all()
        until = time.monotonic() + CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                _log.warning("the thread %s still waits for a record of KV, and is left", thread.name)

    @staticmethod
    def _queue(queue: deque[_Job], job: _Job) -> None:
        """Put a job into its thread's queue; one that was interrupted is the first of its kind."""
        # Before the first that no request waits for.
        first = next((i for i, other in enumerate(queue) if not other.move.is_awaited), len(queue))
        queue.insert(first if job.move.is_awaited or job.began else len(queue), job)

    @staticmethod
    def _thread_of(move: Move) -> str:
        """Whose thread does a move: of two tiers that of the lower one."""
        return move.source if move.is_load else move.target

    def _serve(self, name: str) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        scratch = np.empty(max(self._device.sizes), dtype=np.uint8)
        if self._device.device.type == "cuda":
            scratch = host_memory(len(scratch), pinned=True)
        queue = self._queues[name]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._closing)
                if self._closing:
                    return
                job = queue.popleft()
                self._running.add(job)
            is_done = True
            try:
                is_done = self._run(job, scratch)
            except Exception:  # noqa: BLE001 - else requests would wait for ever
                _log.exception("records of KV could not be moved from %s to %s", job.move.source, job.move.target)
            with self._changed:
                self._running.remove(job)
                if job.is_left:
                    _log.warning("%s answers again: KV is loaded from it", job.move.source)
                elif is_done:
                    self._end(job)
                else:
                    self._queue(queue, job)

    def _leave_hung(self) -> None:
        """End the loads whose record takes too long, and those behind them where no thread of the tier is left;
        `_changed` is held."""
        until = time.monotonic() - READ_TIMEOUT_S
        for name, queue in self._queues.items():
            if (store := self._stores[name]).bounds_reads:
                continue
            late = [job for job in self._running if 0 < job.record_since < until and self._thread_of(job.move) == name]
            for job in late:
                if job.move.is_load and not job.is_left and not job.is_writing:
                    self._leave(job)
            if len(late) == store.num_threads:
                for job in [job for job in queue if job.move.is_load]:
                    queue.remove(job)
                    self._end(job)

    def _leave(self, job: _Job) -> None:
        """Report a load whose record is still being read, as one that has brought nothing; `_changed` is held."""
        if job.record_since:
            _log.warning(
                "%s has not given a record of KV for %.1f s: requests compute what it keeps until it answers",
                job.move.source, time.monotonic() - job.record_since,
            )  # fmt: skip
        job.stop()
        job.is_left = True
        job.arrived, job.missing = [], set()
        self._end(job)

    def _end(self, job: _Job) -> None:
        """Report a job; `_changed` is held."""
        seconds = time.monotonic() - job.began if job.began else 0.0
        arrived = (*job.arrived, *[False] * (len(job.move.records) - len(job.arrived)))
        self._done.append(Moved(job.move.move_id, arrived, job.num_bytes, seconds, frozenset(job.missing)))
        self._changed.notify_all()

    def _run(self, job: _Job, scratch: np.ndarray) -> bool:
        """Do a move, or what is left of it; False where a load goes before the rest."""
        self._device.wait_for(job.after)
        job.began = job.began or time.monotonic()
        source = self._stores[job.move.source].opened(job.move)
        with self._changed:
            job.source = source
        is_whole = is_done = is_usable = False
        try:
            is_done = self._copy(job, source, scratch)
            is_whole = is_done and not job.is_cancelled and not self._closing
        finally:
            try:
                is_usable = source.ended(is_whole)
            finally:
                if not is_usable:
                    job.arrived, job.missing = [], set()
        return is_done

    def _copy(self, job: _Job, source: RecordStore, scratch: np.ndarray) -> bool:
        """As `_run`, from what its records are read from."""
        target = self._stores[job.move.target]
        queue = self._queues[self._thread_of(job.move)]
        for index, record in enumerate(job.move.records[len(job.arrived) :], len(job.arrived)):
            size = self._device.sizes[record.group]
            if not self._pace(job, size, queue):
                return False
            if job.is_cancelled or self._closing:
                return True
            space = target.space(record)
            with self._changed:
                job.record_since, job.is_writing = time.monotonic(), space is not None
            data = source.read(record, scratch[:size] if space is None else space)
            with self._changed:
                if job.is_left:
                    return True
                job.is_writing = True
            is_there = data is not None and target.write(record, data)
            with self._changed:
                job.record_since, job.is_writing = 0.0, False
                if data is None:
                    job.missing.add(index)
                else:
                    job.num_bytes += size
                job.arrived.append(is_there)
        return True

    def _pace(self, job: _Job, num_bytes: int, queue: deque[_Job]) -> bool:
        """Wait until a record may be moved, within the bounds; False where a load came meanwhile, which goes first."""
        paces = (self._of_all,) if job.move.is_load else (self._of_all, self._of_stores)

        def gives_way() -> bool:
            return not job.move.is_load and bool(queue) and queue[0].move.is_load

        with self._changed:
            wait_s = max(pace.free_at for pace in paces) - time.monotonic()
            if wait_s > 0:
                self._changed.wait_for(lambda: job.is_cancelled or self._closing or gives_way(), wait_s)
            if gives_way():
                return False
            for pace in paces:
                pace.take(num_bytes)
        return True


class _Pace:
    """When the next record may begin, so that no more than `max_bytes_s` bytes a second are moved; 0: at once."""

    def __init__(self, max_bytes_s: float) -> None:
        self.max_bytes_s = max_bytes_s
        self.free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """A record of that many bytes begins."""
        if self.max_bytes_s:
            self.free_at = max(time.monotonic(), self.free_at) + num_bytes / self.max_bytes_s

"""The mover keeps the bounds that it is given, and what a request waits for goes before what nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dflash_backend.core.moves import DEVICE, DISK, HOST, REMOTE, Move, Moved, Record
from dflash_backend.worker import kv_mover
from dflash_backend.worker.kv_mover import BackgroundMover, DeviceRecords, HostRecords
from dflash_backend.worker.kv_transfer import RemoteRecords

SIZE = 1000
NUM_RECORDS = 8


def records(count: int) -> tuple[Record, ...]:
    return tuple(Record(0, bytes([number]) * 32, number, number) for number in range(count))


@pytest.fixture
def slow_stores() -> Iterator[BackgroundMover]:
    """A mover of 8 records that takes an hour for each that it stores."""
    device = DeviceRecords([((torch.zeros((1, NUM_RECORDS, SIZE), dtype=torch.uint8),), 0)])
    mover = BackgroundMover(device, {HOST: HostRecords([SIZE], [NUM_RECORDS], False)}, 0.0, SIZE / 3600)
    yield mover
    mover.close()


def test_a_bound_of_stores_holds_up_stores_alone(slow_stores: BackgroundMover) -> None:
    """Also a load that comes while a store waits for its turn, which goes on after it where it was."""
    slow_stores.submit(Move(1, DEVICE, HOST, records(1)))  # the first begins at once
    slow_stores.wait(10.0)
    assert [each.move_id for each in slow_stores.finished()] == [1]
    slow_stores.submit(Move(2, DEVICE, HOST, records(2)))
    for move_id in (3, 4):
        slow_stores.submit(Move(move_id, HOST, DEVICE, records(NUM_RECORDS)))
        slow_stores.wait(10.0)
        (loaded,) = slow_stores.finished()
        assert (loaded.move_id, loaded.num_bytes) == (move_id, NUM_RECORDS * SIZE)
    slow_stores._of_stores.free_at = 0.0
    slow_stores.submit(Move(5, HOST, DEVICE, records(1)))  # and lets the store look at the clock again
    slow_stores.wait(10.0)
    assert slow_stores.finished()[0].move_id == 5
    slow_stores.wait(0.05)
    assert slow_stores.finished() == []
    slow_stores.cancel(frozenset({2}))
    (stored,) = slow_stores.finished()
    assert (stored.move_id, stored.arrived) == (2, (True, False))


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_takes_no_more_than_its_records_and_each_has_its_own_bytes(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory is given in powers of two: a chunk of any other size would take up to twice as much."""
    sizes, counts, asked = (1000, 24, 4096), (1100, 33, 7), []

    def memory(num_bytes: int, is_pinned: bool) -> np.ndarray:
        assert is_pinned == pinned
        asked.append(1 << (num_bytes - 1).bit_length() if pinned else num_bytes)
        return np.zeros(num_bytes, np.uint8)

    monkeypatch.setattr(kv_mover, "host_memory", memory)
    store = HostRecords(sizes, counts, pinned)
    wanted = sum(size * count for size, count in zip(sizes, counts, strict=True))
    assert wanted <= sum(asked) <= wanted + (12 * sum(sizes) if pinned else 0)
    generator = np.random.default_rng(1)
    places = [(group, slot) for group, count in enumerate(counts) for slot in range(count)]
    written = {place: generator.integers(0, 256, sizes[place[0]], dtype=np.uint8) for place in places}
    for group, slot in places:
        assert store.write(Record(group, b"", 0, slot), written[group, slot])
    for group, slot in places:
        assert np.array_equal(store.read(Record(group, b"", slot, 0), np.empty(0, np.uint8)), written[group, slot])


class BehindSteps(DeviceRecords):
    """Whose steps that were queued before a move take a while."""

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        time.sleep(0.3)


def test_a_move_does_not_count_the_time_of_the_steps_before_it() -> None:
    device = BehindSteps([((torch.zeros((1, NUM_RECORDS, SIZE), dtype=torch.uint8),), 0)])
    mover = BackgroundMover(device, {HOST: HostRecords([SIZE], [NUM_RECORDS], False)})
    mover.submit(Move(1, HOST, DEVICE, records(2)))
    mover.wait(10.0)
    (moved,) = mover.finished()
    assert moved.arrived == (True, True)
    assert 0 < moved.seconds < 0.2
    mover.close()


class Slow(HostRecords):
    """Whose moves end once they may."""

    def __init__(self) -> None:
        super().__init__([SIZE], [NUM_RECORDS], False)
        self.may_end = threading.Event()

    def ended(self, is_whole: bool) -> bool:
        return self.may_end.wait(10.0)


def test_what_a_request_waits_for_goes_before_what_another_server_is_told() -> None:
    device = DeviceRecords([((torch.zeros((1, NUM_RECORDS, SIZE), dtype=torch.uint8),), 0)])
    mover = BackgroundMover(device, {REMOTE: (store := Slow())})
    for move_id in (1, 2, 3):
        mover.submit(Move(move_id, REMOTE, DEVICE, ()))
    mover.submit(Move(4, REMOTE, DEVICE, records(1)))
    store.may_end.set()
    done: list[int] = []
    while len(done) < 4:
        mover.wait(10.0)
        done += [moved.move_id for moved in mover.finished()]
    assert done.index(4) < done.index(2) < done.index(3)
    mover.close()


class Unconfirmed(HostRecords):
    """Of which nobody can say in the end whether it may be used."""

    def ended(self, is_whole: bool) -> bool:
        raise RuntimeError("no word")


def test_what_a_source_cannot_confirm_has_not_arrived() -> None:
    device = DeviceRecords([((torch.zeros((1, NUM_RECORDS, SIZE), dtype=torch.uint8),), 0)])
    mover = BackgroundMover(device, {HOST: Unconfirmed([SIZE], [NUM_RECORDS], False)})
    mover.submit(Move(1, HOST, DEVICE, records(2)))
    mover.wait(10.0)
    (moved,) = mover.finished()
    assert moved.arrived == (False, False)
    mover.close()


class Hung(HostRecords):
    """Whose reads wait for `may_end`, as those of a disk that does not answer; with `answers_first` not the first."""

    def __init__(self) -> None:
        super().__init__([SIZE], [NUM_RECORDS], False)
        self.is_read, self.may_end = threading.Event(), threading.Event()
        self.answers_first = False

    def read(self, record: Record, into: np.ndarray) -> np.ndarray:
        if self.answers_first and record.source == 0:
            return super().read(record, into)
        self.is_read.set()
        self.may_end.wait(10.0)
        return super().read(record, into)


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_mover, "CLOSE_WAIT_S", 0.05)
    device = DeviceRecords([((torch.zeros((1, NUM_RECORDS, SIZE), dtype=torch.uint8),), 0)])
    mover = BackgroundMover(device, {DISK: (store := Hung())})
    mover.submit(Move(1, DISK, DEVICE, records(1)))
    assert store.is_read.wait(5.0)
    began = time.monotonic()
    mover.close()
    assert time.monotonic() - began < 5.0
    assert "the thread kv-disk still waits" in caplog.text
    store.may_end.set()


def hung_mover() -> tuple[BackgroundMover, Hung, torch.Tensor]:
    """A mover whose disk hangs, that disk, and what the device has."""
    device_kv = torch.zeros((1, NUM_RECORDS, SIZE), dtype=torch.uint8)
    store = Hung()
    for record in records(NUM_RECORDS):
        store.write(record, np.full(SIZE, 1 + record.target, np.uint8))
    return BackgroundMover(DeviceRecords([((device_kv,), 0)]), {DISK: store}), store, device_kv


def finished_in(mover: BackgroundMover, timeout_s: float) -> list[Moved]:
    """What has ended as soon as something has; the engine looks as often."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if done := mover.finished():
            return done
        mover.wait(0.005)
    return []


def test_a_load_is_cancelled_while_its_disk_hangs_and_writes_nothing_later() -> None:
    mover, store, device_kv = hung_mover()
    mover.submit(Move(1, DISK, DEVICE, records(2)))
    assert store.is_read.wait(5.0)
    began = time.monotonic()
    mover.cancel(frozenset({1}))
    assert time.monotonic() - began < 5.0
    (moved,) = mover.finished()
    assert (moved.move_id, moved.arrived, moved.missing) == (1, (False, False), frozenset())
    mover.submit(Move(2, DISK, DEVICE, records(NUM_RECORDS)[4:5]))  # after it, on the same thread
    store.may_end.set()
    (moved,) = finished_in(mover, 10.0)
    assert (moved.move_id, moved.arrived) == (2, (True,))
    assert device_kv.flatten(1).sum() == 5 * SIZE, "the load that was cancelled has written nothing"
    mover.close()


def test_loads_end_where_a_disk_hangs_and_are_made_again_once_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that wait for its thread, and those that come later."""
    mover, store, device_kv = hung_mover()
    mover.submit(Move(1, DISK, DEVICE, records(2)))
    mover.submit(Move(2, DISK, DEVICE, records(NUM_RECORDS)[2:3]))
    assert store.is_read.wait(5.0)
    assert mover.finished() == [], "it has its time"
    monkeypatch.setattr(kv_mover, "READ_TIMEOUT_S", 0.05)
    done = finished_in(mover, 5.0)
    assert {moved.move_id: (moved.arrived, moved.missing) for moved in done} == {
        1: ((False, False), frozenset()),
        2: ((False,), frozenset()),
    }
    assert "disk has not given a record of KV" in caplog.text
    mover.submit(Move(3, DISK, DEVICE, records(NUM_RECORDS)[3:4]))
    assert [(moved.move_id, moved.arrived) for moved in finished_in(mover, 5.0)] == [(3, (False,))]
    store.may_end.set()
    until = time.monotonic() + 10.0
    while "disk answers again" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    mover.submit(Move(4, DISK, DEVICE, records(NUM_RECORDS)[4:5]))
    assert [(moved.move_id, moved.arrived) for moved in finished_in(mover, 10.0)] == [(4, (True,))]
    assert device_kv.flatten(1).sum() == 5 * SIZE, "what has ended has written nothing"
    mover.close()


def test_a_store_that_hangs_ends_the_loads_behind_it_and_not_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_mover, "READ_TIMEOUT_S", 0.1)
    may_end = threading.Event()

    class HungWrites(HostRecords):
        def space(self, record: Record) -> None:
            return None

        def write(self, record: Record, data: np.ndarray) -> bool:
            return may_end.wait(10.0)

    device = DeviceRecords([((torch.zeros((1, NUM_RECORDS, SIZE), dtype=torch.uint8),), 0)])
    mover = BackgroundMover(device, {DISK: HungWrites([SIZE], [NUM_RECORDS], False)})
    mover.submit(Move(1, DEVICE, DISK, records(1)))
    mover.wait(0.05)
    mover.submit(Move(2, DISK, DEVICE, records(1)))
    assert [(moved.move_id, moved.arrived) for moved in finished_in(mover, 5.0)] == [(2, (False,))]
    may_end.set()
    assert [(moved.move_id, moved.arrived) for moved in finished_in(mover, 10.0)] == [(1, (True,))]
    mover.close()


def test_a_store_that_bounds_its_reads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another server, whose prompt may still be computed."""
    monkeypatch.setattr(kv_mover, "READ_TIMEOUT_S", 0.01)
    monkeypatch.setattr(Hung, "bounds_reads", True)
    mover, store, _ = hung_mover()
    mover.submit(Move(1, DISK, DEVICE, records(1)))
    assert store.is_read.wait(5.0)
    time.sleep(0.05)
    assert mover.finished() == []
    store.may_end.set()
    assert [(moved.move_id, moved.arrived) for moved in finished_in(mover, 10.0)] == [(1, (True,))]
    assert RemoteRecords.bounds_reads
    mover.close()


def test_what_came_before_a_load_was_given_up_is_not_used() -> None:
    """Of some sources only the end says whether what was read may be used."""
    mover, store, _ = hung_mover()
    store.answers_first = True
    mover.submit(Move(1, DISK, DEVICE, records(3)))
    assert store.is_read.wait(5.0)
    mover.cancel(frozenset({1}))
    (moved,) = mover.finished()
    assert (moved.arrived, moved.num_bytes) == ((False, False, False), SIZE)
    store.may_end.set()
    mover.close()

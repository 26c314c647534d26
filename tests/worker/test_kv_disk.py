"""Files of KV are never trusted: what is torn, damaged or another's is not used, whatever is wrong with it."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_backend.core.moves import Record
from dflash_backend.worker import kv_disk
from dflash_backend.worker.kv_disk import OVERHEAD_BYTES, DiskError, DiskRecords
from tests.support.scale import SCALE

SIZES = (1000, 24)
OURS, FOREIGN = b"f" * 32, b"g" * 32
NUM_FILES = 1000 if SCALE >= 4 else 100


def record(number: int, group: int = 0, replaces: int | None = None) -> Record:
    """A record of our own, by number."""
    return Record(group, _hash(number), 0, 0, None if replaces is None else _hash(replaces))


def _hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data(number: int, group: int = 0) -> np.ndarray:
    """What a record holds."""
    return np.random.default_rng(number).integers(0, 256, SIZES[group], dtype=np.uint8)


def read(records: DiskRecords, number: int, group: int = 0) -> np.ndarray | None:
    return records.read(record(number, group), np.zeros(SIZES[group], np.uint8))


@pytest.fixture
def records(tmp_path: Path) -> DiskRecords:
    return DiskRecords(tmp_path, OURS, SIZES)


def test_what_was_written_is_read_also_after_a_restart(records: DiskRecords, tmp_path: Path) -> None:
    for number in range(5):
        assert records.write(record(number, number % 2), data(number, number % 2))
        os.utime(records._path(number % 2, _hash(number)), (100 - number, 100 - number))
    records.close()
    again = DiskRecords(tmp_path, OURS, SIZES)
    assert again.folder == records.folder
    assert again.kept() == [(number % 2, _hash(number)) for number in reversed(range(5))]  # the oldest first
    for number in range(5):
        found = read(again, number, number % 2)
        assert found is not None
        assert np.array_equal(found, data(number, number % 2))
    assert again.write(record(9, replaces=2), data(9))
    assert read(again, 2) is None
    assert oct(os.stat(again._path(0, _hash(9))).st_mode)[-3:] == "600"


def _flip(path: Path, rng: random.Random) -> None:
    whole = bytearray(path.read_bytes())
    whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    path.write_bytes(whole)


def _of_another_block(path: Path, rng: random.Random) -> None:
    others = [each for each in path.parent.glob("*.0") if each != path and each.is_file()]
    path.write_bytes(rng.choice(others).read_bytes() if others else b"")


def _of_another_model(path: Path, rng: random.Random) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole.replace(OURS, FOREIGN))


def _is_a_link(path: Path, rng: random.Random) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _is_a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _is_a_pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: tuple[Callable[[Path, random.Random], object], ...] = (
    _flip,
    _flip,
    _of_another_block,
    _of_another_model,
    _is_a_link,
    _is_a_folder,
    _is_a_pipe,
    lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
    lambda path, rng: os.truncate(path, path.stat().st_size + rng.randrange(1, 5000)),
    lambda path, rng: path.write_bytes(rng.randbytes(path.stat().st_size)),
    lambda path, rng: path.write_bytes(b""),
    lambda path, rng: path.unlink(),
)


def test_damaged_files_are_not_used_whether_they_are_found_at_the_start_or_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is damaged before a start or while the engine runs."""
    rng = random.Random(4)
    records = DiskRecords(tmp_path, OURS, SIZES)
    for number in range(NUM_FILES):
        assert records.write(record(number), data(number))
    later = []
    for number in range(0, NUM_FILES, 2):
        path = Path(records._path(0, _hash(number)))
        if rng.random() < 0.5:
            rng.choice(DAMAGES)(path, rng)
        else:
            later.append((path, rng.choice(DAMAGES)))
    for name in ("notes.txt", "0123.0", f"{'0' * 64}.0.bak", f"{'a' * 64}.0.tmp"):
        (records.folder / name).write_bytes(b"x")
    records.close()
    again = DiskRecords(tmp_path, OURS, SIZES)
    found = {block_hash for _, block_hash in again.kept()}
    assert {_hash(number) for number in range(1, NUM_FILES, 2)} <= found
    assert (again.folder / "notes.txt").exists()
    assert not (again.folder / f"{'a' * 64}.0.tmp").exists()
    for path, damage in later:
        damage(path, rng)
    for number in range(NUM_FILES):
        got = read(again, number)
        if number % 2:
            assert got is not None
            assert np.array_equal(got, data(number))
        else:
            assert got is None, f"file {number} is used"
            assert again.write(record(number), data(number)) or Path(again._path(0, _hash(number))).is_dir()
    text = caplog.text
    assert "are not ours and are left alone" in text
    assert "its checksum differs" in text
    assert len(caplog.records) < 15, "a line for each kind of trouble, not for each file"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_record_that_cannot_be_written_is_lost_and_nothing_of_it_stays(
    records: DiskRecords, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        assert not records.write(record(1), data(1))
        assert not records.write(record(2), data(2))
    assert os.listdir(records.folder) == ["lock"]
    assert caplog.text.count(os.strerror(number)) == 1
    assert records.write(record(1), data(1))
    with monkeypatch.context() as patch:
        patch.setattr("os.fstat", fail)
        assert read(records, 1) is None


def test_a_pipe_in_a_files_place_is_not_waited_for(records: DiskRecords) -> None:
    os.mkfifo(f"{records._path(0, record(1).block_hash)}.tmp")
    writing = threading.Thread(target=lambda: records.write(record(1), data(1)), daemon=True)
    writing.start()
    writing.join(5.0)
    assert not writing.is_alive()
    assert records.write(record(1), data(1))


def test_engines_at_the_same_path_have_folders_of_their_own(records: DiskRecords, tmp_path: Path) -> None:
    other, foreign = DiskRecords(tmp_path, OURS, SIZES), DiskRecords(tmp_path, FOREIGN, SIZES)
    assert len({records.folder, other.folder, foreign.folder}) == 3
    assert records.write(record(1), data(1))
    assert other.kept() == foreign.kept() == []


def test_what_no_engine_uses_is_bounded_and_the_longest_unused_goes_first(records: DiskRecords, tmp_path: Path) -> None:
    """Two folders of other models, of which an engine has the second, and our own."""
    size = SIZES[0] + OVERHEAD_BYTES
    foreign = DiskRecords(tmp_path, FOREIGN, SIZES)
    in_use = DiskRecords(tmp_path, b"h" * 32, SIZES)
    for each in (records, foreign, in_use):
        for number in range(4):
            assert each.write(record(number), data(number))
            os.utime(each._path(0, _hash(number)), (100 + number, 100 + number))
    (foreign.folder / "notes").write_text("not ours")
    foreign.close()
    other = DiskRecords(tmp_path, OURS, SIZES, max_other_bytes=2.5 * size)
    assert other.folder.name == "1"
    assert sorted(each.name[:64] for each in foreign.folder.glob("*.0")) == [_hash(2).hex(), _hash(3).hex()]
    assert (foreign.folder / "notes").exists()
    assert len(in_use.kept()) == len(records.kept()) == 4
    in_use.close()
    DiskRecords(tmp_path, OURS, SIZES, max_other_bytes=0.0)
    assert not list(foreign.folder.glob("*.0"))
    assert not list(in_use.folder.glob("*.0"))
    assert len(records.kept()) == 4


def warm(path: Path, count: int) -> None:
    """Folders of engines that have ended, each with a record of its number."""
    engines = [DiskRecords(path, OURS, SIZES) for _ in range(count)]
    for number, each in enumerate(engines):
        assert each.write(record(number), data(number))
        each.close()


def test_an_engine_that_starts_while_another_looks_through_all_folders_finds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(tmp_path, 2)
    looks, may_go_on, found = threading.Event(), threading.Event(), kv_disk._records_in

    def slow(folder: Path) -> list[tuple[float, int, str]]:
        looks.set()
        may_go_on.wait(10.0)
        return found(folder)

    monkeypatch.setattr(kv_disk, "_records_in", slow)
    started: list[DiskRecords] = []

    def start() -> None:
        started.append(DiskRecords(tmp_path, OURS, SIZES))

    threads = [threading.Thread(target=start) for _ in range(2)]
    threads[0].start()
    assert looks.wait(5.0)
    threads[1].start()
    threads[1].join(0.1)
    may_go_on.set()
    for thread in threads:
        thread.join(10.0)
    assert [each.folder.name for each in started] == ["0", "1"]
    assert [each.kept() for each in started] == [[(0, _hash(0))], [(0, _hash(1))]]


def test_an_engine_does_not_wait_for_ever_for_another_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_disk, "START_WAIT_S", 0.05)
    with kv_disk._alone(tmp_path) as is_alone:
        assert is_alone
        assert DiskRecords(tmp_path, OURS, SIZES, max_other_bytes=0.0).folder.name == "0"


def test_the_first_of_engines_that_start_together_leaves_the_others_folders(tmp_path: Path) -> None:
    warm(tmp_path, 3)
    first = DiskRecords(tmp_path, OURS, SIZES, max_other_bytes=0.0, num_engines=2)
    second = DiskRecords(tmp_path, OURS, SIZES, max_other_bytes=0.0, num_engines=2)
    assert [len(each.kept()) for each in (first, second)] == [1, 1]
    assert not list((first.folder.parent / "2").glob("*.0")), "a third one does not start any more"


def test_a_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / f"kv-{'a' * 32}"
    other.mkdir(mode=0o700)
    iterdir = Path.iterdir

    def is_ours(path: Path) -> Iterator[Path]:
        if path == other:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", is_ours)
    records = DiskRecords(tmp_path, OURS, SIZES, max_other_bytes=0.0)
    assert records.folder.is_dir()
    assert other.is_dir()
    records.close()


def test_a_folder_that_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"/0 cannot be used: Not a directory"):
        DiskRecords(tmp_path / "file", OURS, SIZES)


WRITER = """
import sys
from pathlib import Path
from tests.worker.test_kv_disk import *
records = DiskRecords(Path(sys.argv[1]), OURS, SIZES)
print("ready", flush=True)
number = 0
while True:
    records.write(record(number), data(number))
    number += 1
"""


@pytest.mark.nightly
def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(tmp_path: Path) -> None:
    for round_number in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 * round_number)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        records = DiskRecords(tmp_path, OURS, SIZES)
        assert records.folder.name == "0"
        kept = records.kept()
        for group, block_hash in kept:
            number = int.from_bytes(block_hash, "big")
            found = read(records, number, group)
            assert found is not None
            assert np.array_equal(found, data(number))
        assert not list(records.folder.glob("*.tmp"))
        records.close()
    assert len(kept) > 10


@pytest.fixture(autouse=True)
def warnings_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

"""Records of KV in files, one each, which survive a restart and are never trusted.

A folder belongs to one engine of one model with its settings: the fingerprint of these is in the folder's name and in
each file, and a lock says that an engine uses it. A file is written under another name first, so that one which is torn
has not the right name but after a crash of the machine; a checksum over all of it finds that, and any other damage.
What is not as it should be is not used, is removed if its name is ours, and is in the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from dflash_backend.core.moves import Record
from dflash_backend.worker.kv_mover import RecordStore

_log = logging.getLogger(__name__)

_MAGIC = b"DFKV0001"
# The magic, the fingerprint, the block's hash, the group's number and the length of the record.
_HEADER = struct.Struct("<8s32s32sIQ")
_DIGEST_BYTES = 32
OVERHEAD_BYTES = _HEADER.size + _DIGEST_BYTES
"""Bytes of a file beside its record."""
_NAME = re.compile(r"([0-9a-f]{64})\.(\d{1,2})")
_FOLDER_NAME = re.compile(r"kv-[0-9a-f]{32}")
# A line in the log for each kind of trouble, this often at most.
LOG_EVERY_S = 60.0
# Engines that share a path at most.
MAX_ENGINES = 64
# Seconds that an engine waits for others that start at the same path, and between two looks.
START_WAIT_S, START_LOOK_S = 60.0, 0.02


class DiskError(Exception):
    """The folder cannot be used; the message says why."""


class DiskRecords(RecordStore):
    """Records in a folder of files, found by their hashes."""

    def __init__(
        self,
        path: Path,
        fingerprint: bytes,
        sizes: Sequence[int],
        max_other_bytes: float = float("inf"),
        num_engines: int = 1,
    ) -> None:
        """path: where folders are made. fingerprint: 32 bytes; sizes: bytes of a record of each group.
        max_other_bytes: of the files that no engine uses, of other fingerprints or engines; the oldest are removed now.
        num_engines: that start together with this fingerprint, whose folders stay as they are. Raises `DiskError`."""
        self._fingerprint = fingerprint
        self._sizes = list(sizes)
        self._logged: dict[str, tuple[float, int]] = {}
        base = path / f"kv-{fingerprint.hex()[:32]}"
        # Else an engine that starts meanwhile would find folders locked that no engine uses.
        with _alone(path) as is_alone:
            self.folder, self._lock = _own_folder(base)
            if is_alone:
                _bound_others(
                    path, {base / str(number) for number in range(num_engines)} | {self.folder}, max_other_bytes
                )

    def close(self) -> None:
        """Let another engine have the folder."""
        os.close(self._lock)

    def kept(self) -> list[tuple[int, bytes]]:
        """As `core.moves.KVMover.kept`. Only names and lengths are looked at: what a file holds shows when it is
        read."""
        found: list[tuple[float, int, bytes]] = []
        num_others = num_damaged = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    if entry.name.endswith(".tmp"):  # of a process that was killed
                        self._unlink(entry.path)
                    num_others += entry.name != "lock" and not entry.name.endswith(".tmp")
                    continue
                group = int(match[2])
                with contextlib.suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    whole = group < len(self._sizes) and stat.st_size == self._sizes[group] + OVERHEAD_BYTES
                    if entry.is_file(follow_symlinks=False) and whole:
                        found.append((stat.st_mtime, group, bytes.fromhex(match[1])))
                        continue
                num_damaged += 1
                self._unlink(entry.path)
        if num_others or num_damaged:
            _log.warning(
                "kv_disk_path: of the files in %s %d are not ours and are left alone, and %d are not whole and are "
                "removed",
                self.folder, num_others, num_damaged,
            )  # fmt: skip
        return [(group, block_hash) for _, group, block_hash in sorted(found)]

    def remove(self, group: int, block_hash: bytes) -> None:
        """Remove a record, if it is there."""
        self._unlink(self._path(group, block_hash))

    def read(self, record: Record, into: np.ndarray) -> np.ndarray | None:
        path = self._path(record.group, record.block_hash)
        try:
            why = self._read(path, record, into)
        except OSError as error:
            why = error.strerror or str(error)
        if why is None:
            return into
        self._note("is not used", path, why)
        self._unlink(path)
        return None

    def _read(self, path: str, record: Record, into: np.ndarray) -> str | None:
        """Read a file; what is wrong with it, None if nothing is."""
        header, digest = bytearray(_HEADER.size), bytearray(_DIGEST_BYTES)
        with open(path, "rb", opener=_opened) as file:
            if os.fstat(file.fileno()).st_size != len(into) + OVERHEAD_BYTES:
                return "it has another length"
            if any(file.readinto(part) < len(part) for part in (header, into.data, digest)):
                return "it ends early"
            if bytes(header) != self._header(record):
                return "it is of another model, setting or block"
            if _digest(header, into) != digest:
                return "its checksum differs"
            os.utime(file.fileno())  # the oldest are the first to go, also after a restart
        return None

    def write(self, record: Record, data: np.ndarray) -> bool:
        if record.replaces is not None:
            self.remove(record.group, record.replaces)
        path = self._path(record.group, record.block_hash)
        temporary = f"{path}.tmp"
        header = self._header(record)
        try:
            digest = _digest(header, data)
            with open(temporary, "wb", opener=_opened) as file:
                file.writelines((header, data.data, digest))
            os.replace(temporary, path)
        except OSError as error:
            self._note("could not be written", path, error.strerror or str(error))
            self._unlink(temporary)
            return False
        return True

    def _path(self, group: int, block_hash: bytes) -> str:
        return f"{self.folder}/{block_hash.hex()}.{group}"

    def _header(self, record: Record) -> bytes:
        size = self._sizes[record.group]
        return _HEADER.pack(_MAGIC, self._fingerprint, record.block_hash, record.group, size)

    @staticmethod
    def _unlink(path: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)

    def _note(self, what: str, path: str, why: str) -> None:
        """A line for the first file of a kind of trouble, and then one a minute with how many there were."""
        now = time.monotonic()
        at, count = self._logged.get(why, (-LOG_EVERY_S, 0))
        if now - at < LOG_EVERY_S:
            self._logged[why] = at, count + 1
            return
        self._logged[why] = now, 0
        more = f", as {count} before it" if count else ""
        _log.warning("kv_disk_path: %s %s%s: %s", path, what, more, why)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Let no other engine choose a folder under `path` or look through all of them meanwhile. Yields False where that
    cannot be had: another engine takes long, or the lock is another user's."""
    descriptor = None
    is_alone = False
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + START_WAIT_S
        while not is_alone and time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
            except BlockingIOError:
                time.sleep(START_LOOK_S)
    try:
        yield is_alone
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _own_folder(base: Path) -> tuple[Path, int]:
    """The first folder under `base` that no other engine uses, and the descriptor that keeps it ours."""
    for number in range(MAX_ENGINES):
        folder = base / str(number)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskError(f"{folder} cannot be used: {error.strerror or error}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError as error:
            os.close(descriptor)
            raise DiskError(f"{folder} cannot be locked: {error.strerror or error}") from None
        return folder, descriptor
    raise DiskError(f"{MAX_ENGINES} engines use {base} already")


def _bound_others(path: Path, but: Collection[Path], max_bytes: float) -> None:
    """Remove records of folders that no engine uses, without those in `but`, the longest unused first, until
    `max_bytes` are left. Files that are not ours stay, and so do folders and their locks."""
    found: list[tuple[float, int, str]] = []
    locks: list[int] = []
    try:
        bases = [base for base in _folders_in(path) if _FOLDER_NAME.fullmatch(base.name) is not None]
        for base in bases:
            for folder in _folders_in(base):
                if folder in but:
                    continue
                with contextlib.suppress(OSError):  # another engine's, or not ours to read
                    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                    locks.append(descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_NB | fcntl.LOCK_EX)
                    found += _records_in(folder)
        left = sum(size for _, size, _ in found)
        num_removed = 0
        for _, size, name in sorted(found):
            if left <= max_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(name)
                num_removed += 1
            left -= size
        if num_removed:
            _log.info("kv_disk_path: %d files of other models, settings or engines are removed", num_removed)
    finally:
        for descriptor in locks:
            os.close(descriptor)


def _folders_in(path: Path) -> list[Path]:
    """Its folders; none where it is not ours to read, or gone."""
    with contextlib.suppress(OSError):
        return [folder for folder in path.iterdir() if not folder.is_symlink() and folder.is_dir()]
    return []


def _records_in(folder: Path) -> list[tuple[float, int, str]]:
    """Time of last use, bytes and path of each file whose name is a record's."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(".tmp")
            if _NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                found.append((stat.st_mtime, stat.st_size, entry.path))
    return found


def _digest(header: bytes | bytearray, data: np.ndarray) -> bytes:
    """The checksum of a file."""
    digest = hashlib.sha256(header)
    digest.update(data.data)
    return digest.digest()


def _opened(path: str, flags: int) -> int:
    """For `open`: a file, readable by its owner alone; no link is followed, and a pipe is not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)

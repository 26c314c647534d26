"""Prompts and answers that a server writes down where the setting `record_traffic` names a folder, and that
`dflash-triton train --traffic` reads.

A file's first line names the target and its tokenizer by digests. Each further line is a prompt and an answer as token
ids, and the temperature. Files are for their owner alone, since they hold what people wrote. A line without its line
break was cut off by the end of a server, or is being written: it is no row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

VERSION = 1
PATTERN = "traffic-*.jsonl"
CONFIG = "config.json"
FILES = 16
"""The bound on all files together is this many times what one file grows to."""
MAX_WAITING = 256
"""Rows that may wait for the disk; what comes beyond is dropped."""
RETRY_S = 10.0
CLOSE_S = 2.0
# Of a file of weights its first bytes and this many pieces from all over it tell fine-tunes from each other.
HEAD_BYTES, NUM_PIECES, PIECE_BYTES = 1 << 20, 256, 4096
RECORDED, RECORDED_BYTES = "dflash:traffic_recorded_total", "dflash:traffic_recorded_bytes_total"
DROPPED = "dflash:traffic_dropped_total"
BUSY, DISK, LARGE = "busy", "disk", "large"


class TrafficError(ValueError):
    """A folder of traffic cannot be read or written. The message says why."""


class Header(msgspec.Struct, frozen=True):
    """The first line of a file: its version, and the digests of the target that answered and of its tokenizer."""

    traffic: int
    target: str
    tokenizer: str


class Row(msgspec.Struct, frozen=True):
    """A prompt and what the target answered, with the token that ended it, as token ids."""

    prompt: list[int]
    answer: list[int]
    temperature: float


Line = TypeVar("Line", Header, Row)


def target_digest(target: Path) -> str:
    """32 hexadecimal digits that differ between targets, fine-tunes of each other too, and not between copies of one.
    target: its folder, or its GGUF file. Raises `OSError`."""
    return _digest(target, ("*.safetensors", "*.gguf", CONFIG))


def tokenizer_digest(target: Path) -> str:
    """The same of its tokenizer alone. Raises `OSError`."""
    return _digest(target, ("tokenizer.json", "*.gguf"))


def _digest(target: Path, patterns: Sequence[str]) -> str:
    files = [target] if target.is_file() else sorted(each for name in patterns for each in target.glob(name))
    digest = hashlib.sha256()
    for path in files:
        if path.name == CONFIG and (config := _without_source(path)) is not None:
            digest.update(f"{CONFIG} {len(config)}\n".encode() + config)
            continue
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{'' if path == target else path.name} {size}\n".encode())
            digest.update(file.read(HEAD_BYTES))
            for piece in range(NUM_PIECES if size > HEAD_BYTES else 0):
                file.seek(piece * (size - PIECE_BYTES) // (NUM_PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:32]


def _without_source(path: Path) -> bytes | None:
    """The config of a target that was converted from a GGUF file, without what says where that lies; None of another
    one. Raises `OSError`."""
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.pop("gguf", None) is None:
        return None
    return json.dumps(fields, sort_keys=True).encode()


class TrafficWriter:
    """Writes rows on a thread of its own: `offer` never waits. What the disk does not take is dropped and counted."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        rate: float,
        max_bytes: int,
        count: Callable[[str, float, str], None],
        warn: Callable[[str], None],
    ) -> None:
        """rate: the share of requests that are wanted. max_bytes: of all files in `folder`, other servers' too, of
        which the oldest go. count: takes a metric's name, an amount and a label. Raises `TrafficError` for a folder
        that cannot be written."""
        self._folder, self._target = folder, target
        self._rate, self._max_bytes = rate, max_bytes
        self._count, self._warn = count, warn
        self._random = random.Random()
        self._waiting: queue.Queue[Row | None] = queue.Queue(MAX_WAITING)
        self._file = -1
        self._path = folder
        self._name, self._num_files = f"{os.getpid()}-{secrets.token_hex(4)}", 0
        self._header = b""
        self._retry_at: float | None = None
        if folder.exists() and not folder.is_dir():
            raise TrafficError(f"{folder} is a file; name a folder")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise TrafficError(
                f"{folder} cannot be written: {error.strerror or error}; name a folder that the server may write to, "
                "or leave it empty"
            ) from None
        self._thread = threading.Thread(target=self._run, name="dflash-traffic", daemon=True)
        self._thread.start()

    def wants(self) -> bool:
        """Whether to write the next request down, by chance."""
        return self._random.random() < self._rate

    def offer(self, row: Row) -> None:
        """Write a row down, later."""
        try:
            self._waiting.put_nowait(row)
        except queue.Full:
            self._count(DROPPED, 1, BUSY)

    def close(self) -> None:
        """Write what waits, for a moment at most."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (row := self._waiting.get()) is not None:
            self._write(row)
        self._end_file()

    def _write(self, row: Row) -> None:
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            self._count(DROPPED, 1, DISK)
            return
        line = msgspec.json.encode(row) + b"\n"
        try:
            is_written = self._append(line)
        except OSError as error:
            if self._retry_at is None:
                self._warn(
                    f"record_traffic: {self._path} cannot be written: {error.strerror or error}; answers are not "
                    f"written down meanwhile, and it is tried again every {RETRY_S:g} s"
                )
            self._retry_at = time.monotonic() + RETRY_S
            self._end_file()
            self._count(DROPPED, 1, DISK)
            return
        if self._retry_at is not None:
            self._warn("record_traffic: answers are written down again")
            self._retry_at = None
        if is_written:
            self._count(RECORDED, 1, "")
            self._count(RECORDED_BYTES, len(line), "")
        else:
            self._count(DROPPED, 1, LARGE)

    def _append(self, line: bytes) -> bool:
        """Whether the bound allows the line. Raises `OSError`; then no part of the line stays."""
        if not self._header:
            names = Header(VERSION, target_digest(self._target), tokenizer_digest(self._target))
            self._header = msgspec.json.encode(names) + b"\n"
        if len(self._header) + len(line) > self._max_bytes:
            return False
        if self._file >= 0:
            stat = os.fstat(self._file)
            # Another server may have taken it away for the bound, or the operator by hand.
            if stat.st_nlink == 0 or stat.st_size + len(line) > self._max_bytes // FILES:
                self._end_file()
        if self._file < 0:
            self._free_space(len(self._header) + len(line))
            self._begin_file()
        else:
            self._free_space(len(line))
        _write_whole(self._file, line)
        return True

    def _begin_file(self) -> None:
        self._num_files += 1
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self._path = self._folder / f"traffic-{now}-{self._name}-{self._num_files:06d}.jsonl"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_whole(self._file, self._header)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise

    def _end_file(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _free_space(self, num_bytes: int) -> None:
        """Take the oldest files away until `num_bytes` more are within the bound."""
        found = []
        for path in self._folder.glob(PATTERN):
            with contextlib.suppress(FileNotFoundError):  # another server's
                found.append((path.name, path.stat().st_size, path))
        total = sum(size for _, size, _ in found) + num_bytes
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            if path != self._path or self._file < 0:
                path.unlink(missing_ok=True)
                total -= size


def _write_whole(file: int, data: bytes) -> None:
    """Append all of it, or nothing. Raises `OSError`."""
    size = os.fstat(file).st_size
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise


def read_traffic(folder: Path, target: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts of a folder in the order in which they came, of all files whose target has the tokenizer of `target`.
    Each has the answer of this very target, or an empty one where another target answered. Raises `TrafficError`."""
    if not folder.is_dir():
        raise TrafficError(f"{folder} is no folder; name the one of a server's setting record_traffic")
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    files = sorted(path for path in folder.glob(PATTERN) if path.is_file())
    num_others = 0
    try:
        own, own_tokenizer = target_digest(target), tokenizer_digest(target)
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # a server has taken it away meanwhile
                first, *lines = path.read_bytes().rpartition(b"\n")[0].split(b"\n")
                if not first:
                    continue
                header = _decoded(path, 1, first, Header)
                if header.traffic != VERSION or header.tokenizer != own_tokenizer:
                    num_others += 1
                    continue
                for number, line in enumerate(lines, 2):
                    row = _decoded(path, number, line, Row)
                    answer = tuple(row.answer) if header.target == own else ()
                    rows.append((tuple(row.prompt), answer))
    except OSError as error:
        raise TrafficError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
    if not rows:
        others = f" of this target's tokenizer; {num_others} files are of another one" if num_others else ""
        raise TrafficError(f"{folder} holds no prompt{others}; a server writes there with record_traffic={folder}")
    return rows


def _decoded(path: Path, number: int, line: bytes, kind: type[Line]) -> Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TrafficError(
            f"{path}, line {number}, is damaged ({error}); take the line away, or the file: the others are whole"
        ) from None

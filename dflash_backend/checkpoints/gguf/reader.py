"""The GGUF format: metadata, and where each tensor lies.

Every count and length is held to the bytes that the file has before anything is made of it, so a damaged file costs no
more than a whole one. (The reader of the package `gguf` loops over the counts that a file gives, and takes several
seconds for a vocabulary; what dequantises is that package's.)
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash_backend.checkpoints.gguf.blocks import INSTALL
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown, what_ails

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
# Published files have some hundred fields, some thousand tensors and at most some million strings.
MAX_FIELDS, MAX_TENSORS, MAX_ITEMS, MAX_DIMS = 1 << 14, 1 << 18, 1 << 24, 4
STRING, ARRAY = 8, 9
# By the number that GGUF has for a type of value.
SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. shape: rows first, as numpy and torch have it. kind: the name of its type, such as `Q4_1`. offset:
    where it begins in its file. block: how many numbers of a row lie together, in block_bytes bytes."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    block: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) // self.block * self.block_bytes


@dataclass(frozen=True)
class GgufModel:
    """A model in one file or in several. metadata: the first file's fields by name, a list for an array. tensors: those
    of all files, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file is in this format, by its name, or as those that have none of their own by how it begins."""
    if path.suffix.lower() == SUFFIX:
        return True
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC
    return False


def shards(path: Path) -> tuple[Path, ...]:
    """The files of the model that one of them belongs to, in order: `name-00001-of-00003.gguf` and its like, else
    the file alone. Raises `CheckpointError` where one is missing."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    files = tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{match['count']}{SUFFIX}") for i in range(1, count + 1))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{path} is one of {count} files, of which {len(missing)} are missing beside it"
            + (f", as {missing[0]}" if missing else "")
        )
    return files


def shard_pattern(name: str) -> str:
    """A pattern of the names of the files that one of them is of, as the hub's client takes it."""
    match = SHARD.fullmatch(name)
    return name if match is None else f"{match['stem']}-*-of-{match['count']}{SUFFIX}"


def read_model(path: Path) -> GgufModel:
    """Read the headers of a model's files. Raises `CheckpointError` on a file that is damaged or of another format."""
    files = shards(path)
    metadata, tensors = _read_file(files[0])
    for file in files[1:]:
        for name, tensor in _read_file(file)[1].items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor '{name}' is in {tensors[name].file.name} as well")
            tensors[name] = tensor
    count, total = metadata.get("split.count", 1), metadata.get("split.tensors.count", len(tensors))
    if count not in (0, len(files)):
        raise CheckpointError(f"{path} says that it is one of {shown(count)} files, and its name is not that of one")
    if total != len(tensors):
        raise CheckpointError(f"{path}: its files hold {len(tensors)} tensors; expected {shown(total)}, as it says")
    return GgufModel(path, metadata, tensors)


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        with open(file, "rb") as stream:
            return _Parser(file, stream, os.fstat(stream.fileno()).st_size).parse()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read as GGUF: {error}") from None


class _Parser:
    """Reads one file from its beginning. It is not mapped: one that is cut short meanwhile would kill its reader."""

    def __init__(self, file: Path, stream: IO[bytes], size: int) -> None:
        self._file, self._stream, self._size, self._at, self._items = file, stream, size, 0, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """The metadata and the tensors."""
        magic, version, num_tensors, num_fields = self._struct("<4sIQQ")
        if magic != MAGIC:
            raise self._fail(f"begins with {magic!r}, not with {MAGIC!r}, as GGUF does: {what_ails(self._file)}")
        if version not in VERSIONS:
            raise self._fail(
                f"is of version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read, little-endian"
            )
        for count, most, what in ((num_fields, MAX_FIELDS, "fields"), (num_tensors, MAX_TENSORS, "tensors")):
            if count > most:
                raise self._damaged(f"it says that it has {count} {what}")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string("a field's name")
            if name in metadata:
                raise self._damaged(f"the field {shown(name)} is there twice")
            metadata[name] = self._value(name, self._struct("<I")[0])
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._damaged(f"general.alignment is {shown(alignment)}; expected a multiple of 8")
        return metadata, self._place(entries, -(-self._at // alignment) * alignment)

    def _value(self, name: str, kind: int) -> Any:
        what = f"the field {shown(name)}"  # once: there are a hundred thousand tokens and merges
        if kind == STRING:
            return self._string(what)
        if kind != ARRAY:
            return self._numbers(name, kind, 1)[0]
        kind, count = self._struct("<IQ")
        self._items += count
        if self._items > MAX_ITEMS:
            raise self._damaged(f"{what} says that it has {count} values")
        if kind != STRING:
            return self._numbers(name, kind, count)
        if 8 * count > self._size - self._at:
            raise self._damaged(f"{what} ends after the file")
        return [self._string(what) for _ in range(count)]

    def _numbers(self, name: str, kind: int, count: int) -> list[Any]:
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise self._damaged(f"the field {shown(name)} has a value of type {kind}, which there is not")
        values = np.frombuffer(self._take(np.dtype(dtype).itemsize * count, f"the field {shown(name)}"), dtype)
        # The shortest decimal that is this float32: what the field was written from, as 1e-05.
        return [float(str(value)) for value in values] if dtype == "<f4" else list(values.tolist())

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        (num_dims,) = self._struct("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._damaged(f"the tensor {shown(name)} has {num_dims} dimensions")
        shape = tuple(self._struct(f"<{num_dims}Q")[::-1])
        kind, offset = self._struct("<IQ")
        return name, kind, shape, offset

    def _place(self, entries: Sequence[tuple[str, int, tuple[int, ...], int]], start: int) -> dict[str, GgufTensor]:
        """The tensors, each within the file and beside the others."""
        tensors: dict[str, GgufTensor] = {}
        for name, number, shape, offset in entries:
            kind, block, block_bytes = _kind(number)
            if not kind:
                raise self._fail(f"has the tensor {shown(name)} in type {number}, which the package gguf does not know")
            if 0 in shape or shape[-1] % block:
                raise self._damaged(f"the tensor {shown(name)} of {kind} has shape {list(shape)}")
            tensor = GgufTensor(self._file, name, kind, shape, start + offset, block, block_bytes)
            if tensor.offset + tensor.num_bytes > self._size:
                raise self._damaged(f"the tensor {shown(name)} ends after the file")
            if name in tensors:
                raise self._damaged(f"the tensor {shown(name)} is there twice")
            tensors[name] = tensor
        end = 0
        for tensor in sorted(tensors.values(), key=lambda each: each.offset):
            if tensor.offset < end:
                raise self._damaged(f"the tensor {shown(tensor.name)} begins within another")
            end = tensor.offset + tensor.num_bytes
        return tensors

    def _string(self, what: str) -> str:
        (length,) = self._struct("<Q")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{what} has text that is not UTF-8") from None

    def _struct(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form), "its header"))

    def _take(self, size: int, what: str) -> bytes:
        data = self._stream.read(size) if size <= self._size - self._at else b""
        if len(data) < size:
            raise self._damaged(f"{what} ends after the file")
        self._at += size
        return data

    def _damaged(self, reason: str) -> CheckpointError:
        return self._fail(f"cannot be read as GGUF: {reason}; {what_ails(self._file)}")

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._file} {reason}")


def _kind(number: int) -> tuple[str, int, int]:
    """The name of a type, how many numbers a block of it has, and how many bytes; no name for an unknown one. Raises
    `CheckpointError` without the package."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise CheckpointError(INSTALL) from None
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return "", 1, 1
    return kind.name, *GGML_QUANT_SIZES[kind]

"""What the safetensors files of a checkpoint hold, read from their headers alone: no torch, no tensor data.

A file begins with the length of its header, 8 bytes, little-endian; the header is a JSON object, name -> dtype, shape
and where its bytes lie; then come the tensors' bytes, without gaps. All of it is checked here, so that nothing is
allocated for a file that is not what it says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.json_reader import shown

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8

# Bytes of one element. Formats of less than a byte for an element are quantised and not loaded.
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor: the file that it lies in, its dtype as safetensors names it, its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """The tensors of several files. Raises `CheckpointError` where a file is broken or a name occurs twice."""
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor '{name}' is in {tensors[name].file.name} as well")
            tensors[name] = tensor
    return tensors


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, name -> header. Raises `CheckpointError`."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or not 2 <= header_size <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise _broken(file, f"a file of {size} bytes with a header of {header_size}")
            text = stream.read(header_size)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _broken(file, "the header is no JSON") from None
    if not isinstance(header, dict):
        raise _broken(file, f"the header is {shown(header)} where an object is expected")
    header.pop("__metadata__", None)
    return _check_tensors(file, header, size - LENGTH_BYTES - header_size)


def _check_tensors(file: Path, header: Mapping[str, Any], data_size: int) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        tensor, begin, end = _read_entry(file, name, entry)
        if end - begin != tensor.num_bytes:
            raise _broken(
                file,
                f"tensor {shown(name)} of shape {list(tensor.shape)} and type {tensor.dtype} takes "
                f"{tensor.num_bytes} bytes, the file gives it {end - begin}",
            )
        tensors[name] = tensor
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _broken(file, f"tensor {shown(name)} begins at byte {begin}, expected {position}")
        position = end
    if position != data_size:
        raise _broken(file, f"its tensors take {position} bytes, it holds {data_size}")
    return tensors


def _read_entry(file: Path, name: str, entry: Any) -> tuple[TensorHeader, int, int]:
    if not isinstance(entry, dict):
        raise _broken(file, f"tensor {shown(name)} is described by {shown(entry)}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _broken(file, f"tensor {shown(name)} is of type {shown(dtype)}")
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(
            file,
            f"tensor {shown(name)} has the shape {shown(entry.get('shape'))} at {shown(entry.get('data_offsets'))}",
        )
    return TensorHeader(file, dtype, shape), offsets[0], offsets[1]


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of sizes as a tuple; None when it is none."""
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        return None
    return tuple(value)


def _broken(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read as safetensors: {reason}; it is truncated or damaged, download or copy it again"
    )

"""Which version of the code computes KV: records of another version may hold other numbers, or have another layout."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import dflash_kernels

_PACKAGE = Path(__file__).parent.parent
# Folders and files: what reads weights, computes and writes K and V, lays out records, and names blocks.
COMPUTES_KV = (
    *(_PACKAGE / name for name in ("attention", "checkpoints", "drafters", "models", "worker")),
    _PACKAGE / "core" / "block_hashes.py",
    Path(dflash_kernels.__file__).parent,
)
SUFFIXES = (".py", ".cpp", ".h")


def source_files(parts: tuple[Path, ...] = COMPUTES_KV) -> Iterator[tuple[str, Path]]:
    """The source files in `parts`, with the names that they have wherever the package is installed."""
    for part in parts:
        found = sorted(part.rglob("*")) if part.is_dir() else [part]
        for file in found:
            if file.suffix in SUFFIXES:
                yield file.relative_to(part.parent).as_posix(), file


@functools.cache
def code_digest(parts: tuple[Path, ...] = COMPUTES_KV) -> bytes:
    """32 bytes that differ wherever a source file does. The files are read once in a process. Raises `OSError`."""
    digest = hashlib.sha256()
    for name, file in source_files(parts):
        digest.update(f"{name} ".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()

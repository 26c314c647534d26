"""Tells one checkpoint from another by a part of its numbers, which takes no reading of all of them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from dflash_backend.checkpoints.files import number_files
from dflash_backend.checkpoints.json_reader import JsonReader

# What of a file of weights is read: its first bytes, and this many pieces from all over it.
HEAD_BYTES, NUM_PIECES, PIECE_BYTES = 1 << 20, 64, 4096


def checkpoint_digest(directory: Path, with_times: bool = False) -> bytes:
    """32 bytes that differ wherever the config does, or what is read of a file of weights: its name, length, head and
    pieces. with_times: or when it was written, which differs from machine to machine. Raises `CheckpointError`, and
    `OSError`."""
    digest = hashlib.sha256(_config_of(directory))
    for file in number_files(directory):
        with file.open("rb") as opened:
            stat = os.fstat(opened.fileno())
            written = stat.st_mtime_ns if with_times else ""
            digest.update(f"{file.name} {stat.st_size} {written}\n".encode())
            digest.update(opened.read(HEAD_BYTES))
            for piece in range(NUM_PIECES if stat.st_size > HEAD_BYTES else 0):
                opened.seek(piece * stat.st_size // NUM_PIECES)
                digest.update(opened.read(PIECE_BYTES))
    return digest.digest()


def _config_of(directory: Path) -> bytes:
    """A checkpoint's config, in one order of its fields. What it was converted from, and where that lies, is not in
    it."""
    fields = {name: value for name, value in JsonReader.load(directory / "config.json").data.items() if name != "gguf"}
    return json.dumps(fields, sort_keys=True).encode()

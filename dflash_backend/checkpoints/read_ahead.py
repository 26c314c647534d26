"""Reads tensors of safetensors files ahead of a model that takes them to a GPU, by several threads.

A model takes its tensors in an order that is known beforehand. Threads read them in this order, pieces of a large one
side by side, into pinned memory, from which the GPU copies by itself. What has been read and not yet taken is bounded,
so a checkpoint needs no more memory beside the model than its largest file does, whatever lies in which file.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from dflash_backend.checkpoints.files import TensorHeader, broken_file

# Enough that a disk or a network has several requests at a time.
NUM_THREADS = 8
PIECE_BYTES = 16 * 1024**2
MAX_AHEAD_BYTES = 1024**3

STORED_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}


def reads_ahead(device: torch.device) -> bool:
    """Whether tensors for this device are read ahead. On a CPU a file's mapping is copied to the parameters as it is:
    memory between the two took twice the time."""
    return device.type == "cuda"


class ReadAhead:
    """The tensors `names` of `headers`, in this order. A context: threads and files end with it."""

    def __init__(self, headers: Mapping[str, TensorHeader], names: Sequence[str], pinned: bool) -> None:
        """pinned: whether memory is pinned, from which a GPU copies by itself."""
        self._headers = headers
        self._waiting = list(reversed(names))
        self._pinned = pinned
        sizes: dict[Path, int] = {}
        for name in names:
            sizes[headers[name].file] = sizes.get(headers[name].file, 0) + headers[name].num_bytes
        self._limit = min(MAX_AHEAD_BYTES, max(sizes.values(), default=0))
        self._held = 0
        # Of each tensor its memory, uint8 `[num_bytes]`, and the pieces that are not certain yet.
        self._readings: dict[str, tuple[torch.Tensor, list[Future[None]]]] = {}
        self._offsets: dict[Path, dict[str, int]] = {}
        self._files: dict[Path, int] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)

    def take(self, name: str) -> torch.Tensor | None:
        """The tensor as its file has it, on the CPU; None where it is not among those that are read ahead now. Its
        memory counts until `release`. Raises `CheckpointError` where its file is shorter than it was or cannot be
        read."""
        self._submit()
        if name not in self._readings:
            return None
        (memory, pieces), header = self._readings[name], self._headers[name]
        for piece in pieces:
            try:
                piece.result()
            except OSError as error:
                raise broken_file(header.file, error) from None
        return memory.view(STORED_DTYPES[header.dtype]).view(header.shape)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that was taken."""
        if self._readings.pop(name, None) is not None:
            self._held -= self._headers[name].num_bytes

    def _submit(self) -> None:
        """Begin to read what may be held: always one tensor, however large."""
        while self._waiting:
            name = self._waiting[-1]
            size = self._headers[name].num_bytes
            if self._held and self._held + size > self._limit:
                return
            self._waiting.pop()
            self._held += size
            self._readings[name] = self._begin(name, size)

    def _begin(self, name: str, size: int) -> tuple[torch.Tensor, list[Future[None]]]:
        file = self._headers[name].file
        try:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY)
                self._offsets[file] = data_offsets(self._files[file])
            start = self._offsets[file][self._headers[name].name]
        except (OSError, KeyError, ValueError, struct.error) as error:
            raise broken_file(file, error) from None
        memory = self._memory(size)
        view = memory.numpy().data
        pieces = [
            self._threads.submit(_read_piece, self._files[file], view[at : at + PIECE_BYTES], start + at)
            for at in range(0, size, PIECE_BYTES)
        ]
        return memory, pieces

    def _memory(self, size: int) -> torch.Tensor:
        if self._pinned or not size:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        # Given back to the system at once. Between parameters on the heap it would leave gaps.
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def data_offsets(file: int) -> dict[str, int]:
    """Where the data of each tensor of an open safetensors file begins, in bytes from its start. The library has
    checked the header before. Raises `OSError`, `ValueError`, `KeyError` or `struct.error` where the file has changed
    since."""
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    header = json.loads(os.pread(file, length, 8))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _read_piece(file: int, memory: memoryview, offset: int) -> None:
    """Fill `memory`. Raises `OSError` where the file ends before."""
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], offset + done)
        if not count:
            raise OSError(f"it ends at byte {offset + done}, within a tensor")
        done += count

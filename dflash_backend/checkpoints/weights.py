"""Tensors of a checkpoint, from safetensors only, checked against what a model reads before the first one is read.

A model reads its tensors from a `WeightSource` by name, each into its place in a parameter, so that projections are
fused without a second copy. Nothing here unpickles or runs anything from a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from dflash_backend.checkpoints.decoder_fields import DTYPES
from dflash_backend.checkpoints.files import TensorHeader, broken_file, read_headers
from dflash_backend.checkpoints.spec import CheckpointError

Progress = Callable[[str, float], None]
Model = TypeVar("Model")

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
"""By the names that settings and `config.json` have for them."""

FLOAT_DTYPES = ("F32", "BF16", "F16")
INTEGER_DTYPES = ("I64", "I32")
BYTE_DTYPES = ("U8",)


class WeightSource(ABC):
    """Where a model takes its tensors from. `dtype` and `device` are those of its parameters."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def read(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor `name`, of the shape of `out`, to `out`, in its dtype. A source may give each tensor once."""

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for a parameter."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name`, of this shape."""
        self.read(name, out := self.empty(*shape))
        return out

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        """The integer tensor `name`, of this shape, as int64."""
        self.read(name, out := torch.empty(shape, dtype=torch.int64, device=self.device))
        return out

    def packed(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name` of packed weights, of this shape, as it is stored: uint8."""
        self.read(name, out := torch.empty(shape, dtype=torch.uint8, device=self.device))
        return out


class _Listing(WeightSource):
    """Notes what a model reads; its parameters have no memory."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("meta"))
        self.tensors: dict[str, torch.Tensor] = {}

    def read(self, name: str, out: torch.Tensor) -> None:
        self.tensors[name] = out


class _CheckpointFiles(WeightSource):
    """The tensors of safetensors files, one file open at a time: memory stays below the model's own size and one
    file."""

    def __init__(
        self,
        headers: Mapping[str, TensorHeader],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        super().__init__(dtype, device)
        self._headers = headers
        self._progress = progress
        self._unread = Counter(header.file for header in headers.values())
        self._total = sum(header.num_bytes for header in headers.values()) or 1
        self._read = 0
        self._file: Path | None = None
        self._reader: Any = None

    def read(self, name: str, out: torch.Tensor) -> None:
        header = self._headers[name]
        try:
            if header.file != self._file:
                self._file, self._reader = header.file, safe_open(header.file, framework="pt", device="cpu")
            # The slice looks into the file's mapping, which ends with the last look into it.
            out.copy_(self._reader.get_slice(name)[...])
        except (SafetensorError, OSError) as error:
            raise broken_file(header.file, error) from None
        self._read += header.num_bytes
        self._unread[header.file] -= 1
        if not self._unread[header.file]:
            self._file, self._reader = None, None
            if self._progress is not None:
                self._progress(header.file.name, self._read / self._total)


def load_weights(
    directory: Path,
    read: Callable[[WeightSource], Model],
    dtype: torch.dtype,
    device: torch.device,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
) -> Model:
    """What `read` makes of the checkpoint in a directory, its parameters in `dtype` on `device`.

    `read` runs twice: first on parameters without memory, for the names, shapes and kinds of the tensors, so that all
    files are checked before the first tensor is read. `ignored` as for `check_weights`. `progress` is called with each
    file's name once it has been read and the share of all bytes so far.

    Raises `CheckpointError` on a file that cannot be read, and as `check_weights` does.
    """
    headers = check_weights(directory, read, ignored=ignored)
    return read(_CheckpointFiles(headers, dtype, device, progress))


def check_weights(
    directory: Path,
    read: Callable[[WeightSource], object],
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, TensorHeader]:
    """Compare what the safetensors files of a directory hold with what `read` reads, by their headers alone.

    Returns the tensors that the model takes. Tensors that it does not read and that `ignored` names are left aside.
    Raises `CheckpointError` on a tensor that is missing, is in two files, has another shape or type, or that the model
    does not know (a misread checkpoint must not run).
    """
    expected = expected_tensors(read)
    headers = {
        name: header for name, header in read_headers(directory).items() if name in expected or not ignored(name)
    }
    for name, header in headers.items():
        shape = list(header.shape)
        if name not in expected:
            raise CheckpointError(f"{header.file}: tensor '{name}' of shape {shape} is not part of this model")
        if shape != list(expected[name].shape):
            raise CheckpointError(
                f"{header.file}: tensor '{name}' has shape {shape}; config.json asks for {list(expected[name].shape)}"
            )
        allowed = _allowed_dtypes(expected[name])
        if header.dtype not in allowed:
            raise CheckpointError(
                f"{header.file}: tensor '{name}' is {header.dtype}; expected one of {', '.join(allowed)}"
            )
    missing = sorted(set(expected) - set(headers))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor '{missing[0]}'{more} is missing from its safetensors files")
    return headers


def _allowed_dtypes(expected: torch.Tensor) -> tuple[str, ...]:
    """The types, as safetensors names them, that a file may have for a tensor that is read into `expected`."""
    if expected.is_floating_point():
        return FLOAT_DTYPES
    return BYTE_DTYPES if expected.dtype == torch.uint8 else INTEGER_DTYPES


def expected_tensors(read: Callable[[WeightSource], object]) -> dict[str, torch.Tensor]:
    """The tensors that `read` reads: name -> a tensor of its shape on the device `meta`, int64 where it is integers."""
    listing = _Listing()
    read(listing)
    return listing.tensors

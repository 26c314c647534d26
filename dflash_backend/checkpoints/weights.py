"""Tensors of a checkpoint, from safetensors only, checked against the shapes that the model expects.

Called by `models` while it loads. Nothing here unpickles or runs anything from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.files import weight_files
from dflash_backend.checkpoints.headers import TensorHeader, read_headers

Progress = Callable[[str, float], None]

FLOAT_DTYPES = ("F32", "BF16", "F16")
INTEGER_DTYPES = ("I64", "I32")


def load_weights(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    integers: frozenset[str] = frozenset(),
    ignored: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Read the tensors named by `expected` (name -> shape) from the safetensors files of a directory.

    Floating-point tensors are cast to `dtype`; those in `integers` must be integers and become int64. Names for which
    `ignored` is true are skipped unless they are expected. All headers are checked before the first tensor is read.
    A tensor is copied out of its file's mapping, which ends with the file: memory stays below the model's own size and
    one file. `progress` hears `(file, fraction of the bytes)`.

    Raises `CheckpointError` on a file that cannot be read, a tensor that is missing, is in two files, has another shape
    or type, or that the model does not know (a misread checkpoint must not run).
    """
    headers = check_weights(directory, expected, integers=integers, ignored=ignored)
    total = sum(header.num_bytes for header in headers.values()) or 1
    tensors: dict[str, torch.Tensor] = {}
    done = 0
    for file, names in _by_file(headers).items():
        tensors |= _read_file(file, names, lambda name: torch.int64 if name in integers else dtype, device)
        done += sum(headers[name].num_bytes for name in names)
        if progress is not None:
            progress(file.name, done / total)
    return tensors


def check_weights(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    *,
    integers: frozenset[str] = frozenset(),
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, TensorHeader]:
    """Compare what the safetensors files of a directory hold with what the model needs, by their headers alone; the
    parameters are those of `load_weights`. Returns the tensors that the model takes. Raises `CheckpointError`."""
    headers = {
        name: header
        for name, header in read_headers(weight_files(directory)).items()
        if name in expected or not ignored(name)
    }
    for name, header in headers.items():
        shape = list(header.shape)
        if name not in expected:
            raise CheckpointError(f"{header.file}: tensor '{name}' of shape {shape} is not part of this model")
        if header.shape != expected[name]:
            raise CheckpointError(
                f"{header.file}: tensor '{name}' has shape {shape}; config.json asks for {list(expected[name])}"
            )
        allowed = INTEGER_DTYPES if name in integers else FLOAT_DTYPES
        if header.dtype not in allowed:
            raise CheckpointError(
                f"{header.file}: tensor '{name}' is {header.dtype}; expected one of {', '.join(allowed)}"
            )
    missing = sorted(set(expected) - set(headers))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor '{missing[0]}'{more} is missing from its safetensors files")
    return headers


def _by_file(headers: Mapping[str, TensorHeader]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name, header in headers.items():
        files.setdefault(header.file, []).append(name)
    return files


def _read_file(
    file: Path, names: list[str], dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> dict[str, torch.Tensor]:
    """Some tensors of one file, each in memory of its own: a view would keep the whole file mapped."""
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            return {
                name: torch.empty_like(view, dtype=dtype_of(name), device=device).copy_(view)
                for name, view in ((name, reader.get_tensor(name)) for name in names)
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}; download or copy it again") from None

"""Tensors of a checkpoint, from safetensors only, checked against the shapes that the model expects.

Called by `models` while it loads. Nothing here unpickles or runs anything from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.json_reader import JsonReader

Progress = Callable[[str, float], None]

FLOAT_DTYPES = {"F32", "BF16", "F16"}


def load_weights(
    directory: Path,
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    ignored: frozenset[str] = frozenset(),
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Read the tensors named by `expected` (name -> shape) from all safetensors files of a directory.

    One tensor at a time is read, cast and moved, so that memory stays near the model's own size. Raises
    `CheckpointError` on a file that cannot be read, a tensor that is missing, has another shape, is not floating
    point, or that the model does not know (a misread checkpoint must not run).
    """
    tensors: dict[str, torch.Tensor] = {}
    files = weight_files(directory)
    for index, file in enumerate(files):
        try:
            for name, tensor in _read_file(file, expected, ignored):
                tensors[name] = tensor.to(device=device, dtype=dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} cannot be read as safetensors: {error}; download or copy the file again"
            ) from None
        if progress is not None:
            progress(f"{file.name} ({index + 1} of {len(files)})", (index + 1) / len(files))
    missing = sorted(set(expected) - set(tensors))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor '{missing[0]}'{more} is missing from its safetensors files")
    return tensors


def _read_file(
    file: Path, expected: Mapping[str, tuple[int, ...]], ignored: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt", device="cpu") as reader:
        for name in reader.keys():  # noqa: SIM118 (not a dict: iterating it is not possible)
            if name in ignored:
                continue
            view = reader.get_slice(name)
            shape = tuple(view.get_shape())
            if name not in expected:
                raise CheckpointError(f"{file}: tensor '{name}' of shape {list(shape)} is not part of this model")
            if shape != expected[name]:
                raise CheckpointError(
                    f"{file}: tensor '{name}' has shape {list(shape)}; config.json asks for {list(expected[name])}"
                )
            if view.get_dtype() not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{file}: tensor '{name}' is {view.get_dtype()}; expected one of {sorted(FLOAT_DTYPES)}"
                )
            yield name, reader.get_tensor(name)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index where it has one, else all of them."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = JsonReader.load(index).object("weight_map", required=True)
        names = {weight_map.string(key) for key in weight_map.data}
        bad = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
        if bad:
            raise CheckpointError(f"{index}: '{bad[0]}' is no file name of a safetensors file in this directory")
        files = sorted(directory / name for name in names)
    else:
        files = sorted(directory.glob("*.safetensors"))
    absent = [file for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{absent[0]} is named by the index but does not exist")
    if not files:
        raise CheckpointError(f"{directory} has no .safetensors file; other weight formats are not loaded")
    return files

"""A GGUF model as a directory of the kind that everything else reads, made once and kept beside the hub's cache.

Ranks, the front end, `inspect` and the engine then read one format, and a second start costs nothing. A tensor of the
usual quantised types keeps its blocks, whose type the metadata of `model.safetensors` names (`blocks.BLOCKS`); its rows
may change places. Other types, and tensors whose numbers change, become float32, which holds them exactly (what a
step or two of 4 bits and a 16-bit scale give does not fit bfloat16), a few rows at a time; gpt-oss's experts in MXFP4
become what OpenAI publishes, or bfloat16, which holds those exactly. The model is served in the dtype that its config
names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash_backend.checkpoints.files import GGUF_BLOCKS, SINGLE, part_of_bytes
from dflash_backend.checkpoints.gguf.architectures import (
    ROPE_FACTORS,
    read_architecture,
    read_config,
    read_parts,
    unknown_fields,
)
from dflash_backend.checkpoints.gguf.blocks import BLOCKS, numbers_of
from dflash_backend.checkpoints.gguf.parts import Array, Part
from dflash_backend.checkpoints.gguf.reader import GgufModel, GgufTensor, read_model, shards
from dflash_backend.checkpoints.gguf.tokenizer import read_tokenizer
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown

Report = Callable[[str], None]

# Of what this module writes: another one converts anew.
FORMAT = 4
FOLDER = "dflash-gguf"
# Floats that are written as they are, with their names in safetensors and their sizes.
KEPT = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}
BYTES = {"U8": ("U8", 1)}
# Numbers of a float of 4 bits times a power of two.
EXACT = {"MXFP4": "BF16"}
NUMBERS_AT_ONCE = 1 << 20
# A tensor of fewer bytes is read whole where its rows change places.
WHOLE_BYTES = 1 << 23
REPORT_S = 2.0
SPARE_BYTES = 64 << 20  # of the disk
MAX_ROPE_FACTORS = 1 << 16
MAX_STEM = 60  # of a file's name, in the directory's


def converted(path: Path, report: Report | None = None, plain: bool = False) -> Path:
    """The directory that a GGUF file was converted to, now or before. `report` gets a line every few seconds. plain:
    without blocks of GGUF, for programs that read numbers alone. Raises `CheckpointError`."""
    try:
        files = shards(path)
        directory = _cache() / f"{path.stem[:MAX_STEM]}-{_key(files)}{'-plain' if plain else ''}"
        if (directory / "config.json").is_file():
            return directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_name(f".{directory.name}.lock"), "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # while no other process converts the same file
            if not (directory / "config.json").is_file():
                _convert(path, files, directory, report, plain)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be converted: {error}; the folder is HF_HOME's, {_cache()}") from None
    return directory


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser().resolve().parent / FOLDER


def _key(files: tuple[Path, ...]) -> str:
    """Of the files' paths, sizes and times, and of `FORMAT`."""
    found = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([FORMAT, found]).encode()).hexdigest()[:16]


def _convert(path: Path, files: tuple[Path, ...], directory: Path, report: Report | None, plain: bool) -> None:
    key = _key(files)
    model = read_model(path)
    _check_kinds(model)
    config = read_config(model, _rope_factors(model))
    if plain:
        config.pop("quantization_config", None)
    parts = read_parts(model, config)
    # A drafter's tokens are the target's.
    tokenizer = None if read_architecture(model).is_drafter else read_tokenizer(model, config["vocab_size"])
    unknown = unknown_fields(model)
    notes = list(tokenizer.notes) if tokenizer is not None else []
    if unknown:
        notes.append(f"fields that this version does not know are not read: {', '.join(map(shown, unknown))}")
    config["gguf"] = {"file": str(path.absolute()), "notes": notes}
    # Removed at once where something fails or is interrupted; one that a killed process left is written over.
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_tensors(path, parts, partial / SINGLE, report, plain)
        pages = {"config.json": config}
        if tokenizer is not None:
            tokenizer.tokenizer.save(str(partial / "tokenizer.json"))
            pages["tokenizer_config.json"] = tokenizer.config
            pages["generation_config.json"] = {"eos_token_id": list(tokenizer.ends)} if tokenizer.ends else {}
        for name, data in pages.items():
            (partial / name).write_text(json.dumps(data, indent=1), encoding="utf-8")
        if _key(files) != key:
            raise CheckpointError(f"{path} has changed while it was converted; start again")
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_kinds(model: GgufModel) -> None:
    """Refuse a type that nothing dequantises, before anything is written."""
    for tensor in {tensor.kind: tensor for tensor in model.tensors.values()}.values():
        try:
            _numbers(np.zeros((1, tensor.block_bytes), np.uint8), tensor)
        except NotImplementedError:
            raise CheckpointError(
                f"{tensor.file}: the tensor {shown(tensor.name)} is {tensor.kind}, which is not dequantised here"
            ) from None


def _rope_factors(model: GgufModel) -> list[float] | None:
    tensor = model.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.kind != "F32" or math.prod(tensor.shape) > MAX_ROPE_FACTORS:
        raise CheckpointError(f"{tensor.file}: the tensor {ROPE_FACTORS} is {tensor.kind} {list(tensor.shape)}")
    with open(tensor.file, "rb") as source:
        return [float(factor) for factor in _read(source, tensor, 0, 1, tensor.num_bytes)[0].view("<f4")]


def _write_tensors(path: Path, parts: Mapping[str, Part], file: Path, report: Report | None, plain: bool) -> None:
    """Write a safetensors file, tensor by tensor."""
    header: dict[str, Any] = {}
    kinds = {name: _written_kind(part, plain) for name, part in parts.items()}
    end = 0
    for name, part in parts.items():
        shape = list(part.shape)
        if kinds[name] in BLOCKS:
            (numbers, num_bytes), dtype, size = BLOCKS[kinds[name]], "U8", 1
            shape[-1] = shape[-1] // numbers * num_bytes
        else:
            dtype, size = (KEPT | BYTES)[kinds[name]]
        begin, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    in_blocks = {name: kind for name, kind in kinds.items() if kind in BLOCKS}
    header["__metadata__"] = {"format": "pt"} | ({GGUF_BLOCKS: json.dumps(in_blocks)} if in_blocks else {})
    _check_space(path, file.parent, end)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    reported, done = time.monotonic(), 0
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, part in parts.items():
            for size in _write_part(part, kinds[name], stream):
                done += size
                if report is not None and time.monotonic() - reported > REPORT_S:
                    reported = time.monotonic()
                    report(f"converting {path.name}: {part_of_bytes(done, end)}")
        stream.flush()
        os.fsync(stream.fileno())


def _check_space(path: Path, directory: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if size + SPARE_BYTES > free:
        raise CheckpointError(
            f"{path} takes {size / 1e9:.2f} GB once it is converted, and {directory.parent} has {free / 1e9:.2f} GB "
            "left; make space there, or set HF_HOME to a folder on another disk"
        )


def _written_kind(part: Part, plain: bool) -> str:
    """The type that a part is written in: its sources' own where it is kept and is one type. plain: no blocks."""
    if part.repack is not None:
        return "U8"
    kinds = {source.kind for source in part.sources}
    kind = kinds.pop()
    if kinds or part.change is not None:
        return "F32"
    if kind in BLOCKS and not plain:
        numbers, (last, *before) = BLOCKS[kind][0], part.shape[::-1]
        turned = part.column_order is not None or part.matrix_rows or (part.rows is not None and part.columns != last)
        if before and last % numbers == 0 and not turned:
            return kind
    return kind if kind in KEPT else EXACT.get(kind, "F32")


def _write_part(part: Part, kind: str, stream: IO[bytes]) -> Iterator[int]:
    """Write a tensor in the type `kind`, some rows at a time. Yields the bytes of each time."""
    if part.rows is not None:
        step = part.matrix_rows or max(1, NUMBERS_AT_ONCE // part.columns)
        for at in range(0, part.rows.size, step):
            numbers = _rows(part, part.rows[at : at + step], kind if part.repack is None else part.sources[0].kind)
            if part.repack is not None:
                numbers = part.repack(numbers)
            if part.column_order is not None:
                numbers = numbers[:, part.column_order]
            yield stream.write(np.ascontiguousarray(numbers.T if part.matrix_rows else numbers).data)
        return
    (tensor,) = part.sources
    first, count = part.start // tensor.block, math.prod(part.shape) // tensor.block
    step = max(1, NUMBERS_AT_ONCE // tensor.block)
    with open(tensor.file, "rb") as source:
        for at in range(0, count, step):
            blocks = _read(source, tensor, first + at, min(step, count - at), tensor.block_bytes)
            if kind not in BLOCKS:
                blocks = _changed(_numbers(blocks, tensor), part, kind, tensor.kind)
            yield stream.write(np.ascontiguousarray(blocks).data)


def _rows(part: Part, wanted: Array, kind: str) -> Array:
    """The numbers `[num_rows, columns]` of these rows, counted through all sources, in the type `kind`; of blocks their
    bytes."""
    numbers, num_bytes = BLOCKS.get(kind, (1, 1))
    found = np.empty((wanted.size, part.columns // numbers * num_bytes), "u1" if kind in BLOCKS else _dtype(kind))
    first = 0
    for tensor in part.sources:
        if part.columns % tensor.block:
            raise CheckpointError(f"{tensor.file}: the tensor {shown(tensor.name)} is {tensor.kind}; expected floats")
        count = math.prod(tensor.shape) // part.columns
        here = np.flatnonzero((wanted >= first) & (wanted < first + count))
        if here.size:
            rows = _some_rows(tensor, wanted[here] - first, part.columns // tensor.block * tensor.block_bytes)
            found[here] = rows if kind in BLOCKS else _changed(_numbers(rows, tensor), part, kind, tensor.kind)
        first += count
    return found


def _some_rows(tensor: GgufTensor, wanted: Array, row_bytes: int) -> Array:
    """The bytes `[num_rows, row_bytes]` of these rows of a tensor."""
    with open(tensor.file, "rb") as source:
        if tensor.num_bytes <= WHOLE_BYTES:
            rows: Array = _read(source, tensor, 0, tensor.num_bytes // row_bytes, row_bytes)[wanted]
            return rows
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([_read(source, tensor, int(run[0]), run.size, row_bytes) for run in runs])


def _read(source: IO[bytes], tensor: GgufTensor, first: int, count: int, row_bytes: int) -> Array:
    """The bytes `[count, row_bytes]` of a tensor from its row `first` on. They are read and not mapped: a mapped file
    that is cut short meanwhile kills its reader."""
    source.seek(tensor.offset + first * row_bytes)
    data = source.read(count * row_bytes)
    if len(data) < count * row_bytes:
        raise CheckpointError(
            f"{tensor.file}: the tensor {shown(tensor.name)} ends after the file, which has become shorter since it "
            "was opened; copy or download it again"
        )
    return np.frombuffer(data, np.uint8).reshape(count, row_bytes)


def _dtype(kind: str) -> str:
    return "<f4" if kind == "F32" else "<u2"


def _changed(numbers: Array, part: Part, kind: str, source: str) -> Array:
    """Numbers of a source as they are written."""
    if source in KEPT:
        numbers = numbers.view(_dtype(source))
    if kind == "F32" and source in ("F16", "BF16"):
        numbers = numbers.view("<f2").astype("<f4") if source == "F16" else (numbers.astype("<u4") << 16).view("<f4")
    if kind == "BF16" and source in EXACT:
        return (numbers.view("<u4") >> 16).astype("<u2")
    with np.errstate(all="ignore"):  # what is no number is found, and named, as it is loaded
        return numbers if part.change is None else part.change(numbers).astype("<f4", copy=False)


def _numbers(rows: Array, tensor: GgufTensor) -> Array:
    """Rows of bytes as their numbers: float32, or the bytes of a type that is kept. Raises `NotImplementedError` for a
    type without a dequantiser, and `CheckpointError` without the package."""
    if tensor.kind in KEPT:
        return rows
    return rows.view("<f8").astype("<f4") if tensor.kind == "F64" else numbers_of(rows, tensor.kind)

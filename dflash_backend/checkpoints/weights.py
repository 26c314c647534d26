"""Tensors of a checkpoint, from safetensors only, checked against what a model reads before the first one is read.

A model reads its tensors from a `WeightSource` by name, each into its place in a parameter, so that projections are
fused without a second copy. The weight of a projection may be quantised: then it is made from several tensors, one
weight at a time, and the model does not know. Nothing here unpickles or runs anything from a checkpoint.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from dflash_backend.checkpoints.decoder_fields import DTYPES
from dflash_backend.checkpoints.files import TensorHeader, broken_file, part_of_bytes, read_headers
from dflash_backend.checkpoints.gguf.blocks import numbers_of
from dflash_backend.checkpoints.lora import LoraAdapters
from dflash_backend.checkpoints.quantization import Quantization, load_quantization
from dflash_backend.checkpoints.quantization.dequantise import dequantise
from dflash_backend.checkpoints.quantization.keepable import kept_as_one
from dflash_backend.checkpoints.quantization.kept import (
    KeptWeight,
    groups_of,
    have_one_order,
    is_kept_slice,
    keep,
    keep_slice,
)
from dflash_backend.checkpoints.quantization.slices import SPLIT_WITHIN, Slice, dequantise_slice
from dflash_backend.checkpoints.quantization.stored import Expected, StoredWeight, check_tensor, stored_weight, surplus
from dflash_backend.checkpoints.read_ahead import ReadAhead, reads_ahead
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.checkpoints.tensor_names import stored_name

Progress = Callable[[str, float], None]
Slices = Mapping[str, Slice]
NO_SLICES: Slices = {}
Model = TypeVar("Model")
Made = TypeVar("Made")
Blocks = tuple[str, torch.Tensor]
"""A weight in a type of GGUF, by its name: uint8 `[num_rows, num_bytes]`."""

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
"""By the names that settings and `config.json` have for them."""

FLOAT_DTYPES = ("F32", "BF16", "F16")
FILE_DTYPES = {torch.int64: ("I64", "I32"), torch.uint8: ("U8",)}
"""The types, as safetensors names them, that a file may have for a tensor of each dtype; others are `FLOAT_DTYPES`."""
NUMBERS_AT_ONCE = 1 << 22
"""That blocks of GGUF become at a time."""
# How often progress within a file is said.
REPORT_S = 2.0


class WeightSource(ABC):
    """Where a model takes its tensors from. `dtype` and `device` are those of its parameters. keep_quantised: whether
    weights that can stay quantised do, since the device has products of them."""

    adapters: LoraAdapters | None = None
    """What adds to its projections, by each token's adapter; None for nothing."""

    def __init__(self, dtype: torch.dtype, device: torch.device, keep_quantised: bool = False) -> None:
        self.dtype = dtype
        self.device = device
        self.keep_quantised = keep_quantised

    @abstractmethod
    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        """Copy the tensor `name`, or the slice `taken` of it, which has the shape of `out`, to `out`, in its dtype. A
        source may give each tensor once."""

    def read_projection(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        """As `read`, for the weight `[out_features, in_features]` of a projection, which files may hold quantised.
        `name` ends in `.weight`."""
        self.read(name, out, taken)

    def keeps(
        self, names: Mapping[str, int], in_features: int, *, ordered: bool = True, slices: Slices = NO_SLICES
    ) -> bool:
        """Whether the weights of these projections, each with its number of rows, stay quantised as one product: then
        `read_kept` gives each of them. Their names end in `.weight`. ordered: their columns may be in an order of their
        own, the same for all of them. slices: of those of which a part is read, whose sizes are the part's."""
        return False

    def read_kept(self, name: str, out_features: int, in_features: int, taken: Slice | None = None) -> KeptWeight:
        """The weight of a projection, or the slice `taken` of it, in its codes, in place of `read_projection`."""
        raise NotImplementedError(f"{type(self).__name__} keeps no weights quantised")

    def keeps_experts(self, name: str, out_features: int, in_features: int) -> bool:
        """Whether the tensor `name`, `[num_experts, out_features, in_features]`, stays quantised: then
        `read_kept_experts` gives it."""
        return False

    def read_kept_experts(self, name: str, num_experts: int, out_features: int, in_features: int) -> KeptWeight:
        """A tensor of all experts in its codes, in place of `read`: a weight with the rows of all experts below one
        another."""
        raise NotImplementedError(f"{type(self).__name__} keeps no experts quantised")

    def of_blocks(self, names: Iterable[str], make: Callable[[list[Blocks]], Made | None]) -> Made | None:
        """What `make` makes of the weights of these names, in the blocks of GGUF that the files have. None where they
        are to be read as numbers: some have none, `make` makes nothing of theirs, or nothing multiplies by them here
        (`keep_blocks`)."""
        return None

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for a parameter."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor `name`, of this shape. dtype: int64 for integers, uint8 for packed weights, as they are stored;
        else that of parameters."""
        self.read(name, out := torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
        return out


class _Listing(WeightSource):
    """Notes what a model reads; its parameters have no memory."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("meta"))
        self.tensors: dict[str, torch.Tensor] = {}
        self.projections: dict[str, tuple[int, int]] = {}
        self.sliced: set[str] = set()

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        if taken is not None:
            self.sliced.add(name)
            out = torch.empty(taken.whole(out.shape), dtype=out.dtype, device=self.device)
        self.tensors[name] = out

    def read_projection(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        self.read(name, out, taken)
        rows, columns = self.tensors[name].shape
        self.projections[name.removesuffix(".weight")] = rows, columns


class _CheckpointFiles(WeightSource):
    """The tensors of safetensors files: from `ahead` those that it has, all others, and parts, from the mapping of one
    file at a time. So memory stays below the model's own size and one file."""

    def __init__(
        self,
        contents: _Contents,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        ahead: ReadAhead,
        keep_quantised: bool = False,
        keep_blocks: bool = False,
    ) -> None:
        super().__init__(dtype, device, keep_quantised)
        self._keep_blocks = keep_blocks
        self._ahead = ahead
        self._headers = contents.headers
        self._quantised = contents.quantised
        self._progress = progress
        read = [header for name, header in contents.headers.items() if name not in contents.unread]
        self._unread = Counter(header.file for header in read)
        self._total = sum(header.num_bytes for header in read) or 1
        self._read, self._split_reported = 0, False
        self._began = self._reported = time.monotonic()
        self._file: Path | None = None
        self._reader: Any = None
        # Of each tensor that was read into numbers, its largest; NaN where one of its numbers is.
        self._largest: dict[str, torch.Tensor] = {}

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        header, done = self._headers[name], 0
        if taken is not None:
            for start, stop in taken.bounds(out.shape):
                stored = self._stored(name, (slice(None),) * taken.dim + (slice(start, stop),))
                out.narrow(taken.dim, done, stop - start).copy_(stored)
                done += stop - start
        elif header.blocks:
            step = max(1, NUMBERS_AT_ONCE // math.prod(header.shape[1:]))
            for at in range(0, header.shape[0], step):
                out[at : at + step].copy_(self._stored(name, (slice(at, at + step),)))
        else:
            # From pinned memory a GPU copies by itself; torch keeps that memory until it has.
            out.copy_(self._stored(name), non_blocking=True)
        self._look_at(name, out)
        self._count(name)

    def of_blocks(self, names: Iterable[str], make: Callable[[list[Blocks]], Made | None]) -> Made | None:
        headers = {name: self._headers.get(name) for name in names}
        found = [(header.blocks, name) for name, header in headers.items() if header is not None and header.blocks]
        if not self._keep_blocks or len(found) < len(headers):
            return None
        made = make([(kind, self._raw(name)) for kind, name in found])
        for name in headers if made is not None else ():
            self._count(name)
        return made

    def read_projection(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        stored = self._quantised.get(name.removesuffix(".weight"))
        if stored is None:
            self.read(name, out, taken)
            return
        if taken is None:  # numbers that are none are refused as they are made
            dequantise(stored, {role: self._stored(part) for role, part in stored.tensors.items()}, out)
        elif dequantise_slice(stored, self._stored, out, taken) and self._progress and not self._split_reported:
            self._progress(f"{name}: {SPLIT_WITHIN}", self._read / self._total)
            self._split_reported = True
        for part in stored.tensors.values():
            self._count(part)

    def keeps(
        self, names: Mapping[str, int], in_features: int, *, ordered: bool = True, slices: Slices = NO_SLICES
    ) -> bool:
        if not self.keep_quantised:
            return False
        stored = {name: self._quantised.get(name.removesuffix(".weight")) for name in names}
        found = {name: each for name, each in stored.items() if each is not None}
        if len(found) < len(stored) or not kept_as_one(
            ((found[name].scheme, names[name]) for name in names), in_features
        ):
            return False
        shapes = {name: (rows, in_features) for name, rows in names.items()}
        if not all(is_kept_slice(found[name], shapes[name], taken) for name, taken in slices.items()):
            return False
        # Small tensors, looked at besides those that are read ahead.
        groups = [groups_of(each, self._stored, shapes[name], slices.get(name)) for name, each in found.items()]
        columns = next(iter(found.values())).scheme.block[1]
        return have_one_order(groups, columns or in_features, ordered)

    def read_kept(self, name: str, out_features: int, in_features: int, taken: Slice | None = None) -> KeptWeight:
        stored, shape = self._quantised[name.removesuffix(".weight")], (out_features, in_features)
        if taken is None:
            parts = {role: self._stored(part) for role, part in stored.tensors.items()}
            kept = keep(stored, parts, shape, self.device)
        else:
            kept = keep_slice(stored, self._stored, shape, self.device, taken)
        for part in stored.tensors.values():
            self._count(part)
        return kept

    def _look_at(self, name: str, out: torch.Tensor) -> None:
        """Note whether a tensor has NaN, at the cost of reading it once; a GPU is not waited for."""
        if out.is_floating_point() and out.element_size() > 1 and out.numel():
            self._largest[name] = out.amax()

    def check_numbers(self) -> None:
        """Raises `CheckpointError` where a tensor that was read has NaN: every answer would be empty, or noise."""
        names = list(self._largest)
        if not names:
            return
        largest = torch.stack([self._largest[name].to(torch.float32) for name in names])
        bad = [name for name, is_nan in zip(names, largest.isnan().tolist(), strict=True) if is_nan]
        if bad:
            header = self._headers.get(bad[0])
            more = f", as have {len(bad) - 1} others" if len(bad) > 1 else ""
            where, name = ("", bad[0]) if header is None else (f"{header.file}: ", header.name)
            raise CheckpointError(
                f"{where}the tensor {name} has values that are no numbers (NaN){more}; the checkpoint is damaged"
            )

    def _stored(self, name: str, index: tuple[slice, ...] | EllipsisType = ...) -> torch.Tensor:
        """A tensor as its file has it, or what `index` takes of it; blocks of GGUF as their numbers."""
        header = self._headers[name]
        if not header.blocks:
            return self._raw(name, index)
        taken = () if index is ... else index
        rows = taken[: len(header.shape) - 1]
        raw = self._raw(name, rows or ...)
        numbers = torch.from_numpy(numbers_of(raw.view(-1, raw.shape[-1]).numpy(), header.blocks))
        return numbers.view(*raw.shape[:-1], -1)[(*[slice(None)] * len(rows), *taken[len(rows) :])]

    def _raw(self, name: str, index: tuple[slice, ...] | EllipsisType = ...) -> torch.Tensor:
        if index is ... and (whole := self._ahead.take(name)) is not None:
            return whole
        header = self._headers[name]
        try:
            if header.file != self._file:
                self._file, self._reader = header.file, safe_open(header.file, framework="pt", device="cpu")
            tensor: torch.Tensor = self._reader.get_slice(header.name)[index]
        except (SafetensorError, OSError) as error:
            raise broken_file(header.file, error) from None
        return tensor

    def _count(self, name: str) -> None:
        """Note that a tensor has been read. Progress is said at the end of each file and every few seconds."""
        self._ahead.release(name)
        header = self._headers[name]
        self._read += header.num_bytes
        self._unread[header.file] -= 1
        ended, now = not self._unread[header.file], time.monotonic()
        if ended:
            self._file, self._reader = None, None
        if self._progress is not None and (ended or now - self._reported > REPORT_S):
            self._reported = now
            rate = self._read / max(now - self._began, 1e-9)
            sizes = f"{part_of_bytes(self._read, self._total)}, {rate / 1e9:.2f} GB/s"
            self._progress(f"{header.file.name}: {sizes}", self._read / self._total)


def load_weights(
    directory: Path,
    read: Callable[[WeightSource], Model],
    dtype: torch.dtype,
    device: torch.device,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
    keep_quantised: bool = False,
    keep_blocks: bool = False,
) -> Model:
    """What `read` makes of the checkpoint in a directory, its parameters in `dtype` on `device`.

    `read` runs twice: first on parameters without memory, for the names, shapes and kinds of the tensors, so that all
    files are checked before the first tensor is read. `ignored` as for `check_weights`. `progress` is called with each
    file's name once it has been read, the bytes so far and their rate, and with the share of all bytes so far; in a
    large file also every few seconds. keep_quantised: as of a `WeightSource`. keep_blocks: whether a
    model may keep weights in the blocks of GGUF that a file has (`WeightSource.of_blocks`).

    Raises `CheckpointError` on a file that cannot be read, for weights that are no numbers, and as `check_weights`
    does.
    """
    contents = _check(directory, read, ignored)
    names = contents.order if reads_ahead(device) else []
    with ReadAhead(contents.headers, names, pinned=device.type == "cuda") as ahead:
        files = _CheckpointFiles(contents, dtype, device, progress, ahead, keep_quantised, keep_blocks)
        model = read(files)
        files.check_numbers()
        return model


def check_weights(
    directory: Path,
    read: Callable[[WeightSource], object],
    *,
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, TensorHeader]:
    """Compare what the safetensors files of a directory hold with what `read` reads, by their headers alone.

    Returns the tensors that the model takes, the parts of quantised weights under their own names. Tensors that it does
    not read and that `ignored` names are left aside. Raises `CheckpointError` on a tensor that is missing, is in two
    files, has another shape or type, or that the model does not know (a misread checkpoint must not run).
    """
    return _check(directory, read, ignored).headers


@dataclass(frozen=True)
class _Contents:
    """The tensors of a checkpoint that a model takes; the quantised weights among them by their projections; which of
    the tensors are known and not read; and in which order those come that are read whole, as they are stored."""

    headers: dict[str, TensorHeader]
    quantised: dict[str, StoredWeight]
    unread: set[str]
    order: list[str]


def _check(directory: Path, read: Callable[[WeightSource], object], ignored: Callable[[str], bool]) -> _Contents:
    listing = _Listing()
    read(listing)
    quantization = load_quantization(directory)
    found = read_headers(directory)
    weights, expected = _expected(listing, quantization, found)
    headers = {name: header for name, header in found.items() if name in expected or not ignored(name)}
    for name, header in headers.items():
        if name not in expected:
            raise CheckpointError(f"{header.file}: {surplus(name, header, weights, quantization)}")
        check_tensor(header, expected[name])
    missing = sorted(set(expected) - set(headers))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        name = stored_name({known: header.name for known, header in headers.items()}, missing[0])
        raise CheckpointError(f"{directory}: tensor '{name}'{more} is missing from its safetensors files")
    if quantization is not None and not weights:
        raise CheckpointError(
            f"{quantization.where} says that weights are quantised ({quantization.method}), but none of them is: take "
            "that field away, or the right files"
        )
    parts = {name for stored in weights.values() for name in stored.tensors.values()}
    order: list[str] = []
    for name in listing.tensors:
        stored = weights.get(name.removesuffix(".weight"))
        if stored is not None and name.endswith(".weight"):
            order += stored.tensors.values()
        elif name not in listing.sliced and not headers[name].blocks:
            order.append(name)
    return _Contents(headers, weights, set(headers) - parts - set(listing.tensors), order)


def _expected(
    listing: _Listing, quantization: Quantization | None, headers: Mapping[str, TensorHeader]
) -> tuple[dict[str, StoredWeight], dict[str, Expected]]:
    """The quantised weights, and what each tensor of the files must be."""
    weights: dict[str, StoredWeight] = {}
    expected = {
        name: Expected((tuple(tensor.shape),), FILE_DTYPES.get(tensor.dtype, FLOAT_DTYPES))
        for name, tensor in listing.tensors.items()
    }
    for projection, shape in listing.projections.items():
        scheme = None if quantization is None else quantization.scheme_of(projection, headers)
        if scheme is not None:
            weights[projection], parts = stored_weight(projection, shape, scheme, headers, listing.tensors)
            del expected[f"{projection}.weight"]
            expected |= parts
    return weights, expected


def expected_tensors(read: Callable[[WeightSource], object]) -> dict[str, torch.Tensor]:
    """The tensors that `read` reads: name -> a tensor of its shape on the device `meta`, int64 where it is integers."""
    listing = _Listing()
    read(listing)
    return listing.tensors

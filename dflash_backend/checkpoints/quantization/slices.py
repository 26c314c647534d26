"""Which part of each tensor of a quantised weight holds some of its rows or columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType

import torch

from dflash_backend.checkpoints.quantization.dequantise import check_shape, dequantise
from dflash_backend.checkpoints.quantization.scheme import TRANSPOSED, Layout, Scheme
from dflash_backend.checkpoints.quantization.stored import WORD_BITS, Role, StoredWeight

Index = tuple[slice, ...] | EllipsisType
Read = Callable[[str, Index], torch.Tensor]
"""Gives an index of the tensor of this name."""
SPLIT_WITHIN = (
    "the border between ranks lies within a word, a block with one scale, or columns in an order of their own; weights "
    "that it cuts so are dequantised whole and each rank keeps its part, which makes loading longer and takes the "
    "memory of numbers on any device"
)
"""What is said of a weight for which `read_parts` gives None."""


@dataclass(frozen=True)
class Slice:
    """Which parts of a tensor a rank has, one behind the other: `parts` of `num_parts` of equal size along `dim`."""

    dim: int
    parts: tuple[int, ...]
    num_parts: int

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which one of `shape` is the slice."""
        own = self.dim
        return (*shape[:own], shape[own] // len(self.parts) * self.num_parts, *shape[own + 1 :])

    def bounds(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Of each run of consecutive parts its first row or column and the one behind its last, in the whole. shape: of
        the slice."""
        size = shape[self.dim] // len(self.parts)
        found: list[tuple[int, int]] = []
        for part in self.parts:
            start = found.pop()[0] if found and found[-1][1] == part * size else part * size
            found.append((start, (part + 1) * size))
        return found


def read_parts(
    stored: StoredWeight, read: Read, shape: Sequence[int], dim: int, start: int, stop: int
) -> dict[Role, torch.Tensor] | None:
    """The parts of the rows (`dim` 0) or columns (1) from `start` to below `stop` of a weight of `shape`: of each what
    holds them, so that together they are a weight by the same scheme.

    None where there is no such thing: the bounds lie within a word or a block, or the columns are in blocks of others.
    Raises `CheckpointError` where the files contradict themselves.
    """
    scheme, indices = stored.scheme, _indices(stored, shape, dim, start, stop)
    if indices is None:
        return None
    found: dict[Role, torch.Tensor] = {}
    if dim == 1 and Role.ORDER in stored.tensors:
        size = scheme.block[1] or shape[1]
        order = read(stored.tensors[Role.ORDER], indices[Role.ORDER])
        if int(order.min()) < start // size or int(order.max()) >= math.ceil(stop / size):
            return None
        found[Role.ORDER] = order - start // size
    for role in stored.tensors.keys() - found.keys():
        found[role] = read(stored.tensors[role], indices[role])
    if Role.SHAPE in found:
        check_shape(stored, found.pop(Role.SHAPE), shape)
    return found


def splits_block(stored: StoredWeight, shape: Sequence[int], dim: int, start: int, stop: int) -> bool:
    """Whether the bounds, as of `read_parts`, lie within a word or a block."""
    return _indices(stored, shape, dim, start, stop) is None


def dequantise_slice(stored: StoredWeight, read: Read, out: torch.Tensor, taken: Slice) -> bool:
    """Make a slice of a weight in `out`, as `dequantise`; whether `read_parts` could not give a part of it, for which
    the weight was dequantised whole."""
    shape, done, made_whole = taken.whole(out.shape), 0, False
    for start, stop in taken.bounds(out.shape):
        own = out.narrow(taken.dim, done, stop - start)
        done += stop - start
        parts = read_parts(stored, read, shape, taken.dim, start, stop)
        if parts is not None:
            dequantise(stored, parts, own)
            continue
        made_whole = True
        whole = torch.empty(shape, dtype=out.dtype, device=out.device)
        dequantise(stored, {role: read(tensor, ...) for role, tensor in stored.tensors.items()}, whole)
        own.copy_(whole.narrow(taken.dim, start, stop - start))
    return made_whole


def _indices(stored: StoredWeight, shape: Sequence[int], dim: int, start: int, stop: int) -> dict[Role, Index] | None:
    """What `read_parts` reads of each part; None where the bounds lie within a word or a block."""
    scheme = stored.scheme
    if Role.ZERO in stored.tensors and scheme.layout is Layout.PACKED and scheme.block[0] is None:
        return None
    indices: dict[Role, Index] = {}
    for role in stored.tensors:
        place = _place(scheme, role, dim)
        if place is None:
            indices[role] = ...
            continue
        axis, step = place
        if start % step or (stop % step and stop != shape[dim]):
            return None
        indices[role] = (slice(None),) * axis + (slice(start // step, math.ceil(stop / step)),)
    return indices


def _place(scheme: Scheme, role: Role, dim: int) -> tuple[int, int] | None:
    """Along which axis of the part the weight's rows or columns lie, and how many of them one index there has; None
    where the part is the same for all of them."""
    per_word, block = WORD_BITS // scheme.bits, scheme.block[dim]
    axis = 1 - dim if scheme.layout in TRANSPOSED else dim
    if role is Role.CODES:
        packed_along = {Layout.PACKED: 1, Layout.GPTQ: 1, Layout.AWQ: 0}.get(scheme.layout)
        return axis, per_word if packed_along == dim else 1
    if role is Role.ZERO and dim == 0 and (scheme.layout is Layout.PACKED or scheme.layout in TRANSPOSED):
        return axis, per_word * (block or 1)
    if role in (Role.SCALE, Role.ZERO):
        return None if block is None else (axis, block)
    return (0, 1) if role is Role.ORDER and dim == 1 else None

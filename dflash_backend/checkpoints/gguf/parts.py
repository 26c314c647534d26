"""How tensors of a GGUF file make those of the converted checkpoint: which rows of which, in what order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_backend.checkpoints.gguf.reader import GgufTensor
from dflash_backend.checkpoints.spec import CheckpointError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """A tensor of the converted checkpoint, of this shape: the numbers of a tensor of the file from `start` on, or rows
    of several tensors of equal rows.

    columns: numbers of one row of the tensors; 0 where all come in order. rows: which rows, counted through all
    sources. column_order: of the numbers in each row. matrix_rows: not 0 where every `matrix_rows` rows are turned
    over, so that their columns become rows. change: what becomes of each number, as float32. repack: what is written of
    rows of whole blocks, uint8 `[num_rows, num_bytes]`, in place of numbers: as many bytes as `shape` has.
    """

    sources: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    start: int = 0
    columns: int = 0
    rows: Array | None = None
    column_order: Array | None = None
    matrix_rows: int = 0
    change: Callable[[Array], Array] | None = None
    repack: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            held = sum(math.prod(source.shape) // self.columns for source in self.sources)
            assert self.rows.size == 0 or int(self.rows.max()) < held


# Makes parts of a layer's tensors, which it takes out: tensors by their names after `blk.N.`, the config -> parts by
# their names after `model.layers.N.`.
LayerParts = Callable[[dict[str, GgufTensor], Mapping[str, Any]], dict[str, Part]]


def whole(tensor: GgufTensor, shape: tuple[int, ...] | None = None) -> Part:
    """A tensor as it is, maybe of another shape."""
    return Part((tensor,), shape or tensor.shape)


def in_order(tensor: GgufTensor, rows: Array, shape: tuple[int, ...] | None = None, **more: Any) -> Part:
    """A tensor whose rows `[num_rows]` change places; a vector's are of one number each."""
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    return Part((tensor,), shape or tensor.shape, columns=columns, rows=rows, **more)


def rotation_of_neighbours(rows: Array, head_dim: int) -> Array:
    """Where GGUF has the rows `[num_rows]` of a projection whose heads are rotated by halves: it has the two numbers
    that are rotated together beside one another."""
    head, within = rows // head_dim, rows % head_dim
    half = head_dim // 2
    found: Array = head * head_dim + 2 * (within % half) + within // half
    return found


def odd(tensor: GgufTensor, expected: str) -> CheckpointError:
    """The error for a tensor of another shape."""
    return CheckpointError(
        f"{tensor.file}: the tensor {tensor.name} has shape {list(tensor.shape)}; expected {expected}"
    )


def missing(name: str, tensors: Mapping[str, GgufTensor]) -> CheckpointError:
    """The error for a layer, of which these are tensors, that lacks one."""
    some = next(iter(tensors.values()), None)
    where = "" if some is None else f"{some.file}: beside {some.name} "
    return CheckpointError(f"{where}there is no tensor {name}")


def take(tensors: dict[str, GgufTensor], name: str, shape: tuple[int, ...]) -> GgufTensor:
    """Take a tensor of this shape out of a layer's. Raises `CheckpointError`."""
    if name not in tensors:
        raise missing(name, tensors)
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise odd(tensor, str(list(shape)))
    return tensor

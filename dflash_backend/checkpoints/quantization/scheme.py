"""The schemes in which a checkpoint holds the weights of projections, and the rules of its config by which a projection
has its scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.quantization.names import Names
from dflash_backend.checkpoints.spec import CheckpointError

PLAIN_DTYPES = ("F32", "BF16", "F16")


class Layout(Enum):
    """How the codes of a weight lie in their tensor."""

    FLOAT8 = "a float of 8 bits (e4m3) for each number"
    INT8 = "an int8 for each number, whatever its bits"
    PACKED = "compressed-tensors: an int32 holds neighbours of a row, the first in the lowest bits"
    GPTQ = "transposed: an int32 holds neighbours of a row of the weight, the first in the lowest bits"
    AWQ = "transposed: an int32 holds numbers of eight rows of the weight that follow another, in an order of its own"


TRANSPOSED = (Layout.GPTQ, Layout.AWQ)
GPTQ_BITS = (4, 8)
# The tensor of the codes, behind the projection's name.
CODES = {
    Layout.FLOAT8: "weight",
    Layout.INT8: "weight",
    Layout.PACKED: "weight_packed",
    Layout.GPTQ: "qweight",
    Layout.AWQ: "qweight",
}


@dataclass(frozen=True)
class Scheme:
    """A weight `[out, in]` in codes of `bits` bits; a number of it is `(code - zero point) * scale`.

    block: rows and columns that share a scale and a zero point, None for all of them. scale_names: the scale's tensor,
    the first of these that is there. symmetric: the zero point is the same for all codes and not stored. ordered: a
    tensor gives the block of each column. zero_offset: what is added to a stored zero point (GPTQ: 1).
    """

    layout: Layout
    bits: int
    block: tuple[int | None, int | None]
    scale_names: tuple[str, ...]
    symmetric: bool = True
    ordered: bool = False
    zero_offset: int = 0

    def blocks(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Numbers of blocks below and beside one another."""
        rows, columns = self.block
        return math.ceil(out_features / (rows or out_features)), math.ceil(in_features / (columns or in_features))

    def in_words(self) -> str:
        """The scheme, as `inspect` and the log show it."""
        rows, columns = self.block
        if rows is None:
            what = "tensor"
        elif columns is None:
            what = "row"
        else:
            what = f"{columns} weights of a row" if rows == 1 else f"{rows} x {columns} weights"
        zero = "" if self.symmetric else " and a zero point"
        name = "FP8 (e4m3)" if self.layout is Layout.FLOAT8 else f"INT{self.bits}"
        return f"{name}, a scale{zero} for each {what}" + (", columns in an order of their own" if self.ordered else "")


Rule = tuple[Names, Scheme | None]
"""Projections and their scheme; None leaves them as they are."""


@dataclass(frozen=True)
class Quantization:
    """What a config says of quantised weights.

    method: its `quant_method`. where: the config, for errors. rules: by falling precedence. ignored: projections that
    are not quantised. lists_all: every projection that is neither ignored nor without a rule is quantised; else it is
    where its tensors are (the lists of this method's published checkpoints leave out what no tool of it quantises).
    """

    method: str
    where: str
    rules: tuple[Rule, ...]
    ignored: Names
    lists_all: bool

    def scheme_of(self, projection: str, headers: Mapping[str, TensorHeader]) -> Scheme | None:
        """The scheme of a projection, by its name without `.weight`; None where it is not quantised. The config may
        mean it by that name or by the one that the files have for it."""
        names = {projection, _stored_projection(projection, headers)}
        if any(name in self.ignored for name in names):
            return None
        rules = (scheme for targets, scheme in self.rules if any(name in targets for name in names))
        scheme = next(rules, None)
        if scheme is None or self.lists_all:
            return scheme
        plain = headers.get(f"{projection}.weight")
        return None if plain is not None and plain.dtype in PLAIN_DTYPES else scheme


def _stored_projection(projection: str, headers: Mapping[str, TensorHeader]) -> str:
    """What the files call a projection."""
    tensors = (headers.get(f"{projection}.{codes}") for codes in CODES.values())
    return next((tensor.name.rpartition(".")[0] for tensor in tensors if tensor is not None), projection)


def damaged(projection: str, what: str) -> CheckpointError:
    """The error for values that no tool writes."""
    return CheckpointError(f"the quantised weight of '{projection}' {what}; it is damaged, download it again")

"""A weight that stays quantised in memory, in the layout that `quantised_linear` multiplies by.

A number is `(code - zero point) * scale`. Codes are e4m3 (Micikevicius et al., arXiv 2209.05433) or those of MXFP4
(`mxfp4.py`), which have no zero points, or integers of 8 or 4 bits, to which compressed-tensors', GPTQ's and AWQ's
words are all repacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dflash_kernels.mxfp4 import SCALE_BIAS, VALUES

FP8, INT8, INT4, MXFP4 = "fp8", "int8", "int4", "mxfp4"
# Two codes in a byte.
PACKED = (INT4, MXFP4)
INTEGERS = (INT8, INT4)
# The zero point of integers that have none of their own.
MIDDLE = {INT8: 128, INT4: 8}
# Columns that are multiplied at a time: at most, and at least, since tensor cores take 16.
MAX_RUN, MIN_RUN = 128, 32


def run_of(columns: int) -> int:
    """Columns that are multiplied at a time where `columns` share a scale: a power of two that divides them."""
    return min(MAX_RUN, columns & -columns)


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight `[out_features, in_features]` in codes.

    codes: of 8 bits uint8 `[out_features, in_features]`, integers from 0 on; of 4 bits uint8
    `[in_features / run, out_features, run / 2]`, for each run of columns and each row a byte for two columns: number j
    of a run in the lower half of byte j, number `run / 2 + j` in its upper half. So the bytes that a program reads at a
    time lie side by side, and each half of them is a run of columns.
    scales: `[ceil(in_features / columns), ceil(out_features / rows)]`, float32 for e4m3, uint8 (e8m0) for MXFP4,
    else of any floating dtype.
    zeros: uint8 of the same shape, for integers; None where all are `MIDDLE`.
    rows, columns: how many of the weight's share a scale.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    rows: int
    columns: int

    @classmethod
    def of_codes(
        cls,
        kind: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        rows: int,
        columns: int,
    ) -> QuantisedWeight:
        """codes: uint8 `[out_features, in_features]`, one in a byte, integers from 0 on. scales, zeros: as checkpoints
        have them, `[ceil(out_features / rows), ceil(in_features / columns)]`."""
        packed = pack(codes, run_of(columns)) if kind in PACKED else codes.contiguous()
        beside = None if zeros is None or bool((zeros == MIDDLE[kind]).all()) else zeros.T.contiguous()
        return cls(kind, packed, scales.T.contiguous(), beside, rows, columns)

    @property
    def shape(self) -> tuple[int, int]:
        """out_features, in_features."""
        if self.kind not in PACKED:
            return self.codes.shape[0], self.codes.shape[1]
        runs, out, half = self.codes.shape
        return out, runs * 2 * half

    @property
    def run(self) -> int:
        """Columns that are multiplied at a time; the last ones may be fewer where codes have 8 bits."""
        return run_of(self.columns) if self.kind in PACKED or len(self.scales) > 1 else MAX_RUN

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, which is what a product reads."""
        tensors = [self.codes, self.scales, *([] if self.zeros is None else [self.zeros])]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def taken(self, index: torch.Tensor | slice) -> QuantisedWeight:
        """The rows `index` alone: a slice, or int64 indices."""
        out, _ = self.shape
        first, last = (0, 0) if isinstance(index, torch.Tensor) else index.indices(out)[:2]
        in_blocks = isinstance(index, slice) and index.step in (None, 1) and first % self.rows == 0
        whole = self if in_blocks else self.with_scale_of_each_row()
        of_scales = slice(first // whole.rows, math.ceil(last / whole.rows)) if in_blocks else index
        return replace(
            whole,
            codes=whole.codes[(slice(None),) * self.dim_of_rows + (index,)].contiguous(),
            scales=whole.scales[:, of_scales].contiguous(),
            zeros=None if whole.zeros is None else whole.zeros[:, of_scales].contiguous(),
        )

    def with_scale_of_each_row(self) -> QuantisedWeight:
        """The same numbers, with `rows` of 1."""
        if self.rows == 1:
            return self
        out, _ = self.shape
        scales, zeros = (
            None if each is None else each.repeat_interleave(self.rows, dim=1)[:, :out].contiguous()
            for each in (self.scales, self.zeros)
        )
        assert scales is not None
        return replace(self, scales=scales, zeros=zeros, rows=1)

    @staticmethod
    def alike(parts: Sequence[QuantisedWeight]) -> bool:
        """Whether the rows of all of them can be those of one weight."""
        return len({(part.kind, part.shape[1], part.columns) for part in parts}) == 1

    @classmethod
    def stacked(cls, parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
        """The rows of all parts, which are `alike`, below one another, in memory of their own."""
        return _below_one_another(parts, torch.cat([part.codes for part in parts], dim=parts[0].dim_of_rows))

    @property
    def dim_of_rows(self) -> int:
        """The dimension of `codes` along which rows lie."""
        return 1 if self.kind in PACKED else 0

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers, `[out_features, in_features]`: in float32, then rounded to `dtype`."""
        out, inner = self.shape
        exact = self.scales.float()
        if self.kind == MXFP4:
            exact = torch.ldexp(torch.ones_like(exact), exact - SCALE_BIAS)
        scales = _spread(exact, self.rows, self.columns, out, inner)
        if self.kind == MXFP4:
            values = torch.tensor(VALUES, device=scales.device)
            return (values[unpack(self.codes).int()] * scales).to(dtype)
        if self.kind == FP8:
            return (self.codes.view(torch.float8_e4m3fn).float() * scales).to(dtype)
        zeros = _spread(_zeros_of(self).float(), self.rows, self.columns, out, inner)
        codes = unpack(self.codes) if self.kind == INT4 else self.codes
        return ((codes.float() - zeros) * scales).to(dtype)


class WeightStack:
    """Weights of one shape, which are `alike`, that become one weight: their rows below one another. Each goes to its
    place as it comes, so that beside the whole there is memory for one of them alone."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._parts: list[QuantisedWeight] = []
        self._codes: torch.Tensor | None = None

    def add(self, part: QuantisedWeight) -> None:
        """The next weight."""
        along, (size, _) = part.dim_of_rows, part.shape
        if self._codes is None:
            shape = list(part.codes.shape)
            shape[along] *= self._num_parts
            self._codes = part.codes.new_empty(shape)
        place = self._codes.narrow(along, len(self._parts) * size, size)
        place.copy_(part.codes)
        self._parts.append(replace(part, codes=place))

    def whole(self) -> QuantisedWeight:
        """All of them, once the last one is there."""
        assert self._codes is not None
        assert len(self._parts) == self._num_parts
        return _below_one_another(self._parts, self._codes)


def _below_one_another(parts: Sequence[QuantisedWeight], codes: torch.Tensor) -> QuantisedWeight:
    """One weight of the rows of all parts, whose codes are `codes`."""
    first = parts[0]
    in_blocks = all(part.rows == first.rows for part in parts)
    if not in_blocks or any(part.shape[0] % part.rows for part in parts[:-1]):
        parts = [part.with_scale_of_each_row() for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        filled = [_zeros_of(part) for part in parts]
        zeros = torch.cat(filled, dim=1)
    return replace(parts[0], codes=codes, scales=torch.cat([part.scales for part in parts], dim=1), zeros=zeros)


def _zeros_of(weight: QuantisedWeight) -> torch.Tensor:
    """The zero points, as a tensor in any case."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, MIDDLE[weight.kind], dtype=torch.uint8)


def _spread(blocks: torch.Tensor, rows: int, columns: int, out: int, inner: int) -> torch.Tensor:
    """What each number of a weight has, from what each block has: `[beside, below]` -> `[out, inner]`."""
    return blocks.T.repeat_interleave(rows, dim=0)[:out].repeat_interleave(columns, dim=1)[:, :inner]


def pack(codes: torch.Tensor, run: int) -> torch.Tensor:
    """Codes of 4 bits, one in a byte, uint8 `[out, in]`, as `QuantisedWeight.codes`; `run` divides `in`."""
    low, high = codes.view(len(codes), -1, 2, run // 2).unbind(2)
    return (low | (high << 4)).transpose(0, 1).contiguous()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """What `pack` took: uint8 `[out, in]`."""
    halves = torch.stack([packed & 0x0F, packed >> 4], dim=2)
    return halves.permute(1, 0, 2, 3).reshape(packed.shape[1], -1)

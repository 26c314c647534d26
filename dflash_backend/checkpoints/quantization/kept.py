"""Weights that stay quantised in memory: their parts as products take them, whatever layout the files have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.checkpoints.quantization.dequantise import UNPACK, Parts, check_small_parts
from dflash_backend.checkpoints.quantization.keepable import FP8, TRANSPOSED, kind_of
from dflash_backend.checkpoints.quantization.scheme import Layout, damaged
from dflash_backend.checkpoints.quantization.stored import Role, StoredWeight

# Of e4m3: the largest number, and the codes that are none.
LARGEST, NOT_A_NUMBER = 448.0, 0x7F
# What makes signed integers of 8 bits unsigned.
SIGNED = 128


@dataclass(frozen=True)
class KeptWeight:
    """A weight `[out_features, in_features]`: a number is `(code - zero point) * scale`.

    kind: FP8, of e4m3, INT8 or INT4. codes: uint8 `[out_features, in_features]`, one in a byte, integers from 0 on.
    scales: `[ceil(out_features / rows), ceil(in_features / columns)]`, float32 for FP8, else of the file's dtype.
    zeros: uint8 of the same shape, for integers. rows, columns: how many share a scale.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    rows: int
    columns: int


def keep(stored: StoredWeight, parts: Parts, shape: tuple[int, int], device: torch.device) -> KeptWeight:
    """The weight of `shape` from its parts as the files have them. Raises `CheckpointError` as `dequantise` does."""
    check_small_parts(stored, parts, shape)
    scheme = stored.scheme
    found = kind_of(scheme, shape[1], shape[0])
    assert found is not None
    kind, columns = found
    moved = {role: part.to(device) for role, part in parts.items()}
    codes, zeros = UNPACK[scheme.layout](scheme, moved, *shape)
    scales = moved[Role.SCALE]
    scales = scales.T if scheme.layout in TRANSPOSED else scales.reshape(scheme.blocks(*shape))
    if kind == FP8:
        scales, zeros = scales.float(), None
        codes = codes.contiguous().view(torch.uint8)
        has_nan = bool(((codes & NOT_A_NUMBER) == NOT_A_NUMBER).any())
    else:
        has_nan = False
        if scheme.layout is Layout.INT8:  # signed ones
            codes, zeros = codes.int() + SIGNED, None if zeros is None else zeros + SIGNED
        codes = codes.to(torch.uint8)
    if has_nan or not bool((scales.float() * LARGEST).isfinite().all()):
        raise damaged(stored.projection, "has numbers that are not finite")
    return KeptWeight(
        kind,
        codes,
        scales.contiguous(),
        None if zeros is None else zeros.to(torch.uint8).contiguous(),
        scheme.block[0] or shape[0],
        columns,
    )


def is_in_order(groups: torch.Tensor, columns: int | None) -> bool:
    """Whether the group of each column, int `[in_features]`, is that of the `columns` that it lies among; None for a
    single one of all columns."""
    expected = torch.arange(len(groups)) // (columns or len(groups))
    return bool((groups.long() == expected).all())

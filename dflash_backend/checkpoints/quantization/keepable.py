"""Which weights can stay quantised in memory, by their schemes and the headers of their files.

Where a device has products of quantised weights, a projection keeps its codes, which become numbers as it is
multiplied. All weights that cannot are dequantised as they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.quantization.scheme import Layout, Quantization, Scheme
from dflash_backend.checkpoints.quantization.stored import quantised, shape_of

FP8, INT8, INT4 = "fp8", "int8", "int4"
# Columns that share a scale are multiplied together, as many at a time as the largest power of two that divides them.
MIN_RUN = 32
# Below, a projection is too small for its size to matter, and others than products read it.
MIN_OUTPUTS = 16
TRANSPOSED = (Layout.GPTQ, Layout.AWQ)
# Projections that are never multiplied by themselves, by parts of their names: experts are an operation of their own,
# and those of gated delta nets are taken apart as they are read.
NOT_ALONE = (".experts.", ".linear_attn.")
FLOAT32_BYTES, FLOAT16_BYTES, ZERO_BYTES = 4, 2, 1


def kind_of(scheme: Scheme, in_features: int, out_features: int) -> tuple[str, int] | None:
    """What a weight of this scheme and width is kept as, and how many of its columns share a scale; None where it is
    dequantised: columns in an order of their own, and groups that no tile is made of."""
    in_bytes = scheme.layout in (Layout.FLOAT8, Layout.INT8)
    kind = FP8 if scheme.layout is Layout.FLOAT8 else INT8 if in_bytes or scheme.bits == 8 else INT4
    columns = min(scheme.block[1] or in_features, in_features)
    # One scale for all columns multiplies their whole sum, wherever the columns are cut.
    fits = columns & -columns >= MIN_RUN or (kind != INT4 and columns == in_features)
    if scheme.ordered or not fits or out_features < MIN_OUTPUTS or not (in_bytes or scheme.block[0] == 1):
        return None
    if kind == INT4 and in_features % columns:
        return None
    return kind, columns


def kept_as_one(schemes: Iterable[tuple[Scheme, int]], in_features: int) -> bool:
    """Whether weights of these schemes and numbers of rows can be kept as one, their rows below one another."""
    kinds = {kind_of(scheme, in_features, rows) for scheme, rows in schemes}
    return len(kinds) == 1 and None not in kinds


def kept_bytes(headers: Mapping[str, TensorHeader], quantization: Quantization | None) -> tuple[int, int]:
    """Bytes of the weights of a checkpoint that are kept, with their scales and zero points, and how many numbers these
    weights have. Where projections of several schemes are multiplied as one, they are dequantised all the same, which
    headers do not show."""
    num_bytes = num_numbers = 0
    if quantization is None:
        return num_bytes, num_numbers
    for projection, scheme in quantised(headers, quantization).items():
        out, inner = shape_of(projection, scheme, headers)
        kept = kind_of(scheme, inner, out)
        if kept is None or any(part in projection for part in NOT_ALONE):
            continue
        below, beside = scheme.blocks(out, inner)
        if scheme.layout is Layout.FLOAT8:
            num_bytes += out * inner + below * beside * FLOAT32_BYTES
        else:
            of_block = FLOAT16_BYTES if scheme.symmetric else FLOAT16_BYTES + ZERO_BYTES
            num_bytes += out * inner if kept[0] == INT8 else math.ceil(out * inner / 2)
            num_bytes += below * beside * of_block
        num_numbers += out * inner
    return num_bytes, num_numbers

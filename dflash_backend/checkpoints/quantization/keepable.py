"""Which weights can stay quantised in memory, by their schemes and the headers of their files.

Where a device has products of quantised weights, a projection keeps its codes, which become numbers as it is
multiplied. All weights that cannot are dequantised as they are loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from dflash_backend.checkpoints.files import TensorHeader, num_weights
from dflash_backend.checkpoints.quantization.scheme import Layout, Quantization, Scheme
from dflash_backend.checkpoints.quantization.stored import quantised, shape_of

FP8, INT8, INT4 = "fp8", "int8", "int4"
# Columns that share a scale are multiplied together, as many at a time as the largest power of two that divides them.
MIN_RUN = 32
# Below, a projection is too small for its size to matter, and others than products read it.
MIN_OUTPUTS = 16
# A projection of an expert: what is before is that of its layer, the end says which it is.
OF_EXPERT = re.compile(r"(.+\.experts\.)\d+\.(\w+)")
INTO_EXPERTS = ("gate_proj", "up_proj")
# Of the blocks and scales of gpt-oss's experts, which no quantisation config here speaks of.
MXFP4_DTYPE = "U8"
FLOAT32_BYTES, FLOAT16_BYTES, ZERO_BYTES = 4, 2, 1
Kind = tuple[str, int] | None
"""What a weight is kept as, and how many of its columns share a scale; None where it is dequantised."""


def kind_of(scheme: Scheme, in_features: int, out_features: int) -> Kind:
    """What a weight of this scheme and width is kept as, and how many of its columns share a scale; None where it is
    dequantised, as groups that no tile is made of."""
    in_bytes = scheme.layout in (Layout.FLOAT8, Layout.INT8)
    kind = FP8 if scheme.layout is Layout.FLOAT8 else INT8 if in_bytes or scheme.bits == 8 else INT4
    columns = min(scheme.block[1] or in_features, in_features)
    # One scale for all columns multiplies their whole sum, wherever the columns are cut.
    fits = columns & -columns >= MIN_RUN or (kind != INT4 and columns == in_features)
    if not fits or out_features < MIN_OUTPUTS or not (in_bytes or scheme.block[0] == 1):
        return None
    return None if kind == INT4 and in_features % columns else (kind, columns)


def kept_as_one(schemes: Iterable[tuple[Scheme, int]], in_features: int) -> bool:
    """Whether weights of these schemes and numbers of rows can be kept as one, their rows below one another."""
    kinds = {kind_of(scheme, in_features, rows) for scheme, rows in schemes}
    return len(kinds) == 1 and None not in kinds


def dequantised_experts(kinds: Mapping[str, Kind]) -> set[str]:
    """What the names of the experts' projections begin with in the layers whose experts are dequantised: all of a layer
    are, where those of one projection are not all kept as the same. kinds: of projections, None for one that is not
    quantised too."""
    found: dict[tuple[str, bool], set[Kind]] = {}
    for projection, kind in kinds.items():
        if match := OF_EXPERT.fullmatch(projection):
            found.setdefault((match[1], match[2] in INTO_EXPERTS), set()).add(kind)
    return {layer for (layer, _), each in found.items() if len(each) > 1 or None in each}


def is_kept(projection: str, kinds: Mapping[str, Kind], dequantised: set[str]) -> bool:
    """Whether a projection is kept, by what each can be kept as and `dequantised_experts`."""
    match = OF_EXPERT.fullmatch(projection)
    among = match is not None and match[1] in dequantised
    return kinds[projection] is not None and not among


def holds_mxfp4(headers: Mapping[str, TensorHeader]) -> bool:
    """Whether some of these tensors are blocks or scales of gpt-oss's experts in MXFP4."""
    return any(header.dtype == MXFP4_DTYPE for header in headers.values())


def kept_bytes(headers: Mapping[str, TensorHeader], quantization: Quantization | None) -> tuple[int, int]:
    """Bytes of the weights of a checkpoint that are kept, with their scales and zero points, and how many numbers these
    weights have. Where projections of several schemes are multiplied as one, they are dequantised all the same, which
    headers do not show, but of experts."""
    packed = {name: header for name, header in headers.items() if header.dtype == MXFP4_DTYPE}
    num_bytes = sum(header.num_bytes for header in packed.values())
    num_numbers = sum(num_weights(name, header) for name, header in packed.items())
    if quantization is None:
        return num_bytes, num_numbers
    schemes = quantised(headers, quantization)
    shapes = {projection: shape_of(projection, scheme, headers) for projection, scheme in schemes.items()}
    kinds: dict[str, Kind] = {name.rpartition(".")[0]: None for name in headers}
    for projection, scheme in schemes.items():
        out, inner = shapes[projection]
        own_order = scheme.ordered and OF_EXPERT.fullmatch(projection)
        kinds[projection] = None if own_order else kind_of(scheme, inner, out)
    dequantised = dequantised_experts(kinds)
    for projection, scheme in schemes.items():
        kind = kinds[projection]
        if kind is not None and is_kept(projection, kinds, dequantised):
            num_bytes += _bytes_of(projection, scheme, kind, *shapes[projection])
            num_numbers += math.prod(shapes[projection])
    return num_bytes, num_numbers


def _bytes_of(projection: str, scheme: Scheme, kind: tuple[str, int], out: int, inner: int) -> int:
    """Bytes of a weight that is kept."""
    below, beside = scheme.blocks(out, inner)
    if OF_EXPERT.fullmatch(projection) and out % (scheme.block[0] or out):
        below = out  # blocks that would end in the next expert's rows become a scale for each row
    if scheme.layout is Layout.FLOAT8:
        return out * inner + below * beside * FLOAT32_BYTES
    of_block = FLOAT16_BYTES if scheme.symmetric else FLOAT16_BYTES + ZERO_BYTES
    codes = out * inner if kind[0] == INT8 else math.ceil(out * inner / 2)
    return codes + below * beside * of_block

"""Which tensors hold a quantised weight, and of what shapes and types they must be, by headers alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dflash_backend.checkpoints.files import TensorHeader, num_weights
from dflash_backend.checkpoints.quantization.scheme import (
    CODES,
    GPTQ_BITS,
    PLAIN_DTYPES,
    TRANSPOSED,
    Layout,
    Quantization,
    Scheme,
)
from dflash_backend.checkpoints.spec import CheckpointError

WORD_BITS = 32
INTEGERS = ("I32", "I64")
# What only the tensors of a quantised weight are called, behind its projection's name.
PARTS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "qzeros", "scales", "weight_zero_point")


class Role(Enum):
    """What a part is in the making of the weight."""

    CODES = "codes"
    SCALE = "scale"
    ZERO = "zero points"
    ORDER = "block of each column"
    SHAPE = "shape of the weight"
    ZERO_BIAS = "bias that the model has not, of zeros"
    UNREAD = "scale of activations, which are not quantised here"


@dataclass(frozen=True)
class Part:
    """One tensor of a weight: `names` behind the projection's, of which the first that is there counts, the shapes and
    types that it may have, whether it must be there."""

    role: Role
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    required: bool = True


@dataclass(frozen=True)
class StoredWeight:
    """The weight of `projection` in the files: its scheme, and the tensor of each part that is read."""

    projection: str
    scheme: Scheme
    tensors: dict[Role, str]


@dataclass(frozen=True)
class Expected:
    """What a tensor of the files must be."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


def stored_weight(
    projection: str,
    shape: tuple[int, int],
    scheme: Scheme,
    headers: Collection[str],
    model_has: Collection[str],
) -> tuple[StoredWeight, dict[str, Expected]]:
    """The tensors of a weight of `shape`, `[out, in]`, and what each must be. headers: names of the files' tensors;
    model_has: those that the model reads. Raises `CheckpointError` where the scheme does not fit the shape."""
    if scheme.layout is Layout.GPTQ and scheme.bits not in GPTQ_BITS:
        raise CheckpointError(
            f"'{projection}' has INT{scheme.bits} by a rule of 'dynamic' in config.json; expected 4 or 8 bits: other "
            "numbers of bits are not supported"
        )
    tensors: dict[Role, str] = {}
    expected: dict[str, Expected] = {}
    for part in _parts(projection, shape, scheme):
        names = [f"{projection}.{name}" for name in part.names]
        if part.role is Role.ZERO_BIAS and names[0] in model_has:
            continue
        name = next((name for name in names if name in headers), names[0])
        if name not in headers and not part.required:
            continue
        expected[name] = Expected(part.shapes, part.dtypes)
        if part.role is not Role.UNREAD:
            tensors[part.role] = name
    return StoredWeight(projection, scheme, tensors), expected


def _parts(projection: str, shape: tuple[int, int], scheme: Scheme) -> Iterator[Part]:
    out, inner = shape
    below, beside = scheme.blocks(out, inner)
    codes, per_word = CODES[scheme.layout], WORD_BITS // scheme.bits
    if scheme.layout in TRANSPOSED:
        packed = inner if scheme.layout is Layout.GPTQ else out
        if packed % per_word or out % per_word:
            raise CheckpointError(
                f"'{projection}' has a weight of shape {[out, inner]}, which {scheme.layout.name} in "
                f"{scheme.bits} bits cannot hold: an int32 has {per_word} numbers"
            )
        words = (inner // per_word, out) if scheme.layout is Layout.GPTQ else (inner, out // per_word)
        yield Part(Role.CODES, (codes,), (words,), ("I32",))
        yield Part(Role.SCALE, scheme.scale_names, ((beside, out),), PLAIN_DTYPES)
        yield Part(Role.ZERO, ("qzeros",), ((beside, out // per_word),), ("I32",))
        if scheme.layout is Layout.GPTQ:
            yield Part(Role.ORDER, ("g_idx",), ((inner,),), INTEGERS, required=scheme.ordered)
            # AutoGPTQ gives every projection a bias.
            yield Part(Role.ZERO_BIAS, ("bias",), ((out,),), PLAIN_DTYPES, required=False)
        return
    scales: tuple[tuple[int, ...], ...] = ((below, beside),)
    if scheme.block == (None, None):
        scales += ((), (1,))
    elif scheme.block == (1, None):
        scales += ((out,),)
    packed = scheme.layout is Layout.PACKED
    words = (out, math.ceil(inner * scheme.bits / WORD_BITS)) if packed else shape
    dtype = {Layout.FLOAT8: "F8_E4M3", Layout.INT8: "I8", Layout.PACKED: "I32"}[scheme.layout]
    yield Part(Role.CODES, (codes,), (words,), (dtype,))
    yield Part(Role.SCALE, scheme.scale_names, scales, PLAIN_DTYPES)
    if packed:
        yield Part(Role.SHAPE, ("weight_shape",), ((2,),), INTEGERS)
        zeros: tuple[tuple[int, ...], ...] = ((math.ceil(out * scheme.bits / WORD_BITS), beside),)
    else:
        zeros = scales
    if not scheme.symmetric:
        yield Part(Role.ZERO, ("weight_zero_point",), zeros, ("I32",) if packed else ("I8",))
    if scheme.ordered:
        yield Part(Role.ORDER, ("weight_g_idx",), ((inner,),), INTEGERS)
    for name in ("input_scale", "activation_scale", "input_zero_point"):
        yield Part(Role.UNREAD, (name,), ((), (1,), (1, 1)), (*PLAIN_DTYPES, "I8", "F8_E4M3"), required=False)


def check_tensor(header: TensorHeader, expected: Expected) -> None:
    """Raises `CheckpointError` where a tensor is not what it must be."""
    if header.shape not in expected.shapes:
        raise CheckpointError(
            f"{header.file}: tensor '{header.name}' has shape {list(header.shape)}; config.json asks for "
            + " or ".join(str(list(shape)) for shape in expected.shapes)
        )
    if header.dtype not in expected.dtypes:
        raise CheckpointError(
            f"{header.file}: tensor '{header.name}' is {header.dtype}; expected one of {', '.join(expected.dtypes)}"
        )


def surplus(
    name: str, header: TensorHeader, weights: Mapping[str, StoredWeight], quantization: Quantization | None
) -> str:
    """What is wrong with a tensor that no part of the model is read from."""
    text = f"tensor '{header.name}' of shape {list(header.shape)} is not part of this model"
    projection, _, part = name.rpartition(".")
    if part in PARTS and quantization is None:
        return (
            f"{text}: it is of a quantised weight, and config.json has no quantization_config that says how to read it"
        )
    if part in PARTS and quantization is not None and projection in quantization.ignored:
        return f"{text}: by {quantization.where} '{projection}' is not quantised"
    if part == "weight" and projection in weights:
        tensors = ", ".join(weights[projection].tensors.values())
        return f"{text}: by config.json '{projection}' is quantised, which takes {tensors}"
    return text


def quantised(headers: Mapping[str, TensorHeader], quantization: Quantization) -> dict[str, Scheme]:
    """The projections of the files that are quantised, with their schemes, by the names and types of tensors alone."""
    found: dict[str, Scheme] = {}
    for name, header in headers.items():
        projection, _, part = name.rpartition(".")
        if part in CODES.values() and (part != "weight" or header.dtype not in PLAIN_DTYPES):
            scheme = quantization.scheme_of(projection, headers)
            if scheme is not None and CODES[scheme.layout] == part:
                found[projection] = scheme
    return found


def shape_of(projection: str, scheme: Scheme, headers: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """Rows and columns of the weight, rounded up to whole words."""
    first, second = headers[f"{projection}.{CODES[scheme.layout]}"].shape
    per_word = WORD_BITS // scheme.bits
    if scheme.layout is Layout.GPTQ:
        return second, first * per_word
    if scheme.layout is Layout.AWQ:
        return second * per_word, first
    return first, second * per_word if scheme.layout is Layout.PACKED else second


def num_parameters(headers: Mapping[str, TensorHeader], quantization: Quantization | None) -> int:
    """How many numbers the tensors of a checkpoint are once its weights are dequantised."""
    if quantization is None:
        return sum(num_weights(name, header) for name, header in headers.items())
    weights = quantised(headers, quantization)
    plain = sum(num_weights(name, header) for name, header in headers.items() if name.rpartition(".")[0] not in weights)
    # A bias beside a quantised weight, which is a few numbers, counts with neither.
    return plain + sum(math.prod(shape_of(name, scheme, headers)) for name, scheme in weights.items())


def holds_weight(headers: Collection[str], projection: str) -> bool:
    """Whether a checkpoint has the weight of a projection, quantised or not, by the names of its tensors."""
    return any(f"{projection}.{codes}" in headers for codes in CODES.values())

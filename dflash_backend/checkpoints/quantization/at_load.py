"""Quantises the weights of a plain checkpoint while it is loaded: FP8 with a scale for each row, as tools write it.

The values are those that such a checkpoint stands for: what FP8 costs shows before one is made. Where products by
quantised weights are there, projections stay FP8; else they become numbers of the dtype that is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.quantization.dequantise import CHUNK
from dflash_backend.checkpoints.quantization.keepable import (
    FLOAT32_BYTES,
    FP8,
    dequantised_experts,
    is_kept,
    kept_as_one,
    kind_of,
)
from dflash_backend.checkpoints.quantization.kept import KeptWeight
from dflash_backend.checkpoints.quantization.scheme import Layout, Scheme, damaged
from dflash_backend.checkpoints.quantization.slices import Slice
from dflash_backend.checkpoints.weights import NO_SLICES, Slices, WeightSource

CODE = torch.float8_e4m3fn
LARGEST = torch.finfo(CODE).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SCHEME = Scheme(Layout.FLOAT8, 8, (1, None), ("weight_scale",))
EMBEDDING = "embed_tokens"
# The experts of a layer in one tensor `[num_experts, out_features, in_features]`, by the ends of their names.
STACKED = ("experts.gate_up_proj", "experts.down_proj")
# Projections that published FP8 checkpoints leave as they are, by the ends of their names.
KEPT = frozenset(("lm_head", "gate", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b"))


class Fp8Source(WeightSource):
    """Another source, whose projections have the weights that FP8 would hold in their place. The LM head, routers, the
    gates of shared experts and of delta nets, and all that is no projection stay as they are."""

    def __init__(self, plain: WeightSource) -> None:
        super().__init__(plain.dtype, plain.device, plain.keep_quantised)
        self._plain = plain

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        self._read(self._plain.read, name, out, taken, name.endswith(STACKED))

    def read_projection(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        self._read(self._plain.read_projection, name, out, taken, not _stays(name.removesuffix(".weight")))

    def _read(
        self, read: Callable[..., None], name: str, out: torch.Tensor, taken: Slice | None, is_rounded: bool
    ) -> None:
        """Of a slice the whole is rounded first where it is, since a row has one scale. Raises `CheckpointError` for
        weights that are not finite."""
        if out.is_meta or not is_rounded:
            read(name, out, taken)
            return
        whole = out if taken is None else out.new_empty(taken.whole(out.shape))
        read(name, whole)
        round_to_fp8(name.removesuffix(".weight"), whole)
        if taken is not None:
            _take(whole, out, taken)

    def keeps(
        self, names: Mapping[str, int], in_features: int, *, ordered: bool = True, slices: Slices = NO_SLICES
    ) -> bool:
        as_one = kept_as_one(((SCHEME, rows) for rows in names.values()), in_features)
        return self.keep_quantised and as_one and not any(_stays(name.removesuffix(".weight")) for name in names)

    def read_kept(self, name: str, out_features: int, in_features: int, taken: Slice | None = None) -> KeptWeight:
        """Of a slice of columns the whole is read, since a row has one scale. Raises `CheckpointError` for weights that
        are not finite."""
        projection, shape = name.removesuffix(".weight"), (out_features, in_features)
        if taken is None or taken.dim == 0:
            self._plain.read_projection(name, plain := self.empty(*shape), taken)
            return _made(projection, plain)
        self._plain.read_projection(name, plain := self.empty(*taken.whole(shape)))
        made = _made(projection, plain)
        _take(made.codes, columns := made.codes.new_empty(shape), taken)
        return replace(made, codes=columns, columns=in_features)

    def keeps_experts(self, name: str, out_features: int, in_features: int) -> bool:
        return self.keep_quantised and kept_as_one([(SCHEME, out_features)], in_features)

    def read_kept_experts(self, name: str, num_experts: int, out_features: int, in_features: int) -> KeptWeight:
        """Raises `CheckpointError` for weights that are not finite."""
        self._plain.read(name, plain := self.empty(num_experts, out_features, in_features))
        return _made(name, plain.view(-1, in_features))


def _made(projection: str, plain: torch.Tensor) -> KeptWeight:
    """`[out_features, in_features]` as FP8 with a scale for each row. Raises `CheckpointError`."""
    codes = torch.empty(plain.shape, dtype=torch.uint8, device=plain.device)
    scales = torch.empty(len(plain), 1, device=plain.device)
    for rows in _chunks(plain):
        numbers = plain[rows].float()
        scales[rows] = _scales(projection, numbers)
        codes[rows] = (numbers / scales[rows]).to(CODE).view(torch.uint8)
    return KeptWeight(FP8, codes, scales, None, 1, plain.shape[1])


def _take(whole: torch.Tensor, out: torch.Tensor, taken: Slice) -> None:
    chunks = whole.chunk(taken.num_parts, taken.dim)
    out.copy_(torch.cat([chunks[part] for part in taken.parts], taken.dim))


def round_to_fp8(projection: str, weight: torch.Tensor) -> None:
    """Make each row of `weight`, `[..., in_features]` and contiguous, what FP8 holds of it: `code * scale` in float32,
    the scale the row's largest number by that of e4m3. Raises `CheckpointError` where a number is not finite."""
    weights = weight.view(-1, weight.shape[-1])
    for rows in _chunks(weights):
        numbers = weights[rows].float()
        scale = _scales(projection, numbers)
        weights[rows] = (numbers / scale).to(CODE).float() * scale


def _chunks(weight: torch.Tensor) -> Iterator[slice]:
    """Some of the rows of `[n, in_features]` at a time."""
    step = max(1, CHUNK // weight.shape[1])
    return (slice(first, first + step) for first in range(0, len(weight), step))


def _scales(projection: str, numbers: torch.Tensor) -> torch.Tensor:
    """The scale of each row of float32 `[n, in_features]`: `[n, 1]`."""
    largest = numbers.abs().amax(dim=1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise damaged(projection, "has numbers that are not finite")
    return (largest / LARGEST).clamp(min=SMALLEST_SCALE)


def made_fp8_bytes(headers: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """Bytes of the weights of a plain checkpoint that are kept in FP8, with their scales, and how many numbers these
    weights have, by the headers."""
    shapes = {}
    for name, header in headers.items():
        projection, _, part = name.rpartition(".")
        if len(header.shape) == 3 and name.endswith(STACKED):
            shapes[name] = math.prod(header.shape[:2]), header.shape[2]
        elif part == "weight" and len(header.shape) == 2 and not (_stays(projection) or projection.endswith(EMBEDDING)):
            shapes[projection] = header.shape[0], header.shape[1]
    kinds = {projection: kind_of(SCHEME, columns, rows) for projection, (rows, columns) in shapes.items()}
    dequantised = dequantised_experts(kinds)
    kept = [shape for projection, shape in shapes.items() if is_kept(projection, kinds, dequantised)]
    return sum(rows * (columns + FLOAT32_BYTES) for rows, columns in kept), sum(map(math.prod, kept))


def _stays(projection: str) -> bool:
    """Whether a projection stays as it is."""
    return projection.rpartition(".")[2] in KEPT

"""A launch of each kind of product of quantised weights, in the shapes of Qwen3-8B, for `compile_only`. Every tile
where there is time, as in `make nightly`; `benchmarks.gpu.compile_table` has them all on five architectures."""

from __future__ import annotations

import torch

from dflash_kernels.fp8_activations import quantise_activations
from dflash_kernels.quantised_linear import (
    BY_FLOAT32,
    BY_INTEGERS,
    DIRECTLY,
    INVARIANT_TILE,
    TILES,
    WIDE_TILE,
    dequantise_rows,
    multiply,
)
from dflash_kernels.quantised_weight import FP8, INT4, INT8, QuantisedWeight
from dflash_kernels.scaled_linear import columns_of_scale
from tests.kernels.model_launches import HIDDEN, zeros
from tests.support.scale import SCALE


def launches() -> None:
    """Each kind of weights, with scales of blocks, rows and groups, every reading of e4m3, and scales of tokens."""
    scales = torch.zeros(HIDDEN // 128, HIDDEN // 128)
    codes = torch.zeros(HIDDEN, HIDDEN, dtype=torch.uint8)
    blocks = QuantisedWeight(FP8, codes, scales, None, 128, 128)
    rows = QuantisedWeight(FP8, codes, torch.zeros(1, HIDDEN), None, 1, HIDDEN)
    packed = torch.zeros(HIDDEN // 128, HIDDEN, 64, dtype=torch.uint8)
    of_groups = torch.zeros(HIDDEN // 128, HIDDEN, dtype=torch.float16)
    plain = QuantisedWeight(INT4, packed, of_groups, None, 1, 128)
    with_zeros = QuantisedWeight(INT4, packed, of_groups, of_groups.byte(), 1, 128)
    bytes_with_zeros = QuantisedWeight(INT8, codes, of_groups, of_groups.byte(), 1, 128)
    x = zeros(16, HIDDEN)
    for each in (*TILES, INVARIANT_TILE) if SCALE >= 4 else TILES[:1]:
        multiply(x, bytes_with_zeros, None, each, 1)
        multiply(x, blocks, None, each, 2, BY_FLOAT32)
        multiply(x, rows, zeros(HIDDEN), each, 1, BY_INTEGERS)
        multiply(x, plain, None, each, 1)
        multiply(x.half(), with_zeros, None, each, 1)
    multiply(x, rows, None, TILES[0], 1, DIRECTLY)
    for weight in (blocks, rows):
        numbers, of_tokens = quantise_activations(x, columns_of_scale(weight), x.dtype)
        multiply(numbers, weight, None, TILES[0], 1, BY_FLOAT32, of_tokens)
    quantise_activations(x, HIDDEN)
    for weight in (blocks, with_zeros):
        dequantise_rows(weight, 0, zeros(HIDDEN, HIDDEN), reading=BY_FLOAT32)
    for weight in (blocks, with_zeros):
        multiply(x.float(), weight, None, WIDE_TILE, 1)

"""MXFP4, in which gpt-oss's experts are stored: numbers of 4 bits in groups of 32 that share a power of two (OCP
Microscaling Formats 1.0)."""

from __future__ import annotations

import functools
import math

import torch

from dflash_backend.checkpoints.experts import MXFP4_GROUP
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_kernels.mxfp4 import NOT_A_NUMBER, SCALE_BIAS, VALUES
from dflash_kernels.quantised_weight import MXFP4, QuantisedWeight


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks: uint8 `[..., groups, 16]`, two codes each, the lower half of a byte first. scales: uint8 `[..., groups]`.
    Returns `[..., groups * 32]` in `dtype`, each number rounded once (in bfloat16 none needs it).

    Raises `CheckpointError` on a scale that is not a number.
    """
    check_scales(scales)
    pairs, powers = _tables(blocks.device)
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.float32).view(*scales.shape, MXFP4_GROUP)
    return numbers.mul_(powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1)).to(dtype).flatten(-2)


def check_scales(scales: torch.Tensor) -> None:
    """Raises `CheckpointError` on a scale that is not a number."""
    if bool((scales == NOT_A_NUMBER).any()):
        raise CheckpointError("a scale of MXFP4 weights is 255, which is not a number: fetch the checkpoint again")


def in_products(blocks: torch.Tensor, scales: torch.Tensor) -> QuantisedWeight:
    """The same weight as `dequantise` makes of `[rows, groups, 16]` and `[rows, groups]`, in the layout of the products
    by codes. Raises `CheckpointError` as that does."""
    check_scales(scales)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(1)
    return QuantisedWeight.of_codes(MXFP4, codes, scales, None, 1, MXFP4_GROUP)


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of each byte, float32 and looked up as one int64 `[256]`, and the powers of two of the scales:
    float32 `[256]`, the last of which is none."""
    values = [(VALUES[byte & 0x0F], VALUES[byte >> 4]) for byte in range(256)]
    powers = [math.ldexp(1.0, byte - SCALE_BIAS) for byte in range(NOT_A_NUMBER)]
    pairs = torch.tensor(values, dtype=torch.float32).view(torch.int64).flatten()
    return pairs.to(device), torch.tensor([*powers, math.nan], dtype=torch.float32).to(device)


def packed_shapes(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the blocks and of the scales of a tensor of this shape, whose last size is a multiple of 32."""
    *rows, columns = shape
    groups = columns // MXFP4_GROUP
    return (*rows, groups, MXFP4_GROUP // 2), (*rows, groups)

"""MXFP4, in which gpt-oss's experts are stored: numbers of 4 bits in groups of 32 that share a power of two (OCP
Microscaling Formats 1.0)."""

from __future__ import annotations

import torch

from dflash_backend.checkpoints.experts import MXFP4_GROUP
from dflash_backend.checkpoints.spec import CheckpointError

# What the codes 0 to 15 are (e2m1): a sign, two bits of exponent, one of mantissa.
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*POSITIVE, *(-value for value in POSITIVE))
# A scale of e8m0 is 2 ** (byte - 127); 255 is not a number.
SCALE_BIAS, NOT_A_NUMBER = 127, 255


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks: uint8 `[..., groups, 16]`, two codes each, the lower half of a byte first. scales: uint8 `[..., groups]`.
    Returns `[..., groups * 32]` in `dtype`, each number rounded once (in bfloat16 none needs it).

    Raises `CheckpointError` on a scale that is not a number.
    """
    if bool((scales == NOT_A_NUMBER).any()):
        raise CheckpointError("a scale of MXFP4 weights is 255, which is not a number: fetch the checkpoint again")
    values = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(values[codes.int()], (scales.int() - SCALE_BIAS)[..., None])
    return numbers.to(dtype).flatten(-2)


def packed_shapes(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the blocks and of the scales of a tensor of this shape, whose last size is a multiple of 32."""
    *rows, columns = shape
    groups = columns // MXFP4_GROUP
    return (*rows, groups, MXFP4_GROUP // 2), (*rows, groups)

"""What tests of the kernels share: where they run, in which dtypes, random tensors and rotary tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Triton's interpreter cuts float32 off to bfloat16 where a GPU rounds, so there float16 stands for both.
HALF_DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]

# Where a sum in another order has tipped the rounding of a number that a rotation then subtracts from one like it.
A_ROUNDING_APART = {"atol": 0.1, "rtol": 0.02}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float32 of `shape`, where kernels run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def multiply_as_tensor_cores_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products of Triton's interpreter give a row the same bits in every place of a tile, as those of a GPU do.
    numpy multiplies a few rows at a time, by code that differs for the last ones; in float64, rounded to float32, that
    does not show."""

    def create_dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> interpreter.TensorHandle:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def rotary_tables(max_positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as `dflash_kernels.qk_norm_rope_write` describes them, float32 `[max_positions, head_dim]`."""
    half = head_dim // 2
    angles = torch.arange(max_positions)[:, None] * 0.01 ** (torch.arange(half) / half)
    return torch.cat([angles.cos()] * 2, dim=1), torch.cat([-angles.sin(), angles.sin()], dim=1)

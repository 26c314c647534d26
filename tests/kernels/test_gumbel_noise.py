"""The noise inside kernels is that of numpy, up to rounding of logarithms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dflash_kernels.gumbel_noise import gumbel, gumbel_reference, key_bits
from tests.kernels.inputs import DEVICE

COUNT = 8192


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, out_ptr, COUNT: tl.constexpr):
    row = tl.program_id(0)
    key = key_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    index = tl.arange(0, COUNT)
    tl.store(out_ptr + row * COUNT + index, gumbel(key, index.to(tl.int64)))


def test_noise_is_that_of_numpy() -> None:
    seeds = torch.tensor([0, 5, -3, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 70_000, 12, 2**31, 3])
    found = torch.empty(len(seeds), COUNT, device=DEVICE)
    _noise_kernel[(len(seeds),)](seeds.to(DEVICE), positions.to(DEVICE), found, COUNT=COUNT)
    expected = gumbel_reference(seeds, positions, torch.arange(COUNT))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=2e-6)
    assert expected.min() < -1.5
    assert expected.max() > 8.0


def test_no_token_has_noise_of_minus_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide the only token that a filter keeps."""
    monkeypatch.setattr("dflash_kernels.gumbel_noise._mix", lambda bits: np.full_like(bits, 2**64 - 1))
    zero = torch.zeros(1, dtype=torch.int64)
    assert gumbel_reference(zero, zero, torch.arange(3)).isfinite().all()

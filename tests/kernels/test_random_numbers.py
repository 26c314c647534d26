"""The random numbers inside kernels are those of torch: the uniform ones to the bit, the others up to rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_kernels.random_numbers import exponential, exponential_of, state_bits, uniform, uniform_of
from tests.kernels.inputs import DEVICE

COUNT = 8192


@triton.jit
def _numbers_kernel(seeds_ptr, positions_ptr, uniform_ptr, exponential_ptr, stream, COUNT: tl.constexpr):
    row = tl.program_id(0)
    state = state_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), stream)
    tl.store(uniform_ptr + row, uniform_of(state))
    index = tl.arange(0, COUNT)
    tl.store(exponential_ptr + row * COUNT + index, exponential_of(state, index.to(tl.int64)))


def test_numbers_are_those_of_torch() -> None:
    seeds = torch.tensor([0, 5, -3, 2**63 - 1, -(2**63)], device=DEVICE)
    positions = torch.tensor([0, 70_000, 12, 2**31, 3], device=DEVICE)
    for stream in (1, 2, 3):
        uniforms = torch.empty(len(seeds), dtype=torch.float64, device=DEVICE)
        exponentials = torch.empty(len(seeds), COUNT, device=DEVICE)
        _numbers_kernel[(len(seeds),)](seeds, positions, uniforms, exponentials, stream, COUNT=COUNT)
        assert torch.equal(uniforms, uniform(seeds, positions, stream))
        expected = exponential(seeds, positions, stream, COUNT)
        torch.testing.assert_close(exponentials, expected, rtol=1e-6, atol=0.0)
        assert expected.min() < 1e-3
        assert expected.max() > 8.0

"""The convolution along blocks is the sum it says, by the kernel and by its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dflash_kernels.grouped_conv import grouped_conv, grouped_conv_reference
from tests.kernels.inputs import DEVICE, HALF_DTYPES, random

Conv = Callable[..., torch.Tensor]
FORMS = [grouped_conv] if torch.cuda.is_available() else [grouped_conv_reference, grouped_conv]


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def conv(request: pytest.FixtureRequest) -> Conv:
    return request.param


def block_indices(lens: list[int]) -> torch.Tensor:
    """The index of each token in its block."""
    return torch.cat([torch.arange(length) for length in [0, *lens]]).to(DEVICE)


def by_hand(x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """The sum, token by token and block by block, in float64."""
    (taps, groups), expected = dynamic.shape[1:], torch.zeros(x.shape, dtype=torch.float64)
    start = 0
    for length in lens:
        for i in range(length):
            for tap in range(min(taps, i + 1)):
                kernel = base[tap].double() + dynamic[start + i, tap].double().repeat_interleave(x.shape[1] // groups)
                expected[start + i] += kernel * x[start + i - tap].double()
        start += length
    return expected


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize(("hidden", "group_size"), [(2, 1), (48, 16), (40, 8), (1040, 16)])
@pytest.mark.parametrize("lens", [[], [1], [8, 8, 8], [3, 1, 7, 2]])
def test_blocks_of_any_lengths_are_summed_each_by_itself(
    conv: Conv, taps: int, hidden: int, group_size: int, lens: list[int]
) -> None:
    n, groups = sum(lens), hidden // group_size
    x, base, dynamic = random(n, hidden), random(taps, hidden, seed=1), random(n, taps, groups, seed=2)
    expected = by_hand(x.cpu(), base.cpu(), dynamic.cpu(), lens)
    actual = conv(x, base, dynamic, block_indices(lens))
    torch.testing.assert_close(actual.cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_a_shorter_block_is_the_beginning_of_a_longer_one(conv: Conv) -> None:
    x, base, dynamic = random(16, 32), random(2, 32, seed=1), random(16, 2, 4, seed=2)
    whole = conv(x, base, dynamic, block_indices([16]))
    for length in range(1, 16):
        short = conv(x[:length], base, dynamic[:length], block_indices([length]))
        assert torch.equal(short, whole[:length])


def test_nothing_passes_from_one_block_to_the_next(conv: Conv) -> None:
    """Not even what is no number, as a padding row may leave it."""
    x, base, dynamic = random(8, 16), random(3, 16, seed=1), random(8, 3, 2, seed=2)
    alone = conv(x[4:], base, dynamic[4:], block_indices([4]))
    x[:4] = float("nan")
    assert torch.equal(conv(x, base, dynamic, block_indices([4, 4]))[4:], alone)


def test_kernels_may_lie_apart(conv: Conv) -> None:
    x, base, kernels = random(6, 32), random(2, 32, seed=1), random(6, 2, 2, 4, seed=2)
    for side in range(2):
        apart, together = kernels[:, side], kernels[:, side].contiguous()
        assert torch.equal(conv(x, base, apart, block_indices([6])), conv(x, base, together, block_indices([6])))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, base, dynamic = (each.to(dtype) for each in (random(9, 64), random(2, 64, seed=1), random(9, 2, 4, seed=2)))
    expected = by_hand(x.cpu(), base.cpu(), dynamic.cpu(), [9]).to(dtype)
    for form in FORMS:
        actual = form(x, base, dynamic, block_indices([9])).cpu()
        assert actual.dtype == dtype
        assert (actual == expected).float().mean() > 0.99

"""A request's Gumbel noise: a number for each position and token, from its seed and from nothing else.

No generator has to be advanced: a number is a hash of the three, splitmix64 (Steele, Lea, Flood 2014). The numpy and
the Triton form give the same 64 bits.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.triton_import import tl, triton

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_GOLDEN_NUMPY = np.uint64(_GOLDEN)
# Uniform numbers are rounded to float32. 1 itself would be noise of -inf, which hides a token.
_LARGEST = np.float32(1.0 - 2.0**-24)


def gumbel_reference(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float32 `[n, m]`: independent numbers for each of the int64 `seeds` and `positions` (`[n]`, of the
    token that is decided) and each of the int64 `token_ids` `[m]`, or of those of its own row, `[n, m]`."""
    bits = _mix(_keys(seeds, positions)[:, None] + _GOLDEN_NUMPY * (token_ids.numpy().view(np.uint64) + np.uint64(1)))
    bits >>= np.uint64(32)
    # -log(-log1p(-y)): the smallest y win, and near 0 floating-point numbers are dense.
    noise = bits.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(-(2.0**-32))
    np.maximum(noise, -_LARGEST, out=noise)
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return torch.from_numpy(noise)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def _keys(seeds: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
    """64 bits for each (seed, position), uint64 `[n]`."""
    keys = _mix(seeds.numpy().view(np.uint64) + _GOLDEN_NUMPY)
    return _mix(keys + (positions.numpy().view(np.uint64) + np.uint64(1)) * _GOLDEN_NUMPY)


_GOLDEN_BITS = tl.constexpr(_GOLDEN)
_MIX_1_BITS = tl.constexpr(_MIX_1)
_MIX_2_BITS = tl.constexpr(_MIX_2)
_LARGEST_FLOAT = tl.constexpr(float(_LARGEST))


@triton.jit
def _mix_bits(x):
    x = (x ^ (x >> 30)) * _MIX_1_BITS
    x = (x ^ (x >> 27)) * _MIX_2_BITS
    return x ^ (x >> 31)


@triton.jit
def key_bits(seeds, positions):
    """uint64 for each (seed, position), both int64: `_keys`."""
    keys = _mix_bits(seeds.to(tl.uint64) + _GOLDEN_BITS)
    return _mix_bits(keys + (positions.to(tl.int64) + 1).to(tl.uint64) * _GOLDEN_BITS)


@triton.jit
def gumbel(key, token_ids):
    """float32 for the uint64 `key` and the int64 `token_ids`: `gumbel_reference`, up to rounding of logarithms.

    -log1p(-y) without a library's log1p, which the interpreter lacks. Near 0 it is a series, so that it does not
    matter how a GPU's fast logarithm rounds near 1; those are the numbers that win.
    """
    bits = _mix_bits(key + (token_ids + 1).to(tl.uint64) * _GOLDEN_BITS) >> 32
    y = tl.minimum((bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST_FLOAT)
    # -log(1 - y) = 2 artanh(s) with s = y / (2 - y), below 1/7 where the series is taken.
    s = tl.div_rn(y, 2.0 - y)
    s2 = s * s
    series = 1.0 + s2 * (1.0 / 3 + s2 * (1.0 / 5 + s2 * (1.0 / 7 + s2 * (1.0 / 9 + s2 * (1.0 / 11)))))
    return -tl.log(tl.where(y < 0.25, 2.0 * s * series, -tl.log(1.0 - y)))

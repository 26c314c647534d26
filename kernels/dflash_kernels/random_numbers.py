"""Random numbers that depend on a seed, a position and a stream, and on nothing else.

There is no generator state: a number is a hash of the three, splitmix64 (Steele, Lea, Flood 2014). The torch and the
Triton form give the same 64 bits.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the torch form only
    triton = None

# As signed 64-bit numbers, since torch has no unsigned arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, for int64 `seeds` and `positions` of one shape `[n]`.

    `positions` are those of the token that the number decides.
    """
    return _shift_right(_state(seeds, positions, stream), 11).to(torch.float64) * 2.0**-53


def exponential(seeds: torch.Tensor, positions: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """Exponentially distributed numbers with mean 1, float32 `[n, count]` and above 0: `count` independent ones for
    each of the int64 `seeds` and `positions` `[n]`."""
    index = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    bits = _shift_right(_mix(_state(seeds, positions, stream)[:, None] + index), 32)
    # From the end near 0, where floating-point numbers are dense: the smallest ones decide a sample.
    return torch.log1p(bits.to(torch.float32).add_(0.5).mul_(-(2.0**-32))).neg_()


def _state(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """64 bits for each (seed, position, stream), int64 `[n]`."""
    state = _mix(seeds + _GOLDEN)
    return _mix(state + (positions * 4 + int(stream)) * _GOLDEN)


if triton is not None:
    _GOLDEN_BITS = tl.constexpr(_GOLDEN + 2**64)
    _MIX_1_BITS = tl.constexpr(_MIX_1 + 2**64)
    _MIX_2_BITS = tl.constexpr(_MIX_2 + 2**64)

    @triton.jit
    def _mix_bits(x):
        x = (x ^ (x >> 30)) * _MIX_1_BITS
        x = (x ^ (x >> 27)) * _MIX_2_BITS
        return x ^ (x >> 31)

    @triton.jit
    def state_bits(seeds, positions, stream):
        """uint64 for each (seed, position, stream), all of them int64: `_state`."""
        state = _mix_bits(seeds.to(tl.uint64) + _GOLDEN_BITS)
        number = (positions.to(tl.int64) * 4 + stream).to(tl.uint64)
        return _mix_bits(state + number * _GOLDEN_BITS)

    @triton.jit
    def uniform_of(state):
        """float64 in [0, 1) for the uint64 `state`: `uniform`."""
        return (state >> 11).to(tl.float64) * 1.1102230246251565e-16

    @triton.jit
    def exponential_of(state, index):
        """float32 for the uint64 `state` and the int64 `index` of a token: `exponential`, up to rounding of the
        logarithm.

        -log1p(-y) without a library's log1p, which the interpreter lacks. Near 0 it is a series, so that it does not
        matter how a GPU's fast logarithm rounds near 1; those are the clocks that win.
        """
        bits = _mix_bits(state + (index + 1).to(tl.uint64) * _GOLDEN_BITS) >> 32
        y = (bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
        # -log(1 - y) = 2 artanh(s) with s = y / (2 - y), below 1/7 where the series is taken.
        s = tl.div_rn(y, 2.0 - y)
        s2 = s * s
        series = 1.0 + s2 * (1.0 / 3 + s2 * (1.0 / 5 + s2 * (1.0 / 7 + s2 * (1.0 / 9 + s2 * (1.0 / 11)))))
        return tl.where(y < 0.25, 2.0 * s * series, -tl.log(1.0 - y))

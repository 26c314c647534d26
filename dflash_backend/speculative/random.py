"""Random numbers that depend on a request's seed and a position, and on nothing else.

There is no generator state: the number for (seed, position, stream) is a hash of the three. So a request's output does
not depend on what else is in the batch, on chunking, on preemption or on the order of requests.
"""

from __future__ import annotations

import enum

import torch


class Stream(enum.IntEnum):
    """What a number decides; numbers of different streams are independent."""

    TARGET = 1  # the token that the target adds: first token, residual or bonus
    DRAFT = 2  # the draft token
    ACCEPT = 3  # whether a draft token stands


# splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers, since torch has no unsigned arithmetic.
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


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, for int64 `seeds` and `positions` of one shape `[n]`.

    `positions` are those of the token that the number decides.
    """
    return _shift_right(_state(seeds, positions, stream), 11).to(torch.float64) * 2.0**-53


def exponential(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream, count: int) -> torch.Tensor:
    """Exponentially distributed numbers with mean 1, float32 `[n, count]` and above 0: `count` independent ones for
    each of the int64 `seeds` and `positions` `[n]`."""
    index = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    bits = _shift_right(_mix(_state(seeds, positions, stream)[:, None] + index), 32)
    # From the end near 0, where floating-point numbers are dense: the small ones decide a race.
    return torch.log1p(bits.to(torch.float32).add_(0.5).mul_(-(2.0**-32))).neg_()


def _state(seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """64 bits for each (seed, position, stream), int64 `[n]`."""
    state = _mix(seeds + _GOLDEN)
    return _mix(state + (positions * 4 + int(stream)) * _GOLDEN)

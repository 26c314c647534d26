"""What a request's random numbers decide. The numbers themselves depend on its seed, a position and what is decided,
and on nothing else.

So a request's output does not depend on what else is in the batch, on chunking, on preemption or on the order of
requests.
"""

from __future__ import annotations

import enum

from dflash_kernels.random_numbers import uniform

__all__ = ["Stream", "uniform"]


class Stream(enum.IntEnum):
    """What a number decides; numbers of different streams are independent."""

    TARGET = 1  # the token that the target adds: first token, residual or bonus
    DRAFT = 2  # the draft token
    ACCEPT = 3  # whether a draft token is accepted

"""The token that a request chooses by a head on a CPU, in less time than its product takes (`cpu_head.h`).

Codes of 8 bits of the head's numbers, each output's with how far they are off, bound every logit of a row. The few that
may be chosen, with the request's noise and filters where it samples, are then computed by the head's own numbers, in
the order of sums that a product has, so the token is that of the whole product, bit for bit. A head of bfloat16 is read
at half its bytes, one of float32 at a quarter.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels import cpu_ops
from dflash_kernels.cpu_ops import DTYPES, HAS_PAIRS, LANES, PackedWeight
from dflash_kernels.huge_pages import weight_memory

ROWS_AT_ONCE = 4096
"""Rows of a head whose codes are made together."""
LEAST_OUTPUTS = 4096
"""Of smaller heads the whole product takes no time."""
MAX_ROWS = {dtype: cpu_ops.coarse_rows_at_most(code) for dtype, code in DTYPES.items()}
"""Rows up to which the codes are faster than the whole product, by the head's dtype; 0 on a processor without AVX2."""
MAX_PAUSE = 256
"""Calls that are left out at most after one whose bounds left too many logits."""


class CoarseHead:
    """Codes of `weight`, a byte for each of its numbers, beside it."""

    def __init__(self, weight: PackedWeight) -> None:
        n, k = weight.shape
        padded, deep = -(-n // LANES) * LANES, -(-k // 2) * 2
        self._weight = weight
        self.data = weight_memory(padded * deep)
        codes = self.data.view(torch.int8).view(padded // LANES, deep // 2, LANES, 2)
        self._facts = torch.zeros((3, padded))  # of each output: its step, the norm of what its codes miss, its norm
        for first in range(0, n, ROWS_AT_ONCE):
            numbers = weight.rows(torch.arange(first, min(n, first + ROWS_AT_ONCE))).float()
            steps = numbers.abs().amax(dim=1) / 127
            rounded = (numbers / steps.clamp(min=1e-30)[:, None]).round_()
            held = rounded * steps[:, None]
            norms = torch.maximum(numbers.norm(dim=1), held.norm(dim=1))
            self._facts[:, first : first + len(numbers)] = torch.stack([steps, (numbers - held).norm(dim=1), norms])
            rows = torch.zeros((-(-len(rounded) // LANES) * LANES, deep), dtype=torch.int8)
            rows[: len(rounded), :k] = rounded.to(torch.int8)
            part = rows.view(-1, LANES, deep // 2, 2).transpose(1, 2)
            codes[first // LANES : first // LANES + len(part)] = part
        self._facts[1:] *= 1 + 1e-4  # they are sums in float32
        if not (weight.is_plain or HAS_PAIRS) and weight.dtype == torch.bfloat16:
            self._facts[1] += self._facts[2] / 256  # products take numbers on grids unrounded
        addresses = [self.data.data_ptr(), *(each.data_ptr() for each in self._facts)]
        self._described = np.array([n, k, *addresses], np.int64)
        # Threads that share a head may change these at once: then one call more or less is left out.
        self._pause = self._left_out = 0

    @classmethod
    def of(cls, weight: PackedWeight) -> CoarseHead | None:
        """Codes beside `weight`; None where they would gain no time, or a number of it is not finite."""
        if weight.shape[0] < LEAST_OUTPUTS or not MAX_ROWS[weight.dtype]:
            return None
        head = cls(weight)
        return head if bool(head._facts.isfinite().all()) else None

    @property
    def num_bytes(self) -> int:
        """What the codes take."""
        return self.data.nbytes + self._facts.nbytes

    def likeliest(self, x: torch.Tensor, *sampling: torch.Tensor) -> torch.Tensor | None:
        """The first of the largest logits of each row of `x`, `[n, in_features]` in the head's dtype: int64 `[n]`; with
        `sampling`, temperature, seeds and positions as of `sample`, what that gives for them, and with top_k, top_p and
        min_p too, what it gives for those that `lowest_kept` keeps. None where the whole product is faster: for many
        rows on a processor that multiplies them as fast, for rows with top_p alone, and for some calls after rows whose
        logits are too close to one another, or not finite."""
        if self._left_out or len(x) > MAX_ROWS[x.dtype]:
            self._left_out = max(0, self._left_out - 1)
            return None
        x = x if x.stride(1) == 1 else x.contiguous()
        ids = torch.empty(len(x), dtype=torch.int64)
        num_units = cpu_ops.likeliest(x, self._weight, self._described, ids, *sampling)
        if num_units == -2:
            return None
        if num_units < 0:
            self._pause = self._left_out = min(MAX_PAUSE, 2 * self._pause + 1)
            return None
        self._pause = 0
        return ids

"""Matrix products on a CPU, in float32.

torch multiplies float32 matrices by MKL, whose code for AMD's processors leaves their AVX-512 units idle, and which
brings the weights into its own order at each call. oneDNN, which torch contains too, does neither, and takes half the
time (`python -m benchmarks.cpu_products`). Its calls cost about 10 us more, so products of few rows stay with MKL.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Multiplications of a product below which MKL is faster: with packed weights, and with weights as they are.
MIN_PACKED = 1_900_000
MIN_PLAIN = 2_000_000
# Weights up to this size are kept in oneDNN's order as well. Larger ones would take too much memory twice, and have so
# many columns that putting them in order is a small part of a product.
MAX_PACKED_BYTES = 8 * 1024**2
# The number of rows that oneDNN chooses its order for; it hardly matters.
PACKED_FOR_ROWS = 64
# Products of up to the first number of rows are padded to multiples of the second.
ROW_STEPS = ((128, 8), (1024, 16), (4096, 64))
LARGEST_ROW_STEP = 256
_NO_SCALARS: list[None] = []


def padded_rows(num_rows: int) -> int:
    """The number of rows, at least `num_rows`, that is multiplied: oneDNN generates code for each number anew, which
    takes as long as half of a product, and the numbers of a step's tokens differ."""
    step = next((step for most, step in ROW_STEPS if num_rows <= most), LARGEST_ROW_STEP)
    return -(-num_rows // step) * step


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class CpuWeight:
    """What oneDNN needs of a weight. It is packed when first used: the weight must not change afterwards."""

    __slots__ = ("_packed", "_threshold", "_weight")

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: float32 `[out_features, in_features]`, contiguous."""
        self._weight = weight
        self._packed: torch.Tensor | None = None
        packs = weight.numel() * weight.itemsize <= MAX_PACKED_BYTES
        self._threshold = MIN_PACKED if packs else MIN_PLAIN
        if not packs:
            self._packed = weight

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether oneDNN may multiply by this weight."""
        return HAS_ONEDNN and weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()

    def pays(self, num_rows: int) -> bool:
        """Whether oneDNN multiplies that many rows faster than MKL."""
        return num_rows * self._weight.numel() >= self._threshold

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`: `[n, in_features]` -> `[n, out_features]`."""
        if self._packed is None:
            # Two threads may both do it; either result is right.
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, PACKED_FOR_ROWS)
        num_rows = len(x)
        padded = padded_rows(num_rows)
        if padded > num_rows:
            x = F.pad(x, (0, 0, 0, padded - num_rows))
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, bias, "none", _NO_SCALARS, ""
        )
        return result[:num_rows]

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `product`, for what asks with the weight, which is this one."""
        return self.product(x, bias)

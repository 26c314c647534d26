"""A matrix product whose rows do not depend on one another: a row has the same bits alone and among any others.

Libraries choose how they multiply by the number of rows: another kernel for one row than for many, another split of
the sum over the inputs. So the same row has other bits in another batch. Here tiles and the order of each sum follow
from the weight's shape alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Rows of a product by a CPU's library, and the height that the others are compared with.
HEIGHTS = (4, 8, 16, 32, 64, 128, 256)
BASE_HEIGHT = 64
# Weights of more elements are read from memory for each product: comparing tall ones takes seconds and gains little.
LARGE_WEIGHT = 1 << 22
# Empty rows that one more product is better than, for each row.
MAX_PADDING = 0.25
# Bytes that rows must begin at a multiple of, since libraries sum up narrow products by where their rows lie.
ALIGNMENT = 64

_heights: dict[tuple[object, ...], tuple[int, ...]] = {}


def invariant_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., in]` -> `[..., out]`, in products of a few heights for which the library of this
    machine gives every row the same bits (`equal_heights`); what is missing to a height are rows of zeros.

    weight: `[out, in]`. bias: `[out]`, or None.
    """
    rows = x.reshape(-1, weight.shape[1])
    if not len(rows):
        return x.new_empty(*x.shape[:-1], len(weight))
    parts, first = [], 0
    for height in split_rows(len(rows), equal_heights(weight, bias)):
        part = rows[first : first + height]
        missing = height - len(part)
        if missing:
            part = torch.cat([part, part.new_zeros(missing, part.shape[1])])
        elif part.data_ptr() % ALIGNMENT:
            part = part.clone()
        product = F.linear(part, weight, bias)
        parts.append(product[: height - missing])
        first += height
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.view(*x.shape[:-1], len(weight))


def split_rows(count: int, heights: tuple[int, ...]) -> list[int]:
    """Heights of the products that `count` rows are split into; only the last one may be higher than what is left.
    heights: ascending."""
    split = []
    while count > 0:
        above = next((height for height in heights if height >= count), None)
        below = next((height for height in reversed(heights) if height <= count), None)
        if above is not None and (below is None or above - count <= MAX_PADDING * count):
            below = above
        assert below is not None
        split.append(below)
        count -= below
    return split


def equal_heights(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """The numbers of rows, ascending, for which `F.linear` gives a row of this weight the same bits in every place.

    A library chooses its kernel and the split of its sums by shapes and threads, never by values, so one product of
    each height shows it: its rows are alike, and each must have the bits of a row of `BASE_HEIGHT` rows. They are
    compared once for each shape and number of threads. Where even the rows of `BASE_HEIGHT` rows differ, every row is a
    product of its own.
    """
    key = (weight.shape, weight.stride(), weight.dtype, bias is not None, torch.get_num_threads())
    if key not in _heights:
        tallest = BASE_HEIGHT if weight.numel() > LARGE_WEIGHT else HEIGHTS[-1]
        heights = [height for height in HEIGHTS if height <= tallest]
        row = probe_row(weight.shape[1]).to(weight.dtype)
        products = {height: F.linear(row.repeat(height, 1), weight, bias) for height in heights}
        base = products[BASE_HEIGHT][0]
        equal = [height for height in heights if bool((products[height] == base).all())]
        _heights[key] = tuple(equal) if BASE_HEIGHT in equal else (1,)
    return _heights[key]


def probe_row(size: int) -> torch.Tensor:
    """Numbers of many magnitudes, whose sum has other bits in another order: float32 `[1, size]`."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(1, size, generator=generator) * torch.exp2(torch.randn(1, size, generator=generator) * 2)

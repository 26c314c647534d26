"""A matrix product whose rows do not depend on one another: a row has the same bits alone and among any others.

Libraries choose how they multiply by the number of rows: another kernel for one row than for many, another split of
the sum over the inputs. So the same row has other bits in another batch. Here tiles and the order of each sum follow
from the weight's shape alone: on a GPU by a kernel of our own, whose programs go through the inputs from the first to
the last; on a CPU by products of the library in heights that were seen to be alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Rows of a product by a CPU's library, and the height that the others are compared with.
HEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)
BASE_HEIGHT = 64
# Empty rows that cost less than one more product: for each row, and in any case.
MAX_PADDING, FREE_PADDING = 0.25, 4
# Bytes that rows must begin at a multiple of, since libraries sum up narrow products by where their rows lie.
ALIGNMENT = 64
# Different rows of a weight by which the order of sums is looked at.
PROBE_WEIGHTS = 16
# The largest number there, which float16 holds too.
MAX_PROBE = 16384.0

_heights: dict[tuple[object, ...], tuple[int, ...]] = {}

Multiply = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""A library's `x @ weight.T + bias`, for x `[n, in]`."""


def invariant_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    multiply: Multiply | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., in]` -> `[..., out]`, in products of a few heights for which the library of this
    machine gives every row the same bits (`equal_heights`); what is missing to a height are rows of zeros.

    weight: `[out, in]`. bias: `[out]`, or None. multiply: another library than torch's own choice, the same one for
    all weights.
    """
    library = multiply or F.linear
    rows = x.reshape(-1, weight.shape[1])
    if not len(rows):
        return x.new_empty(*x.shape[:-1], len(weight))
    parts, first = [], 0
    for height in split_rows(len(rows), equal_heights(weight, bias, multiply)):
        part = rows[first : first + height]
        missing = height - len(part)
        if missing:
            part = torch.cat([part, part.new_zeros(missing, part.shape[1])])
        elif part.data_ptr() % ALIGNMENT:
            part = part.clone()
        product = library(part, weight, bias)
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
        if above is not None and (below is None or above - count <= max(MAX_PADDING * count, FREE_PADDING)):
            below = above
        assert below is not None
        split.append(below)
        count -= below
    return split


def equal_heights(weight: torch.Tensor, bias: torch.Tensor | None, multiply: Multiply | None = None) -> tuple[int, ...]:
    """The numbers of rows, ascending, for which the library gives a row of this weight the same bits in every place.

    A library chooses its kernel and the split of its sums by shapes and threads, never by values, so one product of
    each height shows it: its rows are alike, and each must have the bits of a row of `BASE_HEIGHT` rows. They are
    compared once for each shape and number of threads. Where even the rows of `BASE_HEIGHT` rows differ, every row is a
    product of its own. Numbers of 16 bits rarely show the order of a sum, so for these it is that of `cancelling`.
    """
    key = (weight.shape, weight.stride(), weight.dtype, bias is not None, multiply is None, torch.get_num_threads())
    if key not in _heights:
        library = multiply or F.linear
        row, like, offset = probe_row(weight.shape[1]).to(weight.dtype), weight, bias
        if weight.dtype.itemsize < 4 and multiply is None:
            row, like = cancelling(weight)
            offset = None if bias is None else torch.zeros_like(bias)
        products = {height: library(row.repeat(height, 1), like, offset) for height in HEIGHTS}
        base = products[BASE_HEIGHT][0]
        equal = [height for height in HEIGHTS if bool((products[height] == base).all())]
        _heights[key] = tuple(equal) if BASE_HEIGHT in equal else (1,)
    return _heights[key]


def probe_row(size: int) -> torch.Tensor:
    """Numbers of many magnitudes, whose sum has other bits in another order: float32 `[1, size]`."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(1, size, generator=generator) * torch.exp2(torch.randn(1, size, generator=generator) * 2)


def cancelling(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row `[1, in]` and a weight like `weight` whose products cancel: each sum is what rounding leaves, of which no
    bit is alike in another order."""
    inputs = weight.shape[1]
    half, rest = inputs // 2, inputs % 2
    generator = torch.Generator().manual_seed(inputs)
    numbers = torch.randn(PROBE_WEIGHTS + 1, half, generator=generator)
    # So far apart that no float32 holds the sum of two products without rounding, nearly.
    numbers *= torch.exp2(torch.randn(PROBE_WEIGHTS + 1, half, generator=generator) * 4)
    numbers = numbers.clamp(-MAX_PROBE, MAX_PROBE).to(weight.dtype)
    values = torch.cat([numbers, numbers, numbers.new_zeros(len(numbers), rest)], dim=1)
    row = values[-1:].clone()
    row[:, half:] = -row[:, half:]
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype)
    for first in range(PROBE_WEIGHTS):
        like[first::PROBE_WEIGHTS] = values[first]
    return row, like


@dataclass(frozen=True)
class ProductTile:
    """A program's part of a product: `rows` of the input by `columns` rows of the weight, `k_bytes` of each at a time,
    with `stages` such pieces under way."""

    rows: int
    columns: int
    k_bytes: int
    stages: int
    warps: int


# Outputs from which wider tiles still give every multiprocessor of a GPU a program.
MANY_OUTPUTS = 16384


def product_tile(num_outputs: int, itemsize: int) -> ProductTile:
    """The tile for a weight with that many rows of elements of `itemsize` bytes, whatever the number of rows of the
    input. Products of float32 run without tensor cores, from registers."""
    if itemsize > 2:
        return ProductTile(rows=32, columns=64, k_bytes=128, stages=2, warps=4)
    return ProductTile(rows=64, columns=128 if num_outputs >= MANY_OUTPUTS else 64, k_bytes=128, stages=4, warps=4)


# One compiled kernel serves all numbers of rows, and all have the same bits.
@cached_launches
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, x_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program computes one tile, over the inputs in their order. Programs that read the same rows of the weight
    run one after the other."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < OUTPUTS
    offsets = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + offsets[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * INPUTS + offsets[:, None]
    result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, INPUTS, BLOCK_K):
        x_mask, weight_mask = is_row[:, None], is_column[None, :]
        if INPUTS % BLOCK_K != 0:
            x_mask = x_mask & (k + offsets < INPUTS)[None, :]
            weight_mask = weight_mask & (k + offsets < INPUTS)[:, None]
        x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + k, mask=weight_mask, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        result = tl.dot(x, weight, result, input_precision="ieee")
    if HAS_BIAS:
        result += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


# The interpreter multiplies bfloat16 as if it were integers, so products are of float32 there.
INTERPRETED = not isinstance(_linear_kernel, triton.JITFunction)


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `invariant_linear_reference`, in tiles and an order that follow from the weight's shape. `weight` is
    contiguous, and so are the elements of a row of `x`."""
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    out = torch.empty(len(rows), outputs, dtype=x.dtype, device=x.device)
    if len(rows):
        tile = product_tile(outputs, x.itemsize)
        _linear_kernel[(triton.cdiv(len(rows), tile.rows), triton.cdiv(outputs, tile.columns))](
            rows, weight, bias, out, len(rows), rows.stride(0),
            OUTPUTS=outputs, INPUTS=inputs, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
            BLOCK_K=tile.k_bytes // x.itemsize, HAS_BIAS=bias is not None, WIDEN=INTERPRETED,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], outputs)

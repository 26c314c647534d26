"""Products by weights that stay quantised (`quantised_weight.py`): activations keep their dtype, codes become numbers
of it on their way to the tensor cores, and scales multiply the sums, in float32.

With few tokens, reading the codes takes the time. So the weight is the first factor of a tile, whose rows are many
whatever the number of tokens is, and where a weight has too few rows to give every multiprocessor a program, its
columns are split among several, whose sums are added up in their order. With many tokens multiplying takes the time:
from `LEAST_DEQUANTISED` on the weight becomes numbers of the activations' dtype, in memory of a bounded size that is
there while it is multiplied, and torch multiplies by them. Nothing here waits for the device, and launches follow from
shapes alone.

Codes of e4m3 are read by the compiler's own conversion where it has one (compute capability 8.9 and later), else by
integer operations. The numbers are the same. Those of MXFP4 are read as `mxfp4.py` says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from dflash_kernels.launcher import cached_launches
from dflash_kernels.mxfp4 import numbers_of_e2m1, scales_at
from dflash_kernels.quantised_weight import FP8, INT4, INT8, INTEGERS, MIDDLE, MXFP4, PACKED, QuantisedWeight
from dflash_kernels.triton_import import tl, triton

logger = logging.getLogger(__name__)

# How codes of e4m3 are read: by integer operations; by the compiler's conversion, in two steps, since that to bfloat16
# is an instruction of one number at a time on Hopper; by its conversion alone. And the compute capabilities from which.
BY_INTEGERS, BY_FLOAT32, DIRECTLY = 0, 1, 2
READINGS = ((10, 0), DIRECTLY), ((8, 9), BY_FLOAT32)


def quantised_linear_reference(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., in]` -> `[..., out]` in x's dtype, from numbers in float32. bias: `[out]`."""
    product = F.linear(x.float(), weight.dequantised(torch.float32), None if bias is None else bias.float())
    return product.to(x.dtype)


@dataclass(frozen=True)
class Tile:
    """A program's part of a product: `tokens` rows of the input by `outputs` rows of the weight, a run of columns at a
    time, with `stages` such pieces under way. programs: columns are split until a launch has as many, by default not
    at all."""

    tokens: int
    outputs: int
    stages: int
    warps: int
    programs: int = 1


# Ascending in tokens, by the number of which one is chosen. Measured on an H200 by the products of a layer of Qwen3-8B
# in FP8 and INT4, as docs/gpu.md tells; on no other GPU.
TILES = (
    Tile(tokens=16, outputs=64, stages=5, warps=4, programs=512),
    Tile(tokens=32, outputs=128, stages=4, warps=8, programs=256),
    Tile(tokens=64, outputs=64, stages=3, warps=4, programs=256),
    Tile(tokens=128, outputs=128, stages=3, warps=8, programs=512),
)
# For any number of tokens, so that a row has the same bits in any batch. It is none of the others, so that what is
# faster elsewhere changes no bits.
INVARIANT_TILE = Tile(tokens=64, outputs=64, stages=4, warps=4)
# Of float32, which is multiplied without tensor cores, from registers.
WIDE_TILE = Tile(tokens=16, outputs=32, stages=2, warps=4, programs=256)

# Columns are split in 8 parts at most, of four runs at least.
MAX_SPLITS, MIN_RUNS = 8, 4

# Tokens of 16 bits from which on a weight is dequantised, then multiplied by torch. On an H200 our tiles were the
# faster way for 128 tokens, by 1.2 to 1.3 times, and torch for 256, by 1.1 to 1.2 times, in the mean of a layer's
# products in FP8 and INT4. Our largest tile takes as long for 129 tokens as for 256.
LEAST_DEQUANTISED = {FP8: 129, INT8: 129, INT4: 129, MXFP4: 129}
# The most memory that the numbers take: a larger weight is multiplied in slices of this size, one after the other. On
# an H200 slices of 64 and 32 MiB were slower for 256 and 512 tokens.
SCRATCH_BYTES = 256 << 20
# Rows of a weight that a program makes numbers of, a run of columns each, and its warps. Slices are whole blocks.
DEQUANTISED_FORM, SLICE_ROWS = (64, 4), 128

_every_tile = False
# Kinds of weights that could not become numbers when that was tried, at the start.
_always_codes: set[str] = set()


@contextmanager
def every_tile() -> Iterator[None]:
    """In this block each product runs every kernel that it has, which compiles them."""
    global _every_tile
    before, _every_tile = _every_tile, True
    try:
        yield
    finally:
        _every_tile = before


def tile_of(num_tokens: int, dtype: torch.dtype) -> Tile:
    """The lowest tile that holds the tokens, else the largest."""
    if dtype.itemsize > 2:
        return WIDE_TILE
    return next((tile for tile in TILES if num_tokens <= tile.tokens), TILES[-1])


def num_splits(num_tokens: int, weight: QuantisedWeight, tile: Tile) -> int:
    """In how many parts the columns are multiplied."""
    if num_tokens > tile.tokens:
        return 1
    outputs, inputs = weight.shape
    wanted = tile.programs // -(-outputs // tile.outputs)
    return max(1, min(wanted, MAX_SPLITS, inputs // (weight.run * MIN_RUNS)))


_MIDDLE_OF_INT4, _MIDDLE_OF_INT8 = tl.constexpr(MIDDLE[INT4]), tl.constexpr(MIDDLE[INT8])
_BY_INTEGERS, _BY_FLOAT32 = tl.constexpr(BY_INTEGERS), tl.constexpr(BY_FLOAT32)
# The bits of 128 in bfloat16 and of 1024 in float16, whose last bits are those of an integer.
_BF16_BITS, _FP16_BITS = tl.constexpr(0x4300), tl.constexpr(0x6400)


@triton.jit
def numbers_of_e4m3(codes, dtype: tl.constexpr, READING: tl.constexpr, WIDEN: tl.constexpr):
    """uint8 -> numbers in `dtype`, exactly; in float32 with WIDEN. Bits are moved to where it has sign, exponent
    and mantissa, and a power of two makes up for its other bias."""
    if READING != _BY_INTEGERS:
        numbers = codes.to(tl.float8e4nv, bitcast=True)
        if READING == _BY_FLOAT32:
            numbers = numbers.to(tl.float16).to(tl.float32)
        numbers = numbers.to(tl.float32 if WIDEN else dtype)
    else:
        # A signed shift leaves the sign in the bits behind it too.
        bits = codes.to(tl.int8, bitcast=True).to(tl.int16)
        if dtype == tl.bfloat16:
            numbers = ((bits << 4) & -0x7810).to(tl.bfloat16, bitcast=True)
            if WIDEN:
                numbers = numbers.to(tl.float32)
            numbers = numbers * tl.full([], 2.0**120, numbers.dtype)
        else:
            numbers = ((bits << 7) & -0x4001).to(tl.float16, bitcast=True)
            if WIDEN or dtype == tl.float32:
                numbers = numbers.to(tl.float32)
            numbers = numbers * tl.full([], 256.0, numbers.dtype)
    return numbers


@triton.jit
def number_of_int4(codes, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """uint8 from 0 to 15 -> numbers in `dtype` that are a constant more, so that no integer is converted, which is
    slow. Differences of them are exact."""
    bits = codes.to(tl.int16)
    if dtype == tl.bfloat16:
        numbers = (bits | _BF16_BITS).to(tl.bfloat16, bitcast=True)
    else:
        numbers = (bits | _FP16_BITS).to(tl.float16, bitcast=True)
    if WIDEN or dtype == tl.float32:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def zero_numbers(zeros_ptr, offsets, mask, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """The zero points of some rows, as `number_of_int4` has them; of all rows the same without zero points."""
    if zeros_ptr is None:
        zeros = number_of_int4(tl.full(offsets.shape, _MIDDLE_OF_INT4, tl.uint8), dtype, WIDEN)
    else:
        zeros = number_of_int4(tl.load(zeros_ptr + offsets, mask=mask, other=0), dtype, WIDEN)
    return zeros


@triton.jit
def inputs_of_run(
    x_ptrs, is_token, run, inputs, PACKED: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr
):
    """What a run of columns meets of the input, `[columns, tokens]`: both halves of it where codes are packed, else
    the whole of it twice. EVEN: every run is whole."""
    if PACKED:
        half_ptrs = x_ptrs + (run * RUN + tl.arange(0, RUN // 2))[:, None]
        first = tl.load(half_ptrs, mask=is_token[None, :], other=0.0)
        second = tl.load(half_ptrs + RUN // 2, mask=is_token[None, :], other=0.0)
        if WIDEN:
            first = first.to(tl.float32)
            second = second.to(tl.float32)
    else:
        column = run * RUN + tl.arange(0, RUN)
        x_mask = is_token[None, :]
        if not EVEN:
            x_mask = x_mask & (column < inputs)[:, None]
        first = tl.load(x_ptrs + column[:, None], mask=x_mask, other=0.0)
        if WIDEN:
            first = first.to(tl.float32)
        second = first
    return first, second


@triton.jit
def codes_of_packed(
    codes_ptr, zeros_ptr, of_block, run, row, outputs, is_row, dtype: tl.constexpr, INTEGERS: tl.constexpr,
    RUN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The bytes of a run of columns, `[rows, columns / 2]`, and the rows' zero points; 0 of e2m1, which has none. Both
    halves of a byte are numbers of one row, half a run apart: integers of 4 bits, or e2m1."""
    half = tl.arange(0, RUN // 2)
    offsets = (tl.cast(run, tl.int64) * outputs + row)[:, None] * (RUN // 2) + half[None, :]
    packed = tl.load(codes_ptr + offsets, mask=is_row[:, None], other=0)
    zeros = zero_numbers(zeros_ptr, of_block, is_row, dtype, WIDEN)[:, None] if INTEGERS else 0
    return packed, zeros


@triton.jit
def numbers_of_packed(codes, zeros, dtype: tl.constexpr, INTEGERS: tl.constexpr, WIDEN: tl.constexpr):
    """uint8 from 0 to 15 and `zeros` of `codes_of_packed` -> numbers in `dtype`; in float32 with WIDEN."""
    return number_of_int4(codes, dtype, WIDEN) - zeros if INTEGERS else numbers_of_e2m1(codes, dtype, WIDEN)


@triton.jit
def sums_of_packed(
    first, second, codes_ptr, zeros_ptr, of_block, run, row, outputs, is_row, dtype: tl.constexpr,
    INTEGERS: tl.constexpr, RUN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The products of a run of columns, without scales: `[rows, tokens]`."""
    packed, zeros = codes_of_packed(
        codes_ptr, zeros_ptr, of_block, run, row, outputs, is_row, dtype, INTEGERS, RUN, WIDEN
    )
    numbers = numbers_of_packed(packed & 0x0F, zeros, dtype, INTEGERS, WIDEN)
    sums = tl.dot(numbers, first, input_precision="ieee")
    numbers = numbers_of_packed(packed >> 4, zeros, dtype, INTEGERS, WIDEN)
    return tl.dot(numbers, second, sums, input_precision="ieee")


@triton.jit
def numbers_of_int8(codes, zeros_ptr, of_block, is_row, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """uint8 `[rows, columns]` less the zero point of each row, which 8 bits and a sign of `dtype` hold."""
    if zeros_ptr is None:
        integers = codes.to(tl.int16) - _MIDDLE_OF_INT8
    else:
        zeros = tl.load(zeros_ptr + of_block, mask=is_row, other=0)
        integers = codes.to(tl.int16) - zeros.to(tl.int16)[:, None]
    return integers.to(tl.float32 if WIDEN else dtype)


@triton.jit
def numbers_of_bytes(
    codes_ptr, zeros_ptr, of_block, run, row, inputs, is_row, dtype: tl.constexpr, RUN: tl.constexpr,
    EVEN: tl.constexpr, INTEGERS: tl.constexpr, READING: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The numbers of a run of columns without scales, `[rows, columns]` in `dtype`, in float32 with WIDEN: of codes of
    e4m3 or, with INTEGERS, of integers. Columns past the last are 0, or less the zero point."""
    column = run * RUN + tl.arange(0, RUN)
    codes_mask = is_row[:, None]
    if not EVEN:
        codes_mask = codes_mask & (column < inputs)[None, :]
    offsets = row.to(tl.int64)[:, None] * inputs + column[None, :]
    codes = tl.load(codes_ptr + offsets, mask=codes_mask, other=0)
    if INTEGERS:
        numbers = numbers_of_int8(codes, zeros_ptr, of_block, is_row, dtype, WIDEN)
    else:
        numbers = numbers_of_e4m3(codes, dtype, READING, WIDEN)
    return numbers


@triton.jit
def scaled_numbers(numbers, scale, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """Numbers `[rows, columns]` times the scale of each row `[rows]`, in float32, then rounded to `dtype`; not rounded
    with WIDEN."""
    scaled = numbers.to(tl.float32) * scale[:, None]
    if not WIDEN:
        scaled = scaled.to(dtype)
    return scaled


@triton.jit
def block_of(row, run, scale_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr):
    """Where the scale of each row lies that it has in a run of columns; COLUMNS as of `sums_of_run`."""
    of_block = row // ROWS
    if COLUMNS:
        of_block += run * RUN // COLUMNS * scale_stride
    return of_block


@triton.jit
def sums_of_run(
    first, second, codes_ptr, scales_ptr, zeros_ptr, run, row, outputs, inputs, scale_stride, is_row,
    dtype: tl.constexpr, PACKED: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RUN: tl.constexpr, EVEN: tl.constexpr, READING: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The products of a run of columns with what it meets of the input, `[rows, tokens]`, times its scales.
    COLUMNS: how many share a scale; 0 for all of them, whose scale is left to `with_scale_of_rows`."""
    of_block = block_of(row, run, scale_stride, ROWS, COLUMNS, RUN)
    if PACKED:
        sums = sums_of_packed(
            first, second, codes_ptr, zeros_ptr, of_block, run, row, outputs, is_row, dtype, INTEGERS, RUN, WIDEN
        )
    else:
        numbers = numbers_of_bytes(
            codes_ptr, zeros_ptr, of_block, run, row, inputs, is_row, dtype, RUN, EVEN, INTEGERS, READING, WIDEN
        )
        sums = tl.dot(numbers, first, input_precision="ieee")
    if COLUMNS:
        sums = sums * scales_at(scales_ptr, of_block, is_row)[:, None]
    return sums


@triton.jit
def with_scale_of_rows(result, scales_ptr, row, is_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums over all columns, `[rows, tokens]`, times the scale of each row where it has one alone."""
    if COLUMNS == 0:
        result = result * scales_at(scales_ptr, row // ROWS, is_row)[:, None]
    return result


@triton.jit
def with_scale_of_tokens(sums, x_scales_ptr, block, num_rows, token, is_token):
    """Sums over a block of columns, `[rows, tokens]`, times the scale that each token's inputs have in it."""
    if x_scales_ptr is not None:
        scale_ptrs = x_scales_ptr + tl.cast(block, tl.int64) * num_rows + token
        sums = sums * tl.load(scale_ptrs, mask=is_token, other=0.0)[None, :]
    return sums


# One compiled kernel serves all numbers of tokens up to a tile's, and all weights of a scheme.
@cached_launches
@triton.jit(do_not_specialize=["num_rows", "scale_stride", "runs_per_part"])
def _quantised_linear_kernel(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows, x_stride, outputs, inputs,
    scale_stride, runs_per_part, PACKED: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, READING: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program computes one tile over a part of the columns; with SPLIT its sums go to that part of `out`.
    Programs that read the same rows of the weight run one after the other."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_row = token < num_rows, row < outputs
    part = tl.program_id(2)
    x_ptrs = x_ptr + token.to(tl.int64)[None, :] * x_stride
    result = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = part * runs_per_part
    last = tl.minimum(first + runs_per_part, tl.cdiv(inputs, RUN))
    for run in range(first, last):
        x, other = inputs_of_run(x_ptrs, is_token, run, inputs, PACKED, RUN, EVEN, WIDEN)
        sums = sums_of_run(
            x, other, codes_ptr, scales_ptr, zeros_ptr, run, row, outputs, inputs, scale_stride, is_row, dtype,
            PACKED, INTEGERS, ROWS, COLUMNS, RUN, EVEN, READING, WIDEN,
        )  # fmt: skip
        if COLUMNS:
            sums = with_scale_of_tokens(sums, x_scales_ptr, run * RUN // COLUMNS, num_rows, token, is_token)
        result += sums
    result = with_scale_of_rows(result, scales_ptr, row, is_row, ROWS, COLUMNS)
    if COLUMNS == 0:
        result = with_scale_of_tokens(result, x_scales_ptr, 0, num_rows, token, is_token)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out_rows = token.to(tl.int64)[None, :]
    if SPLIT:
        out_rows += part.to(tl.int64) * num_rows
    out_ptrs = out_ptr + out_rows * outputs + row[:, None]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


@cached_launches
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _add_parts_kernel(parts_ptr, bias_ptr, out_ptr, num_rows, num_parts, outputs, BLOCK: tl.constexpr):
    """One program adds up the parts of some numbers of one row, in their order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < outputs
    result = tl.zeros([BLOCK], dtype=tl.float32)
    offsets = row * outputs + column
    for _ in range(num_parts):
        result += tl.load(parts_ptr + offsets, mask=is_column, other=0.0)
        offsets += tl.cast(num_rows, tl.int64) * outputs
    if bias_ptr is not None:
        result += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + column, result.to(out_ptr.dtype.element_ty), mask=is_column)


@cached_launches
@triton.jit(do_not_specialize=["first_row", "num_rows", "scale_stride"])
def _dequantise_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, first_row, num_rows, outputs, inputs, scale_stride,
    PACKED: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    """One program writes the numbers of a run of columns of some rows, of `num_rows` from `first_row` on."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    run = tl.program_id(0)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, row = place < num_rows, first_row + place
    of_block = block_of(row, run, scale_stride, ROWS, COLUMNS, RUN)
    scale = scales_at(scales_ptr, of_block, is_row)
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * inputs + run * RUN
    mask = is_row[:, None]
    if PACKED:
        packed, zeros = codes_of_packed(
            codes_ptr, zeros_ptr, of_block, run, row, outputs, is_row, dtype, INTEGERS, RUN, True
        )
        out_ptrs += tl.arange(0, RUN // 2)[None, :]
        numbers = numbers_of_packed(packed & 0x0F, zeros, dtype, INTEGERS, True)
        tl.store(out_ptrs, scaled_numbers(numbers, scale, dtype, False), mask=mask)
        numbers = numbers_of_packed(packed >> 4, zeros, dtype, INTEGERS, True)
        tl.store(out_ptrs + RUN // 2, scaled_numbers(numbers, scale, dtype, False), mask=mask)
    else:
        numbers = numbers_of_bytes(
            codes_ptr, zeros_ptr, of_block, run, row, inputs, is_row, dtype, RUN, EVEN, INTEGERS, READING, True
        )
        column = tl.arange(0, RUN)
        if not EVEN:
            mask = mask & (run * RUN + column < inputs)[None, :]
        tl.store(out_ptrs + column[None, :], scaled_numbers(numbers, scale, dtype, False), mask=mask)


# The interpreter multiplies bfloat16 as if it were integers, so products are of float32 there.
INTERPRETED = not isinstance(_quantised_linear_kernel, triton.JITFunction)
PARTS_BLOCK = 512


def quantised_linear(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None, x_scales: torch.Tensor | None = None
) -> torch.Tensor:
    """As `quantised_linear_reference`. x_scales: float32 `[blocks of columns, num_rows]`, by which the numbers of x
    are to be multiplied; there are as many blocks as of the weight's scales."""
    num_rows = x.numel() // weight.shape[1]
    if _every_tile and num_rows:
        _run_every_tile(x, weight, bias, x_scales)
    if x_scales is None and is_dequantised(num_rows, weight, x.dtype):
        return dequantised_linear(x, weight, bias)
    tile = tile_of(num_rows, x.dtype)
    return multiply(x, weight, bias, tile, num_splits(num_rows, weight, tile), x_scales=x_scales)


def is_dequantised(num_tokens: int, weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether the weight becomes numbers before this many tokens of `dtype` are multiplied by it."""
    is_many = dtype.itemsize == 2 and num_tokens >= LEAST_DEQUANTISED[weight.kind]
    return is_many and weight.kind not in _always_codes


def dequantised_linear(
    x: torch.Tensor,
    weight: QuantisedWeight,
    bias: torch.Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    """As `quantised_linear_reference`, by numbers that are rounded to x's dtype, and torch's product. scratch_bytes:
    the most memory that the numbers take at a time.

    The memory is the allocator's and free again after the product: a graph has it in its pool, and each stream its own.
    """
    outputs, inputs = weight.shape
    rows = as_rows(x, inputs)
    size = rows_of_slice(outputs, inputs * x.itemsize, scratch_bytes)
    out, scratch = rows.new_empty(len(rows), outputs), rows.new_empty(size, inputs)
    for first in range(0, outputs, size):
        numbers = scratch[: outputs - first]
        dequantise_rows(weight, first, numbers)
        columns = slice(first, first + len(numbers))
        if bias is None:
            torch.mm(rows, numbers.t(), out=out[:, columns])
        else:
            torch.addmm(bias[columns], rows, numbers.t(), out=out[:, columns])
    return out.view(*x.shape[:-1], outputs)


def rows_of_slice(outputs: int, row_bytes: int, scratch_bytes: int) -> int:
    """How many rows of a weight are numbers at a time: all of them where they fit, else slices that are about equal."""
    num_slices = -(-outputs * row_bytes // scratch_bytes)
    return min(outputs, -(-outputs // (num_slices * SLICE_ROWS)) * SLICE_ROWS)


def dequantise_rows(
    weight: QuantisedWeight,
    first: int,
    out: torch.Tensor,
    reading: int | None = None,
) -> None:
    """Write the numbers of the rows from `first` on to `out`, contiguous `[num_rows, in]` of 16 bits. reading: as of
    `multiply`."""
    outputs, inputs = weight.shape
    block_rows, warps = DEQUANTISED_FORM
    _dequantise_kernel[triton.cdiv(inputs, weight.run), triton.cdiv(len(out), block_rows)](
        weight.codes, weight.scales, weight.zeros, out, first, len(out), outputs, inputs, weight.scales.shape[1],
        **form_of(weight), BLOCK_N=block_rows, READING=_reading(weight, out.device, reading), num_warps=warps,
    )  # fmt: skip


def form_of(weight: QuantisedWeight) -> dict[str, int]:
    """The constants of a kernel that reads this weight."""
    return {
        "PACKED": weight.kind in PACKED,
        "INTEGERS": weight.kind in INTEGERS,
        "ROWS": weight.rows,
        "COLUMNS": weight.columns if len(weight.scales) > 1 else 0,
        "RUN": weight.run,
        "EVEN": weight.shape[1] % weight.run == 0,
    }


def as_rows(x: torch.Tensor, inputs: int) -> torch.Tensor:
    """`[num_tokens, inputs]`, the numbers of a row side by side."""
    rows = x.reshape(-1, inputs)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def invariant_quantised_linear(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None, x_scales: torch.Tensor | None = None
) -> torch.Tensor:
    """As `quantised_linear`, in tiles and an order that do not follow from the number of rows: a row has the same
    bits alone and among any others."""
    return multiply(x, weight, bias, WIDE_TILE if x.itemsize > 2 else INVARIANT_TILE, 1, x_scales=x_scales)


def _run_every_tile(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None, x_scales: torch.Tensor | None
) -> None:
    """Each kernel of this product, over one row. Weights of a kind that cannot become numbers here stay codes."""
    row, x_scales = x.reshape(-1, weight.shape[1])[:1], None if x_scales is None else x_scales[:, :1].contiguous()
    for tile in [WIDE_TILE] if x.itemsize > 2 else TILES:
        for splits in {1, num_splits(1, weight, tile)}:
            multiply(row, weight, bias, tile, splits, x_scales=x_scales)
    if x_scales is None and x.itemsize == 2 and weight.kind not in _always_codes:
        try:
            dequantised_linear(row, weight, bias)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - of Triton, torch or the driver, and products go on without it
            _always_codes.add(weight.kind)
            reason = str(error).partition("\n")[0]
            logger.warning("weights in %s are multiplied as codes for any number of tokens: %s", weight.kind, reason)


def multiply(
    x: torch.Tensor,
    weight: QuantisedWeight,
    bias: torch.Tensor | None,
    tile: Tile,
    splits: int,
    reading: int | None = None,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product by these tiles. reading: how codes of e4m3 are read, by default as suits the device."""
    outputs, inputs = weight.shape
    rows = as_rows(x, inputs)
    num_rows, device = len(rows), x.device
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=device)
    if num_rows:
        num_runs = triton.cdiv(inputs, weight.run)
        parts = torch.empty(splits, num_rows, outputs, device=device) if splits > 1 else None
        grid = triton.cdiv(num_rows, tile.tokens), triton.cdiv(outputs, tile.outputs), splits
        _quantised_linear_kernel[grid](
            rows, x_scales, weight.codes, weight.scales, weight.zeros, None if splits > 1 else bias,
            out if parts is None else parts, num_rows, rows.stride(0), outputs, inputs, weight.scales.shape[1],
            triton.cdiv(num_runs, splits), **form_of(weight), SPLIT=splits > 1, BLOCK_M=tile.tokens,
            BLOCK_N=tile.outputs, READING=_reading(weight, device, reading), WIDEN=INTERPRETED,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if parts is not None:
            _add_parts_kernel[(num_rows, triton.cdiv(outputs, PARTS_BLOCK))](
                parts, bias, out, num_rows, splits, outputs, BLOCK=PARTS_BLOCK
            )
    return out.view(*x.shape[:-1], outputs)


def _reading(weight: QuantisedWeight, device: torch.device, wanted: int | None) -> int:
    """How the codes of a weight are read on a device, or as is wanted: those of e4m3 alone have several ways."""
    if weight.kind != FP8:
        return BY_INTEGERS
    return reading_on(device) if wanted is None else wanted


@cache
def reading_on(device: torch.device) -> int:
    """How codes of e4m3 are read there."""
    if device.type != "cuda":
        return BY_INTEGERS
    return reading_of(torch.cuda.get_device_capability(device))


def reading_of(capability: tuple[int, int]) -> int:
    """How codes of e4m3 are read by GPUs of this compute capability."""
    return next((reading for least, reading in READINGS if capability >= least), BY_INTEGERS)

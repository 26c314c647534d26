"""MXFP4 (OCP Microscaling Formats 1.0): what its codes, e2m1, and its scales, e8m0, stand for, and how kernels read
them.

By integer operations on every GPU: no type of the compiler has 4 bits, and a lookup in a table would take more of them.
"""

from __future__ import annotations

from dflash_kernels.triton_import import tl, triton

# What the codes 0 to 15 are: a sign, two bits of exponent, one of mantissa.
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*POSITIVE, *(-value for value in POSITIVE))
# Weights of a row that share a scale, which is 2 ** (byte - 127); 255 is not a number.
GROUP, SCALE_BIAS, NOT_A_NUMBER = 32, 127, 255


@triton.jit
def numbers_of_e2m1(codes, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """uint8 from 0 to 15 -> numbers in `dtype`, exactly, as `numbers_of_e4m3`."""
    bits = codes.to(tl.int16)
    sign = (bits << 12) & -0x8000
    if dtype == tl.bfloat16:
        bits = sign | ((bits & 7) << 6)
        if WIDEN:  # the interpreter loses numbers below the normal ones of bfloat16 on their way to float32
            numbers = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            numbers = bits.to(tl.bfloat16, bitcast=True)
        numbers = numbers * tl.full([], 2.0**126, numbers.dtype)
    else:
        numbers = (sign | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
        if WIDEN or dtype == tl.float32:
            numbers = numbers.to(tl.float32)
        numbers = numbers * tl.full([], 2.0**14, numbers.dtype)
    return numbers


@triton.jit
def scales_at(scales_ptr, offsets, mask):
    """Scales in float32. A byte is the exponent of a power of two, as float32 has it; the lowest is below what its
    exponents reach."""
    scales = tl.load(scales_ptr + offsets, mask=mask, other=0)
    if scales_ptr.dtype.element_ty == tl.uint8:
        exponents = scales.to(tl.int32)
        scales = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
    return scales.to(tl.float32)

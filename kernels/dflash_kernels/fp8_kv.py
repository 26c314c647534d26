"""KV in FP8: numbers of e4m3 (Micikevicius et al., arXiv 2209.05433), and for each token, head, and K or V a scale in
float32, the largest number by 448. No scale is of several tokens, so a token's KV does not follow from its neighbours.

Kernels make and read the bytes by integer operations: compilers have no e4m3 before compute capability 8.9, and so all
devices have the same bits. Zeros are bytes of 0 with any scale, so an unwritten cache holds finite numbers.
"""

from __future__ import annotations

import torch

from dflash_kernels.triton_import import tl, triton

LARGEST = 448.0
# The bits of a number, moved to the sign, exponent and mantissa of a float16, are its 2 ** -8. An arithmetic shift
# leaves the sign in the bit behind it too.
FLOAT16_SHIFT, WITHOUT_SECOND_SIGN = 256.0, ~0x4000


def quantise_kv_reference(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kv: `[..., head_dim]`. Returns its bytes, uint8 of the same shape, and their scales, float32 `[...]`."""
    numbers = kv.float()
    scales = numbers.abs().amax(dim=-1) / LARGEST
    codes = numbers / torch.where(scales > 0, scales, 1.0)[..., None]
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantise_kv_reference(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantise_kv_reference` made of KV, as numbers: `[..., head_dim]` in `dtype`."""
    # As `decode_e4m3`, which on a CPU is four times as fast as torch's own conversion.
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & WITHOUT_SECOND_SIGN
    return bits.view(torch.float16).float().mul_((scales * FLOAT16_SHIFT)[..., None]).to(dtype)


_LARGEST = tl.constexpr(LARGEST)
_FLOAT16_SHIFT, _WITHOUT_SECOND_SIGN = tl.constexpr(FLOAT16_SHIFT), tl.constexpr(WITHOUT_SECOND_SIGN)


@triton.jit
def encode_e4m3(numbers):
    """float32 of at most 448 and what rounds to it, to the nearest e4m3, to even among two: uint8."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Exponents are biased by 127 there and by 7 here, and of 23 bits of a mantissa 3 are kept.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2 ** -6 numbers are 2 ** -9 apart, as float32 at 2 ** 14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):
    """uint8 -> float32, exactly."""
    bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & _WITHOUT_SECOND_SIGN
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * _FLOAT16_SHIFT


@triton.jit
def store_kv(low, high, written, half_dim, mask, scales_ptr, scale_offsets, is_head, DTYPE: tl.constexpr):
    """Both halves of some heads, `[heads, half]`, 0 outside of the mask, to `written` and half_dim behind it. With
    scales as FP8: they go to `scale_offsets` `[heads]` where `is_head`. Otherwise in DTYPE."""
    if scales_ptr is not None:
        top = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)).to(tl.float32)
        scale = tl.div_rn(top, _LARGEST + tl.zeros_like(top))
        tl.store(scales_ptr + scale_offsets, scale, mask=is_head)
        low, high = low.to(tl.float32), high.to(tl.float32)
        divisor = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros_like(low)
        tl.store(written, encode_e4m3(tl.div_rn(low, divisor)), mask=mask)
        tl.store(written + half_dim, encode_e4m3(tl.div_rn(high, divisor)), mask=mask)
    else:
        tl.store(written, low.to(DTYPE), mask=mask)
        tl.store(written + half_dim, high.to(DTYPE), mask=mask)


@triton.jit
def load_kv(cache_ptr, scales_ptr, offsets, scale_offsets, there, inside, DTYPE: tl.constexpr):
    """The heads of some tokens, `[tokens, numbers]` in DTYPE. offsets, there: `[tokens, numbers]`. scale_offsets,
    inside: `[tokens]`, of the scales of an FP8 cache; without scales the cache has a floating dtype of its own. A
    mask of None: all are there."""
    numbers = tl.load(cache_ptr + offsets, mask=there, other=None if there is None else 0)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + scale_offsets, mask=inside, other=None if inside is None else 0.0)
        numbers = decode_e4m3(numbers) * scale[:, None]
    return numbers.to(DTYPE)

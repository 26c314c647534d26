"""Activations in FP8 (e4m3) with dynamic scales: of each token one for all of its numbers, or one for each group of
columns, float32, the largest number by 448. No scale is of several tokens, so a token's codes do not follow from what
runs beside it, nor from how many tokens a launch has. The scale of a NaN is one, so that a product of it is too.

torch's scaled products take codes. Our own kernels take the numbers that the codes stand for, without scales, in the
dtype of the activations, which holds each of them exactly. So both multiply the same numbers.
"""

from __future__ import annotations

import torch

from dflash_kernels.fp8_kv import LARGEST, decode_e4m3, encode_e4m3
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

CODE = torch.float8_e4m3fn


def quantise_activations_reference(
    x: torch.Tensor, columns: int, dtype: torch.dtype = CODE
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: floating `[num_tokens, in_features]`; columns: how many share a scale. Returns the codes in e4m3, or as
    numbers of `dtype`, of x's shape, and their scales, float32 `[ceil(in_features / columns), num_tokens]`."""
    num_tokens, inputs = x.shape
    groups = -(-inputs // columns)
    padded = torch.nn.functional.pad(x.float(), (0, groups * columns - inputs)).view(num_tokens, groups, columns)
    # By a tensor: a GPU divides by a number as it multiplies by its reciprocal, which rounds twice.
    scales = padded.abs().amax(dim=2) / padded.new_tensor(LARGEST)
    codes = (padded / torch.where(scales > 0, scales, 1.0)[:, :, None]).to(CODE)
    return codes.view(num_tokens, -1)[:, :inputs].contiguous().to(dtype), scales.t().contiguous()


_LARGEST = tl.constexpr(LARGEST)
# Numbers of a program that four warps hold.
WARP_NUMBERS = 1024


@cached_launches
@triton.jit(do_not_specialize=["scales_stride"])
def _quantise_activations_kernel(
    x_ptr, codes_ptr, scales_ptr, scales_stride, x_stride, inputs, columns, AS_NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program has one group of a token."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tl.arange(0, BLOCK)
    column = group * columns + own
    inside = (own < columns) & (column < inputs)
    numbers = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(numbers), 0)
    scale = tl.div_rn(top, _LARGEST + tl.zeros_like(top))
    # Neither the largest number nor a code of a NaN is one.
    scale = tl.where(tl.max((numbers != numbers).to(tl.int32), 0) > 0, float("nan"), scale)
    tl.store(scales_ptr + tl.cast(group, tl.int64) * scales_stride + token, scale)
    codes = encode_e4m3(tl.div_rn(numbers, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(numbers)))
    code_ptrs = codes_ptr + token * inputs + column
    if AS_NUMBERS:
        tl.store(code_ptrs, decode_e4m3(codes).to(codes_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(code_ptrs, codes, mask=inside)


def quantise_activations(
    x: torch.Tensor, columns: int, dtype: torch.dtype = CODE, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantise_activations_reference`, in one launch; the numbers of a row of x lie side by side.

    The results have tokens up to a multiple of `multiple`; codes and scales of those after x's are not written.
    """
    num_tokens, inputs = x.shape
    num_rows = triton.cdiv(num_tokens, multiple) * multiple
    groups = triton.cdiv(inputs, columns)
    scales = torch.empty(groups, num_rows, device=x.device)
    # Bytes are written by integer operations, since not every GPU has the type.
    codes = torch.empty(num_rows, inputs, dtype=torch.uint8 if dtype == CODE else dtype, device=x.device)
    if num_tokens:
        block = triton.next_power_of_2(columns)
        _quantise_activations_kernel[(num_tokens, groups)](
            x, codes, scales, num_rows, x.stride(0), inputs, columns, AS_NUMBERS=dtype != CODE, BLOCK=block,
            num_warps=max(1, min(16, 4 * block // WARP_NUMBERS)),
        )  # fmt: skip
    return codes.view(CODE) if dtype == CODE else codes, scales

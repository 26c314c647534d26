"""Products of FP8 weights and FP8 activations (`fp8_activations.py`): by torch's scaled products where a launch has
many tokens and the device's tensor cores take e4m3, else by our own kernel.

Activations are quantised in every launch, whatever multiplies. So the same codes and scales are multiplied when a token
is decoded, verified or part of a prompt, and only the order of float32 sums differs, as in any product by shape.

A weight with one scale for all columns of a row takes one scale for each token, and torch's products of rows. One in
blocks takes a scale for each token and as many columns as a block has; torch multiplies those of 128 x 128 on a GPU of
compute capability 9.0 alone. A shape is tried when its weight is loaded, and left to our kernel where torch fails or
gives other numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from dflash_kernels.fp8_activations import CODE, quantise_activations, quantise_activations_reference
from dflash_kernels.quantised_linear import as_rows, invariant_quantised_linear, quantised_linear
from dflash_kernels.quantised_weight import FP8, QuantisedWeight

logger = logging.getLogger(__name__)

# Rows of a weight, and the tokens from which on torch multiplies by one that has as many: with fewer tokens reading the
# weight takes the time, which our tiles are made for, and so it does longer where torch has few rows to share out.
# On an H200 ours took 17.0 and 36.0 us for 16 tokens by 6,144 and 24,576 rows, and torch's 16.6 and 36.0; for 32, as
# ours pads 17, 19.4 and 45.6, and torch's 16.9 and 37.6. By 4,096 rows ours took 16.2 and 34.9 for 64 tokens, and
# torch's 17.2 and 41.1; for 128, 31.2 and 66.4, and torch's 18.6 and 45.2.
LEAST_TOKENS = (6144, 17), (0, 65)
BLOCK = 128
# What scaled products want sizes to be multiples of.
MULTIPLE = 16
# From where on GPUs multiply e4m3; and where torch's product has scales of blocks.
LEAST_CAPABILITY, BLOCKS_CAPABILITY_MAJOR = (8, 9), 9
# What torch's products of blocks want the number of tokens to be a multiple of.
BLOCK_TOKENS = 4
# Of the trial: its numbers of tokens, odd ones among them, and how far bfloat16 may be off, by the largest number.
TRIAL_TOKENS, TOLERANCE = (1, 45, 77, 128), 2e-2
Product = Callable[[torch.Tensor, QuantisedWeight, "torch.Tensor | None"], torch.Tensor]


def least_tokens(outputs: int) -> int:
    """Tokens from which on torch multiplies by a weight of this many rows."""
    return next(tokens for rows, tokens in LEAST_TOKENS if outputs >= rows)


def columns_of_scale(weight: QuantisedWeight) -> int:
    """How many of a token's numbers share a scale."""
    return weight.columns if len(weight.scales) > 1 else weight.shape[1]


def scaled_linear_reference(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., in]` -> `[..., out]` in x's dtype, x quantised, from numbers in float32. bias:
    `[out]`."""
    inputs, columns = weight.shape[1], columns_of_scale(weight)
    codes, scales = quantise_activations_reference(x.reshape(-1, inputs), columns, torch.float32)
    numbers = codes * scales.t().repeat_interleave(columns, dim=1)[:, :inputs]
    product = F.linear(numbers, weight.dequantised(torch.float32), None if bias is None else bias.float())
    return product.to(x.dtype).view(*x.shape[:-1], -1)


class ScaledProduct:
    """The product of activations in FP8 by one weight: `__call__(x, weight, bias)` as `scaled_linear_reference`."""

    def __init__(self, weight: QuantisedWeight, by_torch: bool) -> None:
        """by_torch: launches of many tokens are torch's."""
        self._scales = scales_for_torch(weight) if by_torch else None

    @property
    def by_torch(self) -> bool:
        """Whether launches of many tokens are torch's."""
        return self._scales is not None

    def __call__(self, x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        outputs, inputs = weight.shape
        rows = as_rows(x, inputs)
        if self._scales is not None and len(rows) >= least_tokens(outputs):
            out = multiply_by_torch(rows, weight, self._scales, bias)
        else:
            numbers, scales = quantise_activations(rows, columns_of_scale(weight), x.dtype)
            out = quantised_linear(numbers, weight, bias, scales)
        return out.view(*x.shape[:-1], outputs)


def invariant_scaled_linear(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `scaled_linear_reference`, by our kernel in one tile, whatever the number of rows."""
    numbers, scales = quantise_activations(as_rows(x, weight.shape[1]), columns_of_scale(weight), x.dtype)
    return invariant_quantised_linear(numbers, weight, bias, scales).view(*x.shape[:-1], -1)


def multiply_by_torch(
    rows: torch.Tensor, weight: QuantisedWeight, weight_scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product of rows `[num_tokens, in]` in FP8 by torch, in their dtype; it may compute more rows."""
    multiple = BLOCK_TOKENS if len(weight.scales) > 1 else 1
    codes, scales = quantise_activations(rows, columns_of_scale(weight), multiple=multiple)
    return multiply_scaled(codes, scales, weight, weight_scales, bias, rows.dtype)[: len(rows)]


def multiply_scaled(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantisedWeight,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """torch's product of codes in e4m3 `[num_tokens, in]` with their scales `[groups, num_tokens]` by a weight, whose
    scales are as `scales_for_torch` has them: `[num_tokens, out]` in `dtype`. Sums of e4m3 are kept in float32."""
    kind, of_tokens = F.ScalingType, scales.t()
    if len(scales) > 1:
        of_codes, of_weight = kind.BlockWise1x128, kind.BlockWise128x128
    else:
        of_codes, of_weight, of_tokens = kind.RowWise, kind.RowWise, scales.view(-1, 1)
    product: torch.Tensor = F.scaled_mm(
        codes, weight.codes.view(CODE).t(), of_tokens, of_codes, weight_scales, of_weight, bias=bias,
        output_dtype=dtype, use_fast_accum=False,
    )  # fmt: skip
    return product


def scales_for_torch(weight: QuantisedWeight) -> torch.Tensor:
    """The scales of an FP8 weight as torch's products take them, float32: `[1, out]`, one for each row; or those of
    blocks, `[blocks beside, rounded up to 4, blocks below]`, with those of a row side by side in memory."""
    if len(weight.scales) == 1:
        return weight.with_scale_of_each_row().scales
    beside, below = weight.scales.shape
    padded = weight.scales.new_zeros(below, -(-beside // 4) * 4)
    padded[:, :beside] = weight.scales.t()
    return padded.t()


def fits_torch(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether torch has a scaled product of this form on the weight's device, by what it documents."""
    device, in_blocks = weight.codes.device, len(weight.scales) > 1
    if any(size % MULTIPLE for size in weight.shape) or (in_blocks and (weight.rows, weight.columns) != (BLOCK, BLOCK)):
        return False
    if device.type != "cuda":
        return not in_blocks
    capability = torch.cuda.get_device_capability(device)
    has_form = capability[0] == BLOCKS_CAPABILITY_MAJOR if in_blocks else capability >= LEAST_CAPABILITY
    return has_form and dtype == torch.bfloat16


def product_for(weight: QuantisedWeight, dtype: torch.dtype) -> Product:
    """What multiplies activations of `dtype`, in FP8, by an FP8 weight."""
    of_rows, in_blocks, device = weight.rows == 1, len(weight.scales) > 1, weight.codes.device
    fits = fits_torch(weight, dtype) and _problem_of_shape(weight.shape, of_rows, in_blocks, dtype, device) is None
    return ScaledProduct(weight, fits)


@cache
def _problem_of_shape(
    shape: tuple[int, int], of_rows: bool, in_blocks: bool, dtype: torch.dtype, device: torch.device
) -> str | None:
    """`trial` of a random weight of this shape, once for all weights that are alike; the log says what is wrong."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = shape
    codes = torch.randn(shape, generator=generator).mul_(16).to(CODE).view(torch.uint8).to(device)
    rows, columns = (BLOCK, BLOCK) if in_blocks else (1 if of_rows else outputs, inputs)
    blocks = -(-outputs // rows), -(-inputs // columns)
    scales = torch.rand(blocks, generator=generator).add_(0.5).to(device)
    problem = trial(QuantisedWeight.of_codes(FP8, codes, scales, None, rows, columns), dtype)
    if problem is not None:
        logger.warning("torch's scaled product of %d x %d weights in FP8 is not used: %s", *shape, problem)
    return problem


def trial(weight: QuantisedWeight, dtype: torch.dtype) -> str | None:
    """Multiply random activations of `dtype` by a weight, by torch and by our kernel: what is wrong, else None."""
    for count in TRIAL_TOKENS:
        x = torch.randn(count, weight.shape[1], generator=torch.Generator().manual_seed(1))
        # Tokens and columns of unlike sizes, so that a scale in another's place shows.
        x *= torch.linspace(0.1, 3, count)[:, None] * torch.linspace(0.5, 2, weight.shape[1])
        x = x.to(weight.codes.device, dtype)
        try:
            found = multiply_by_torch(x, weight, scales_for_torch(weight), None).float()
            expected = ScaledProduct(weight, by_torch=False)(x, weight).float()
            error = float((found - expected).abs().amax() / expected.abs().amax())
        except (RuntimeError, ValueError, NotImplementedError) as failure:
            return f"it fails with num_tokens={count} ({str(failure).splitlines()[0]})"
        if not error <= TOLERANCE:
            return f"its numbers are off by {error:.2g} of the largest with num_tokens={count}"
    return None

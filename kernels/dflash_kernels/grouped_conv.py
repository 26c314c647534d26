"""A causal convolution over the tokens of each block, with kernels that the tokens themselves choose: one for each
group of channels, added to one that all tokens share (grouped dynamic depthwise convolution).

`y[i, c] = sum over taps t of (base[t, c] + dynamic[i, t, group of c]) * x[i - t, c]`, where `i - t` is of token i's own
block; before a block's first token there are zeros, so no state is kept.
"""

from __future__ import annotations

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


def grouped_conv_reference(
    x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, block_index: torch.Tensor
) -> torch.Tensor:
    """The convolution of `x` `[n, hidden]`, summed in float32 at least and rounded to its dtype.

    base: `[taps, hidden]`. dynamic: `[n, taps, groups]`, the kernel of each token for each `hidden / groups` channels.
    block_index: int64 `[n]`, each token's place in its block; the tokens of a block lie behind one another.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    num_taps, num_groups = dynamic.shape[1:]
    channels = x.to(wide).unflatten(1, (num_groups, -1))
    kernels = base.to(wide).unflatten(1, (num_groups, -1)) + dynamic.to(wide)[..., None]
    output = kernels[:, 0] * channels
    for tap in range(1, num_taps):
        inside = (block_index >= tap)[:, None, None]
        output += torch.where(inside, kernels[:, tap] * channels.roll(tap, 0), 0.0)
    return output.flatten(1).to(x.dtype)


@cached_launches
@triton.jit
def _grouped_conv_kernel(
    x_ptr, base_ptr, dynamic_ptr, block_index_ptr, output_ptr, x_stride, dynamic_stride,
    HIDDEN: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one piece of one token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < HIDDEN
    place = tl.load(block_index_ptr + token)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        # Before a block's first token there is nothing.
        before = channel < tl.where(place >= tap, HIDDEN, 0)
        x = tl.load(x_ptr + (token - tap) * x_stride + channel, mask=before, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + tap * HIDDEN + channel, mask=inside, other=0.0).to(tl.float32)
        group = dynamic_ptr + token * dynamic_stride + tap * (HIDDEN // GROUP) + channel // GROUP
        total += (base + tl.load(group, mask=inside, other=0.0).to(tl.float32)) * x
    tl.store(output_ptr + token * HIDDEN + channel, total.to(output_ptr.dtype.element_ty), mask=inside)


def grouped_conv(x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, block_index: torch.Tensor) -> torch.Tensor:
    """As `grouped_conv_reference`. A token's numbers must be contiguous in `x` and in `dynamic`."""
    (num_tokens, hidden), (num_taps, num_groups) = x.shape, dynamic.shape[1:]
    output = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(hidden))
        _grouped_conv_kernel[(num_tokens, triton.cdiv(hidden, block))](
            x, base, dynamic, block_index, output, x.stride(0), dynamic.stride(0),
            HIDDEN=hidden, GROUP=hidden // num_groups, TAPS=num_taps, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return output

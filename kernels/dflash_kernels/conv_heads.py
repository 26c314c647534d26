"""The short causal convolution of a gated delta net, its SiLU, and the heads of queries, keys and values that come of
it: queries and keys normalised, once for each value head."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

L2_EPS = 1e-6
TOKENS = 16  # that one program takes


class DeltaHeads(NamedTuple):
    """Heads of a gated delta net. Channels are the queries of all key heads, their keys, and the values; each key head
    serves as many value heads, which follow one another."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def conv_heads_reference(inputs: torch.Tensor, conv: torch.Tensor, heads: DeltaHeads) -> Heads:
    """Queries and keys `[G, num_value_heads, W, key_dim]`, of length 1 (queries over the root of key_dim), and values
    `[G, num_value_heads, W, value_dim]`, all float32.

    inputs: `[G, taps - 1 + W, channels]`, those before the first token first. conv: `[channels, taps]`, the last of
    which is a token's own. Sums are in float32 at least; before the SiLU and
    behind it they are rounded to the inputs' dtype.
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    taps = conv.shape[1]
    width = inputs.shape[1] - taps + 1
    total = inputs[:, :width].to(wide) * conv[:, 0].to(wide)
    for j in range(1, taps):
        total += inputs[:, j : j + width].to(wide) * conv[:, j].to(wide)
    key_size = heads.num_key_heads * heads.key_dim
    activated = F.silu(total.to(inputs.dtype)).float()
    queries, keys, values = activated.split([key_size, key_size, heads.num_value_heads * heads.value_dim], dim=-1)

    def per_head(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (heads.num_key_heads, -1)).transpose(1, 2)
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
        return x.repeat_interleave(heads.group, dim=1)

    split_values = values.unflatten(-1, (heads.num_value_heads, -1)).transpose(1, 2)
    return per_head(queries) * heads.key_dim**-0.5, per_head(keys), split_values


@cached_launches
@triton.jit(do_not_specialize=["width", "row_stride"])
def _conv_heads_kernel(
    inputs_ptr, conv_ptr, queries_ptr, keys_ptr, values_ptr, width, row_stride, scale, eps,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some tokens of one row, of one head."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    value_heads = KEY_HEADS * GROUP
    channels = 2 * KEY_HEADS * KEY_DIM + value_heads * VALUE_DIM
    is_value = head >= 2 * KEY_HEADS
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    of_value = 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM
    first = tl.where(is_value, of_value, head * KEY_DIM)
    offset = tl.arange(0, BLOCK)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = (token < width)[:, None] & (offset < size)
    place = inputs_ptr + row * row_stride + token[:, None].to(tl.int64) * channels + first + offset
    total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(conv_ptr + (first + offset) * TAPS + tap, mask=offset < size, other=0.0).to(tl.float32)
        total += tl.load(place + tap * channels, mask=there, other=0.0).to(tl.float32) * weight
    dtype = inputs_ptr.dtype.element_ty
    total = total.to(dtype).to(tl.float32)
    x = (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)
    if is_value:
        to = (row * value_heads + head - 2 * KEY_HEADS) * width + token
        tl.store(values_ptr + to[:, None] * VALUE_DIM + offset, x, mask=there)
    else:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
        is_key = head >= KEY_HEADS
        key_head = head - tl.where(is_key, KEY_HEADS, 0)
        for i in tl.static_range(GROUP):
            to = (row * value_heads + key_head * GROUP + i) * width + token
            if is_key:
                tl.store(keys_ptr + to[:, None] * KEY_DIM + offset, x, mask=there)
            else:
                tl.store(queries_ptr + to[:, None] * KEY_DIM + offset, x * scale, mask=there)


def conv_heads(inputs: torch.Tensor, conv: torch.Tensor, heads: DeltaHeads) -> Heads:
    """As `conv_heads_reference`. `inputs` and `conv` must be contiguous."""
    num_rows, length, _ = inputs.shape
    taps = conv.shape[1]
    width = length - taps + 1

    def empty(dim: int) -> torch.Tensor:
        shape = num_rows, heads.num_value_heads, width, dim
        return torch.empty(shape, dtype=torch.float32, device=inputs.device)

    queries, keys, values = empty(heads.key_dim), empty(heads.key_dim), empty(heads.value_dim)
    if num_rows and width:
        grid = triton.cdiv(width, TOKENS), 2 * heads.num_key_heads + heads.num_value_heads, num_rows
        _conv_heads_kernel[grid](
            inputs, conv, queries, keys, values, width, inputs.stride(0), heads.key_dim**-0.5, L2_EPS,
            KEY_HEADS=heads.num_key_heads, GROUP=heads.group, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
            TAPS=taps, TOKENS=TOKENS, BLOCK=triton.next_power_of_2(max(heads.key_dim, heads.value_dim)),
            num_warps=4,
        )  # fmt: skip
    return queries, keys, values

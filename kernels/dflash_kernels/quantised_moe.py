"""The MLPs of the experts that a step's tokens go to (`moe.py`), by weights that stay quantised.

The experts of a layer are one weight, whose rows are those of the first expert, then those of the second. Codes become
numbers as in `quantised_linear.py`, and the weight is the first factor of a tile here too: rows of it are many however
few tokens an expert gets. Programs are those of `moe.py`: one for a block of one expert's entries and some columns.
"""

from __future__ import annotations

from functools import partial

import torch

from dflash_kernels import moe, moe_routing
from dflash_kernels.activation import Clamp, clamped_swiglu, gelu
from dflash_kernels.launcher import cached_launches
from dflash_kernels.moe import Biases
from dflash_kernels.quantised_linear import (
    BY_INTEGERS,
    Tile,
    form_of,
    inputs_of_run,
    reading_on,
    sums_of_run,
    with_scale_of_rows,
)
from dflash_kernels.quantised_weight import FP8, QuantisedWeight
from dflash_kernels.triton_import import tl, triton


def quantised_experts_mlp_reference(
    x: torch.Tensor,
    gate_up: QuantisedWeight,
    down: QuantisedWeight,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `moe.experts_mlp_reference`, from numbers in float32.

    gate_up: `[num_experts * 2 * inner, hidden]`, of each expert gate above up. down: `[num_experts * hidden, inner]`.
    """
    num_experts, hidden, inner = sizes_of(gate_up, down)
    numbers = gate_up.dequantised(torch.float32).view(num_experts, 2 * inner, hidden)
    of_down = down.dequantised(torch.float32).view(num_experts, hidden, inner)
    exact = None if biases is None else (biases[0].float(), biases[1].float())
    result = moe.experts_mlp_reference(
        x.float(), numbers, of_down, weights.float(), experts, exact, clamp, is_gelu=is_gelu
    )
    return result.to(x.dtype)


def sizes_of(gate_up: QuantisedWeight, down: QuantisedWeight) -> tuple[int, int, int]:
    """num_experts, hidden, inner."""
    hidden, inner = gate_up.shape[1], down.shape[1]
    return down.shape[0] // hidden, hidden, inner


# As many rows of entries as the tiles of `moe`, in their order, so that a number of tokens takes the same one of both.
# In outputs gate and up count apart.
TILES = (
    Tile(tokens=16, outputs=64, stages=4, warps=4),
    Tile(tokens=32, outputs=64, stages=4, warps=4),
    Tile(tokens=64, outputs=64, stages=3, warps=4),
    Tile(tokens=128, outputs=128, stages=2, warps=8),
)
# For any number of tokens, so that a row has the same bits in any batch.
INVARIANT_TILE = TILES[2]
# Of float32, which is multiplied without tensor cores, from registers.
WIDE_TILE = Tile(tokens=16, outputs=32, stages=2, warps=4)


def tile_of(num_entries: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """The lowest tile that holds what an expert gets on average, as `moe.tile_for`."""
    return WIDE_TILE if dtype.itemsize > 2 else TILES[moe.TILES.index(moe.tile_for(num_entries, num_experts))]


# One compiled kernel serves all numbers of entries: a step must not wait for a compiler.
@cached_launches
@triton.jit(do_not_specialize=["num_entries", "scale_stride"])
def _quantised_gate_up_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, entries_ptr, block_experts_ptr, out_ptr, num_entries,
    scale_stride, outputs, PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr,
    INTEGERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, READING: tl.constexpr, WIDEN: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """One program: `silu(gate) * up` of one block's entries in BLOCK_N columns, to `out[entry]`; with a limit above
    0 `clamped_swiglu`; with GELU that in place of SiLU. outputs: rows of the weight."""
    block = tl.program_id(0)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    entries = tl.load(entries_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_entry = entries < num_entries
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < INNER
    of_gate = expert * (2 * INNER) + column
    of_up = of_gate + INNER
    x_ptrs = x_ptr + (entries // PER_TOKEN).to(tl.int64)[None, :] * HIDDEN
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for run in range(0, tl.cdiv(HIDDEN, RUN)):
        x, other = inputs_of_run(x_ptrs, is_entry, run, HIDDEN, PACKED, RUN, EVEN, WIDEN)
        gate += sums_of_run(
            x, other, codes_ptr, scales_ptr, zeros_ptr, run, of_gate, outputs, HIDDEN, scale_stride, is_column,
            dtype, PACKED, INTEGERS, ROWS, COLUMNS, RUN, EVEN, READING, WIDEN,
        )  # fmt: skip
        up += sums_of_run(
            x, other, codes_ptr, scales_ptr, zeros_ptr, run, of_up, outputs, HIDDEN, scale_stride, is_column,
            dtype, PACKED, INTEGERS, ROWS, COLUMNS, RUN, EVEN, READING, WIDEN,
        )  # fmt: skip
    gate = with_scale_of_rows(gate, scales_ptr, of_gate, is_column, ROWS, COLUMNS)
    up = with_scale_of_rows(up, scales_ptr, of_up, is_column, ROWS, COLUMNS)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + of_gate, mask=is_column, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + of_up, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if LIMIT > 0:
        activated = clamped_swiglu(gate, up, ALPHA, LIMIT)
    elif GELU:
        activated = gelu(gate) * up
    else:
        activated = gate * tl.sigmoid(gate) * up
    out_ptrs = out_ptr + entries.to(tl.int64)[None, :] * INNER + column[:, None]
    tl.store(out_ptrs, activated.to(out_ptr.dtype.element_ty), mask=is_column[:, None] & is_entry[None, :])


@cached_launches
@triton.jit(do_not_specialize=["num_entries", "scale_stride"])
def _quantised_down_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, weights_ptr, entries_ptr, block_experts_ptr, out_ptr,
    num_entries, scale_stride, outputs, HIDDEN: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr,
    INTEGERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, READING: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program: the router's weight times the down projection of one block's entries in BLOCK_N columns, to
    `out[entry]`. outputs: rows of the weight."""
    block = tl.program_id(0)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    entries = tl.load(entries_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_entry = entries < num_entries
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < HIDDEN
    row = expert * HIDDEN + column
    x_ptrs = x_ptr + entries.to(tl.int64)[None, :] * INNER
    result = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for run in range(0, tl.cdiv(INNER, RUN)):
        x, other = inputs_of_run(x_ptrs, is_entry, run, INNER, PACKED, RUN, EVEN, WIDEN)
        result += sums_of_run(
            x, other, codes_ptr, scales_ptr, zeros_ptr, run, row, outputs, INNER, scale_stride, is_column, dtype,
            PACKED, INTEGERS, ROWS, COLUMNS, RUN, EVEN, READING, WIDEN,
        )  # fmt: skip
    result = with_scale_of_rows(result, scales_ptr, row, is_column, ROWS, COLUMNS)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + row, mask=is_column, other=0.0).to(tl.float32)[:, None]
    weights = tl.load(weights_ptr + entries, mask=is_entry, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + entries.to(tl.int64)[None, :] * HIDDEN + column[:, None]
    weighted = (result * weights[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, weighted, mask=is_column[:, None] & is_entry[None, :])


# The interpreter multiplies bfloat16 as if it were integers, so products are of float32 there.
INTERPRETED = not isinstance(_quantised_down_kernel, triton.JITFunction)


def quantised_experts_mlp(
    x: torch.Tensor,
    gate_up: QuantisedWeight,
    down: QuantisedWeight,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
    tile: Tile | None = None,
    reading: int | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `quantised_experts_mlp_reference`, without a wait for the device; `experts` is int32, `biases`
    are contiguous. tile: other than `tile_of` would choose, for 16 bits. reading: how codes of e4m3 are read, by
    default as suits the device.

    A token's result does not depend on the order of programs: each entry has a row of its own, and a token's rows
    are summed in the order of its experts.
    """
    num_tokens, per_token = experts.shape
    num_experts, hidden, inner = sizes_of(gate_up, down)
    num_entries = experts.numel()
    if num_tokens == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if tile is None or x.itemsize > 2:
        tile = tile_of(num_entries, num_experts, x.dtype)
    blocks = moe_routing.group(experts.contiguous(), num_experts, tile.tokens)
    num_blocks, reading = len(blocks.experts), reading_on(x.device) if reading is None else reading
    of_gate_up, of_down = biases or (None, None)
    alpha, limit = clamp or (0.0, 0.0)
    # Gate and up share a tile's outputs.
    block_n = tile.outputs // 2
    activated = x.new_empty(num_entries, inner)
    _quantised_gate_up_kernel[(num_blocks, triton.cdiv(inner, block_n))](
        x.contiguous(), gate_up.codes, gate_up.scales, gate_up.zeros, of_gate_up, blocks.entries, blocks.experts,
        activated, num_entries, gate_up.scales.shape[1], gate_up.shape[0], PER_TOKEN=per_token, HIDDEN=hidden,
        INNER=inner, ALPHA=alpha, LIMIT=limit, GELU=is_gelu, BLOCK_N=block_n, **_form(gate_up, tile, reading),
    )  # fmt: skip
    parts = x.new_empty(num_entries, hidden)
    _quantised_down_kernel[(num_blocks, triton.cdiv(hidden, tile.outputs))](
        activated, down.codes, down.scales, down.zeros, of_down, weights.contiguous(), blocks.entries,
        blocks.experts, parts, num_entries, down.scales.shape[1], down.shape[0], HIDDEN=hidden, INNER=inner,
        BLOCK_N=tile.outputs, **_form(down, tile, reading),
    )  # fmt: skip
    return moe.sum_of_parts(parts, num_tokens, per_token)


def _form(weight: QuantisedWeight, tile: Tile, reading: int) -> dict[str, int]:
    """What a kernel is compiled for, of this weight and this tile."""
    is_fp8 = weight.kind == FP8
    return form_of(weight) | {
        "BLOCK_M": tile.tokens,
        "READING": reading if is_fp8 else BY_INTEGERS,
        "WIDEN": INTERPRETED,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


invariant_quantised_experts_mlp = partial(quantised_experts_mlp, tile=INVARIANT_TILE)
"""As `quantised_experts_mlp`, in tiles that do not follow the number of tokens: a token has the same bits alone and
among any others."""

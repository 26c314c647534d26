"""The MLPs of the experts that a step's tokens go to (Qwen3-MoE, arXiv 2505.09388; gpt-oss, arXiv 2508.10925).

With few tokens, reading the weights of the chosen experts takes the time: tiles are low, and long in the
direction in which a weight's row lies in memory. With many tokens each expert has a matrix product of its own. Both are
the same two kernels over blocks of entries (`moe_routing`), with tiles for the number of tokens an expert gets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from dflash_kernels import moe_routing
from dflash_kernels.activation import (
    Clamp,
    clamped_swiglu,
    clamped_swiglu_reference,
    gelu,
    gelu_mul_reference,
    invariant_gelu_mul_reference,
    invariant_silu_mul_reference,
    silu_mul_reference,
)
from dflash_kernels.invariant_linear import ProductTile, invariant_linear_reference
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

Biases = tuple[torch.Tensor, torch.Tensor]
"""The experts' biases: `[num_experts, 2 * inner]`, gate before up, and `[num_experts, hidden]`."""


def experts_mlp_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """The sum over each token's experts of `weight * down(silu(gate(x)) * up(x))`, in the order of its experts.

    x: `[n, hidden]`. gate_up: `[num_experts, 2 * inner, hidden]`, gate above up. down: `[num_experts, hidden, inner]`.
    weights, in x's dtype, and experts, integer: `[n, per_token]`. clamp: `clamped_swiglu` in place of the SiLU's gate;
    is_gelu: GELU, by its tanh form.
    Returns `[n, hidden]` in x's dtype. Each chosen expert runs once over all of its tokens, whose number is read back
    to the host.
    """
    gate = gelu_mul_reference if is_gelu else silu_mul_reference
    outputs = _of_experts(x, gate_up, down, experts, biases, clamp, gate, F.linear)
    return (outputs * weights[:, :, None]).sum(dim=1)


def _of_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    biases: Biases | None,
    clamp: Clamp | None,
    gate: Callable[[torch.Tensor], torch.Tensor],
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
) -> torch.Tensor:
    """What each token's experts make of it: `[n, per_token, hidden]`. gate: where there is no `clamp`."""
    num_tokens, per_token = experts.shape
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=len(gate_up)).tolist()
    # Entry i of the sorted list belongs to token order[i] // per_token.
    done = []
    for expert, chunk in enumerate(x[order // per_token].split(counts)):
        if len(chunk):
            of_gate_up, of_down = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
            inner = product(chunk, gate_up[expert], of_gate_up)
            inner = gate(inner) if clamp is None else clamped_swiglu_reference(inner, clamp)
            done.append(product(inner, down[expert], of_down))
    outputs = x.new_empty(num_tokens * per_token, x.shape[-1])
    if done:
        outputs[order] = torch.cat(done)
    return outputs.view(num_tokens, per_token, x.shape[-1])


# Ascending in rows. Tensor cores take 16 rows at least. Each takes up to 96 KiB of shared memory, which every GPU since
# Ampere has for a block (99 KiB where it is least).
TILES = (
    ProductTile(rows=16, columns=64, k_bytes=256, stages=4, warps=4),
    ProductTile(rows=32, columns=64, k_bytes=256, stages=4, warps=4),
    ProductTile(rows=64, columns=128, k_bytes=128, stages=4, warps=4),
    ProductTile(rows=128, columns=128, k_bytes=128, stages=3, warps=8),
)


def tile_for(num_entries: int, num_experts: int) -> ProductTile:
    """The lowest tile that holds what an expert gets on average, so that weights are read about once and few rows are
    empty."""
    average = num_entries / num_experts
    return next((tile for tile in TILES if average <= tile.rows), TILES[-1])


# One compiled kernel serves all numbers of entries: a step must not wait for a compiler.
@cached_launches
@triton.jit(do_not_specialize=["num_entries"])
def _gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, entries_ptr, block_experts_ptr, out_ptr, num_entries,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """One program: `silu(gate) * up` of one block's entries in BLOCK_N columns, to `out[entry]`; with a limit above
    0 `clamped_swiglu`; with GELU that in place of SiLU."""
    block = tl.program_id(0)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    entries = tl.load(entries_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_entry = entries < num_entries
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < INNER
    offsets = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (entries // PER_TOKEN).to(tl.int64)[:, None] * HIDDEN + offsets[None, :]
    first = expert.to(tl.int64) * (2 * INNER * HIDDEN)
    gate_ptrs = weight_ptr + first + columns[None, :] * HIDDEN + offsets[:, None]
    up_ptrs = gate_ptrs + INNER * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, HIDDEN, BLOCK_K):
        x_mask = is_entry[:, None]
        weight_mask = is_column[None, :]
        if HIDDEN % BLOCK_K != 0:
            x_mask = x_mask & (k + offsets < HIDDEN)[None, :]
            weight_mask = weight_mask & (k + offsets < HIDDEN)[:, None]
        x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        gate_rows = tl.load(gate_ptrs + k, mask=weight_mask, other=0.0)
        up_rows = tl.load(up_ptrs + k, mask=weight_mask, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            gate_rows = gate_rows.to(tl.float32)
            up_rows = up_rows.to(tl.float32)
        gate = tl.dot(x, gate_rows, gate, input_precision="ieee")
        up = tl.dot(x, up_rows, up, input_precision="ieee")
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * (2 * INNER) + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptrs + INNER, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if LIMIT > 0:
        activated = clamped_swiglu(gate, up, ALPHA, LIMIT)
    elif GELU:
        activated = gelu(gate) * up
    else:
        activated = gate * tl.sigmoid(gate) * up
    out_ptrs = out_ptr + entries.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(out_ptrs, activated.to(out_ptr.dtype.element_ty), mask=is_entry[:, None] & is_column[None, :])


@cached_launches
@triton.jit(do_not_specialize=["num_entries"])
def _down_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    weights_ptr,
    entries_ptr,
    block_experts_ptr,
    out_ptr,
    num_entries,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program: the router's weight times the down projection of one block's entries in BLOCK_N columns, to
    `out[entry]`."""
    block = tl.program_id(0)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    entries = tl.load(entries_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_entry = entries < num_entries
    rows = entries.to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < HIDDEN
    offsets = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * INNER + offsets[None, :]
    first = expert.to(tl.int64) * (HIDDEN * INNER)
    down_ptrs = weight_ptr + first + columns[None, :] * INNER + offsets[:, None]
    result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, INNER, BLOCK_K):
        x_mask = is_entry[:, None]
        weight_mask = is_column[None, :]
        if INNER % BLOCK_K != 0:
            x_mask = x_mask & (k + offsets < INNER)[None, :]
            weight_mask = weight_mask & (k + offsets < INNER)[:, None]
        x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        down_rows = tl.load(down_ptrs + k, mask=weight_mask, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            down_rows = down_rows.to(tl.float32)
        result = tl.dot(x, down_rows, result, input_precision="ieee")
    if bias_ptr is not None:
        result += tl.load(bias_ptr + expert * HIDDEN + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    weights = tl.load(weights_ptr + rows, mask=is_entry, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * HIDDEN + columns[None, :]
    weighted = (result * weights[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, weighted, mask=is_entry[:, None] & is_column[None, :])


@cached_launches
@triton.jit
def _sum_kernel(parts_ptr, out_ptr, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """One program sums one token's entries in BLOCK columns, one after the other, in float32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < HIDDEN
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in range(PER_TOKEN):
        part = tl.load(parts_ptr + (token * PER_TOKEN + rank) * HIDDEN + columns, mask=is_column, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


# The interpreter multiplies bfloat16 as if it were integers, so products are of float32 there.
INTERPRETED = not isinstance(_gate_up_kernel, triton.JITFunction)


def experts_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
    tile: ProductTile | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `experts_mlp_reference`, without a wait for the device; `experts` is int32, `gate_up`, `down` and `biases`
    are contiguous. `tile`: other than `tile_for` would choose.

    A token's result does not depend on the order of programs: each entry has a row of its own, and a token's rows
    are summed in the order of its experts.
    """
    num_tokens, per_token = experts.shape
    num_experts, hidden, inner = down.shape
    num_entries = experts.numel()
    if num_tokens == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    tile = tile or tile_for(num_entries, num_experts)
    blocks = moe_routing.group(experts.contiguous(), num_experts, tile.rows)
    num_blocks = len(blocks.experts)
    launch = {"BLOCK_K": tile.k_bytes // x.element_size(), "num_warps": tile.warps, "num_stages": tile.stages}
    launch |= {"WIDEN": INTERPRETED}
    of_gate_up, of_down = biases or (None, None)
    alpha, limit = clamp or (0.0, 0.0)
    # Gate and up share a tile's columns.
    block_n = tile.columns // 2
    activated = x.new_empty(num_entries, inner)
    _gate_up_kernel[(num_blocks, triton.cdiv(inner, block_n))](
        x.contiguous(), gate_up, of_gate_up, blocks.entries, blocks.experts, activated, num_entries,
        PER_TOKEN=per_token, HIDDEN=hidden, INNER=inner, ALPHA=alpha, LIMIT=limit, GELU=is_gelu,
        BLOCK_M=tile.rows, BLOCK_N=block_n, **launch,
    )  # fmt: skip
    parts = x.new_empty(num_entries, hidden)
    _down_kernel[(num_blocks, triton.cdiv(hidden, tile.columns))](
        activated, down, of_down, weights.contiguous(), blocks.entries, blocks.experts, parts, num_entries,
        HIDDEN=hidden, INNER=inner,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, **launch,
    )  # fmt: skip
    return sum_of_parts(parts, num_tokens, per_token)


def sum_of_parts(parts: torch.Tensor, num_tokens: int, per_token: int) -> torch.Tensor:
    """`[num_tokens * per_token, hidden]` -> `[num_tokens, hidden]`: a token's entries, added up in their order."""
    hidden = parts.shape[1]
    out = parts.new_empty(num_tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    sums = (num_tokens, triton.cdiv(hidden, block))
    _sum_kernel[sums](parts, out, HIDDEN=hidden, PER_TOKEN=per_token, BLOCK=block)
    return out


def invariant_experts_mlp_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `experts_mlp_reference`, the same bits for a token whatever other tokens go to its experts. A token's
    results are added up in float32, one expert after the other, and rounded once."""
    gate = invariant_gelu_mul_reference if is_gelu else invariant_silu_mul_reference
    outputs = _of_experts(x, gate_up, down, experts, biases, clamp, gate, invariant_linear_reference)
    weighted = (outputs * weights[:, :, None]).float()
    total = weighted[:, 0].clone()
    for rank in range(1, weighted.shape[1]):
        total += weighted[:, rank]
    return total.to(x.dtype)


# One tile for every number of tokens: between those for decode rows and those for long prompts.
INVARIANT_TILE = TILES[2]
invariant_experts_mlp = partial(experts_mlp, tile=INVARIANT_TILE)
"""As `experts_mlp`, in tiles that do not follow the number of tokens."""

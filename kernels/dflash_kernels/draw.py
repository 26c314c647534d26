"""Draw one token from each row of weights, by Gumbel-max sampling."""

from __future__ import annotations

import torch

from dflash_kernels.argmax import WARPS
from dflash_kernels.random_numbers import exponential

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the reference only
    triton = None

# Elements of one program. Smaller than where values are only compared: a hash of each takes registers.
GUMBEL_TILE = 2048

if triton is not None:
    from dflash_kernels.argmax import argmax_in_tile, reduce_tiles, tile_buffers
    from dflash_kernels.random_numbers import exponential_of, state_bits


def draw_reference(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """One token for each row of non-negative, not necessarily normalised `weights` `[n, vocab]`; int64 `[n]`.

    Each token has an exponential number of its own from the row's seed and position (int64 `[n]`), and the one with the
    largest weight over its number is drawn: the Gumbel-max trick. Rounding in a weight, which differs
    between a prefix hit and a miss, then only matters where two tokens are that close. In an inverse of the summed
    distribution it would move the limits of all tokens behind it. A token of weight 0 is never drawn; each row must
    have a positive weight.
    """
    return (weights / exponential(seeds, positions, stream, weights.shape[-1])).argmax(dim=-1)


if triton is not None:

    @triton.jit
    def gumbel_max(weights, state, offsets, size):
        """The largest `weight / exponential` of a tile and its offset: Gumbel-max sampling.

        A weight that is not positive gets -1, so the maximum of a row tells whether any was.
        """
        rate = tl.div_rn(weights, exponential_of(state, offsets.to(tl.int64)))
        return argmax_in_tile(tl.where(weights > 0.0, rate, -1.0), offsets, size)

    # Positions may be part of a row of them, at any alignment.
    @triton.jit(do_not_specialize=["stream"], do_not_specialize_on_alignment=["positions_ptr"])
    def _draw_kernel(
        weights_ptr, seeds_ptr, positions_ptr, value_ptr, index_ptr, stream, vocab, stride, num_tiles,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program draws from one tile of one row."""
        row, tile = tl.program_id(0), tl.program_id(1)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + row.to(tl.int64) * stride + offsets, mask=offsets < vocab, other=0.0)
        state = state_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), stream)
        value, index = gumbel_max(weights, state, offsets, vocab)
        place = row.to(tl.int64) * num_tiles + tile
        tl.store(value_ptr + place, value)
        tl.store(index_ptr + place, index)

    def draw(
        weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int, tile: int = GUMBEL_TILE
    ) -> torch.Tensor:
        """As `draw_reference`, up to the rounding of a logarithm. weights: float32, rows contiguous; seeds and
        positions contiguous."""
        value, index = tile_buffers(len(weights), weights.shape[1], tile, weights.device)
        if len(weights) > 0:
            _draw_kernel[value.shape](
                weights, seeds, positions, value, index,
                int(stream), weights.shape[1], weights.stride(0), value.shape[1], BLOCK=tile, num_warps=WARPS,
            )  # fmt: skip
        return reduce_tiles(value, index)

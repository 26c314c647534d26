"""Probabilities of logits at each row's temperature, over a large vocabulary. Called by `worker.step_ops` for requests
that do not cut their distribution (top-k, top-p and min-p stay with torch)."""

from __future__ import annotations

import torch

from dflash_kernels.argmax import TILE, WARPS

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the reference only
    triton = None


def temperature_softmax_reference(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`softmax(logits / temperature)` in float32: logits `[n, vocab]` of any floating-point dtype, temperature float32
    `[n]`, above 0."""
    return (logits.float() / temperature[:, None]).softmax(dim=-1)


if triton is not None:

    @triton.jit
    def _scaled_tile(logits_ptr, temperature_ptr, row, offsets, vocab, stride):
        """A tile of a row's logits over its temperature, -inf past the vocabulary."""
        inside = offsets < vocab
        logits = tl.load(logits_ptr + row.to(tl.int64) * stride + offsets, mask=inside, other=0.0).to(tl.float32)
        scaled = tl.div_rn(logits, tl.load(temperature_ptr + row) + tl.zeros_like(logits))
        return tl.where(inside, scaled, float("-inf"))

    @triton.jit
    def _finite(largest):
        """0 in place of -inf, for which there is no difference: a tile may hold nothing but forbidden tokens."""
        return tl.where(largest == float("-inf"), 0.0, largest)

    @triton.jit
    def _sum_kernel(logits_ptr, temperature_ptr, largest_ptr, sum_ptr, vocab, stride, num_tiles, BLOCK: tl.constexpr):
        """One program finds the largest of one tile and the sum of exponentials below it."""
        row, tile = tl.program_id(0), tl.program_id(1)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        scaled = _scaled_tile(logits_ptr, temperature_ptr, row, offsets, vocab, stride)
        largest = tl.max(scaled, axis=0)
        place = row.to(tl.int64) * num_tiles + tile
        tl.store(largest_ptr + place, largest)
        tl.store(sum_ptr + place, tl.sum(tl.exp(scaled - _finite(largest)), axis=0))

    @triton.jit
    def _softmax_kernel(
        logits_ptr, temperature_ptr, largest_ptr, sum_ptr, out_ptr, vocab, stride, num_tiles,
        BLOCK: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        """One program puts the sums of a row's tiles together and writes one tile."""
        row, tile = tl.program_id(0), tl.program_id(1)
        tiles = tl.arange(0, TILES)
        places = row.to(tl.int64) * num_tiles + tiles
        largest = tl.load(largest_ptr + places, mask=tiles < num_tiles, other=float("-inf"))
        sums = tl.load(sum_ptr + places, mask=tiles < num_tiles, other=0.0)
        top = tl.max(largest, axis=0)
        total = tl.sum(sums * tl.exp(largest - _finite(top)), axis=0)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        scaled = _scaled_tile(logits_ptr, temperature_ptr, row, offsets, vocab, stride)
        probs = tl.exp(scaled - _finite(top)) / total
        tl.store(out_ptr + row.to(tl.int64) * vocab + offsets, probs, mask=offsets < vocab)

    def temperature_softmax(logits: torch.Tensor, temperature: torch.Tensor, tile: int = TILE) -> torch.Tensor:
        """As `temperature_softmax_reference`. Rows of `logits` must be contiguous."""
        num_rows, vocab = logits.shape
        out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
        if num_rows == 0:
            return out
        grid = (num_rows, triton.cdiv(vocab, tile))
        largest, sums = (torch.empty(grid, dtype=torch.float32, device=logits.device) for _ in range(2))
        _sum_kernel[grid](
            logits, temperature, largest, sums, vocab, logits.stride(0), grid[1], BLOCK=tile, num_warps=WARPS
        )
        _softmax_kernel[grid](
            logits, temperature, largest, sums, out, vocab, logits.stride(0), grid[1],
            BLOCK=tile, TILES=triton.next_power_of_2(grid[1]), num_warps=WARPS,
        )  # fmt: skip
        return out

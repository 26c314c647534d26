"""The index of the largest value of each row over a large vocabulary: of each tile first, then of the tiles.

One program for a row would leave most of a GPU idle at small batches, so each row is split into tiles, a program each.
`sample` finds the largest of a tile in its own way and shares the rest.
"""

from __future__ import annotations

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Elements that one program reads, and its warps.
TILE = 4096
WARPS = 8


def argmax_reference(values: torch.Tensor) -> torch.Tensor:
    """Index of the largest of each row of `values` `[n, vocab]`, the lowest among equals, a NaN counting as the
    largest: int64 `[n]`."""
    if values.device.type == "cpu" and values.dtype == torch.float32 and values.shape[-1]:
        # numpy compares many numbers at once, torch one: a tenth of the time.
        return torch.from_numpy(values.detach().numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


@triton.jit
def argmax_in_tile(values, offsets, size):
    """The largest of float32 `values` and its offset, the lowest among equals. Offsets from `size` on do not
    count; the offset is below `size` whatever the values are, since a token id is looked up next."""
    values = tl.where(values != values, float("inf"), values)
    values = tl.where(offsets < size, values, float("-inf"))
    largest, place = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    return largest, (tl.min(offsets, axis=0) + place).to(tl.int32)


@cached_launches
@triton.jit
def _tile_kernel(values_ptr, max_ptr, index_ptr, vocab, stride, num_tiles, BLOCK: tl.constexpr):
    """One program finds the largest of one tile of one row."""
    row, tile = tl.program_id(0), tl.program_id(1)
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row.to(tl.int64) * stride + offsets, mask=offsets < vocab, other=0.0)
    largest, index = argmax_in_tile(values.to(tl.float32), offsets, vocab)
    place = row.to(tl.int64) * num_tiles + tile
    tl.store(max_ptr + place, largest)
    tl.store(index_ptr + place, index)


@cached_launches
@triton.jit
def _reduce_kernel(max_ptr, index_ptr, out_ptr, num_tiles, TILES: tl.constexpr):
    """One program finds the largest tile of one row. Lower tiles win ties."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    values = tl.load(max_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    _, tile = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(index_ptr + row * num_tiles + tile).to(tl.int64))


def reduce_tiles(largest: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`index` (int32) where `largest` (float32) is largest, both `[n, num_tiles]`: int64 `[n]`."""
    num_rows, num_tiles = largest.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=largest.device)
    if num_rows > 0:
        _reduce_kernel[(num_rows,)](largest, index, out, num_tiles, TILES=triton.next_power_of_2(num_tiles))
    return out


def tile_buffers(num_rows: int, vocab: int, tile: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For the largest value (float32) and its index (int32) of each tile: `[num_rows, num_tiles]`."""
    shape = (num_rows, triton.cdiv(vocab, tile))
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


def argmax(values: torch.Tensor, tile: int = TILE) -> torch.Tensor:
    """As `argmax_reference`, for floating-point `values` whose rows are contiguous."""
    largest, index = tile_buffers(len(values), values.shape[1], tile, values.device)
    if len(values) > 0:
        _tile_kernel[largest.shape](
            values, largest, index, values.shape[1], values.stride(0), largest.shape[1], BLOCK=tile, num_warps=WARPS
        )
    return reduce_tiles(largest, index)

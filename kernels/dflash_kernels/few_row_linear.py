"""Products of few rows, whose time goes with reading the weight: its inputs are split among programs.

A weight of 4,096 rows has 64 tiles, too few for the multiprocessors of a GPU, so each tile is computed in parts by
several programs. The weight is the first factor of a tile, 64 of its rows or more, whatever the number of rows of the
input, which are padded to 16 or 32; pieces of it are under way while others are multiplied. Parts are float32. The
program of a tile that ends last adds them up, in their order, so nothing depends on which ends first, and no kernel
only adds; `by_last=False` leaves that to a second launch.

Not used by the engine: `python -m benchmarks.gpu.card_report --only "few rows"` measures it beside cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

MAX_ROWS = 32
MAX_SPLITS = 32


@dataclass(frozen=True)
class FewRowTile:
    """outputs: the weight's rows of a program. inputs: columns of it that are loaded at a time, `stages` of which are
    under way. by_last: the program that ends last adds up, else a second launch. by_descriptor: the weight is loaded by
    the GPU's unit for tensors (TMA)."""

    outputs: int
    inputs: int
    stages: int
    warps: int = 4
    by_last: bool = True
    by_descriptor: bool = False

    def describe(self) -> str:
        """As "64 x 128, 4 stages, 4 warps, TMA"."""
        text = f"{self.outputs} x {self.inputs}, {self.stages} stages, {self.warps} warps"
        return text + (", TMA" if self.by_descriptor else "") + ("" if self.by_last else ", added by a second launch")


def few_row_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`, `[rows, in]` -> `[rows, out]`, of at most `MAX_ROWS` rows. weight: `[out, in]`."""
    return F.linear(x, weight)


@triton.jit
def _add_up(parts_ptr, out_ptr, num_rows, outputs, num_tiles, splits, tile,
            ROWS: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The sum of a tile's parts, in their order, goes to the output."""
    column, row = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    place = parts_ptr + tile * BLOCK_N * ROWS + column[:, None] * ROWS + row[None, :]
    result = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    size = num_tiles * BLOCK_N * ROWS
    for split in range(0, splits, 4):
        # Four are under way at a time. Other programs have written them: not from this multiprocessor's own cache.
        first = tl.load(place + split * size, cache_modifier=".cg")
        second = tl.load(place + (split + 1) * size, mask=split + 1 < splits, other=0.0, cache_modifier=".cg")
        third = tl.load(place + (split + 2) * size, mask=split + 2 < splits, other=0.0, cache_modifier=".cg")
        fourth = tl.load(place + (split + 3) * size, mask=split + 3 < splits, other=0.0, cache_modifier=".cg")
        result = (((result + first) + second) + third) + fourth
    column += tile * BLOCK_N
    out_ptrs = out_ptr + row[None, :] * outputs + column[:, None]
    tl.store(
        out_ptrs, result.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[None, :] & (column < outputs)[:, None]
    )


@triton.jit
def _multiply_part(
    x_ptr, weight, parts_ptr, counters_ptr, out_ptr, num_rows, outputs, inputs, steps, splits,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_LAST: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program's part of a tile: `steps` pieces of the weight's columns. weight: a pointer or a descriptor."""
    tile, split, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    column, row, offset = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * inputs + offset[None, :]
    # The last rows of the weight stand for those that it lacks, whose sums are not written.
    read = tl.minimum(column, outputs - 1)
    first = split * steps * BLOCK_K
    result = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for k in range(first, tl.minimum(first + steps * BLOCK_K, inputs), BLOCK_K):
        if BY_DESCRIPTOR:
            numbers = weight.load([tile * BLOCK_N, k])
        else:
            numbers = tl.load(weight + read.to(tl.int64)[:, None] * inputs + (k + offset)[None, :])
        x = tl.load(x_ptrs + k, mask=(row < num_rows)[:, None], other=0.0)
        if WIDEN:
            numbers = numbers.to(tl.float32)
            x = x.to(tl.float32)
        result = tl.dot(numbers, tl.trans(x), result, input_precision="ieee")
    if splits == 1:
        out_ptrs = out_ptr + row[None, :] * outputs + column[:, None]
        mask = (row < num_rows)[None, :] & (column < outputs)[:, None]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        place = (split * num_tiles + tile) * BLOCK_N * ROWS
        part_ptrs = parts_ptr + place + tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :]
        tl.store(part_ptrs, result)
        if BY_LAST:
            # All threads of this program have written before one says so; the last to say so reads what all wrote.
            tl.debug_barrier()
            ended = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if ended == splits - 1:
                _add_up(parts_ptr, out_ptr, num_rows, outputs, num_tiles, splits, tile, ROWS, BLOCK_N)
                tl.store(counters_ptr + tile, 0)  # for the next launch


@cached_launches
@triton.jit(do_not_specialize=["num_rows", "steps", "splits"])
def _few_row_kernel(
    x_ptr, weight_ptr, parts_ptr, counters_ptr, out_ptr, num_rows, outputs, inputs, steps, splits,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_LAST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program computes one part of one tile."""
    _multiply_part(x_ptr, weight_ptr, parts_ptr, counters_ptr, out_ptr, num_rows, outputs, inputs, steps, splits,
                   ROWS, BLOCK_N, BLOCK_K, BY_LAST, False, WIDEN)  # fmt: skip


@cached_launches
@triton.jit(do_not_specialize=["num_rows", "steps", "splits"])
def _few_row_descriptor_kernel(
    x_ptr, weight, parts_ptr, counters_ptr, out_ptr, num_rows, outputs, inputs, steps, splits,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_LAST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """As `_few_row_kernel`, over a descriptor of the weight."""
    _multiply_part(x_ptr, weight, parts_ptr, counters_ptr, out_ptr, num_rows, outputs, inputs, steps, splits,
                   ROWS, BLOCK_N, BLOCK_K, BY_LAST, True, WIDEN)  # fmt: skip


@cached_launches
@triton.jit(do_not_specialize=["num_rows", "splits"])
def _add_up_kernel(
    parts_ptr, out_ptr, num_rows, outputs, splits, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program adds up one tile."""
    _add_up(parts_ptr, out_ptr, num_rows, outputs, tl.num_programs(0), splits, tl.program_id(0), ROWS, BLOCK_N)


# The interpreter multiplies bfloat16 as if it were integers, so products are of float32 there.
INTERPRETED = not isinstance(_few_row_kernel, triton.JITFunction)


class FewRowProducts:
    """Products by one tile, with the memory of their parts. Those of one stream at a time: all share that memory."""

    def __init__(self, tile: FewRowTile, most_outputs: int, device: torch.device) -> None:
        """most_outputs: of the weights."""
        self.tile = tile
        tiles = triton.cdiv(most_outputs, tile.outputs)
        self._parts = torch.empty(MAX_SPLITS * tiles * tile.outputs * MAX_ROWS, dtype=torch.float32, device=device)
        self._counters = torch.zeros(tiles, dtype=torch.int32, device=device)
        self._descriptors: dict[int, object] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
        """As `few_row_linear_reference`, in 16 bits. x and weight are contiguous; the inputs are a multiple of the
        tile's. splits: programs that share a tile, at most `MAX_SPLITS`; fewer where there are not as many pieces."""
        tile, (outputs, inputs), rows = self.tile, weight.shape, len(x)
        if rows > MAX_ROWS or splits > MAX_SPLITS or inputs % tile.inputs:
            raise ValueError(f"{rows} rows of {inputs} in {splits} parts are not of {tile.describe()}")
        pieces = inputs // tile.inputs
        steps = triton.cdiv(pieces, splits)
        splits = triton.cdiv(pieces, steps)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        tiles, padded = triton.cdiv(outputs, tile.outputs), 16 if rows <= 16 else 32
        kernel = _few_row_descriptor_kernel if tile.by_descriptor else _few_row_kernel
        read = self._descriptor(weight) if tile.by_descriptor else weight
        kernel[(tiles, splits)](
            x, read, self._parts, self._counters, out, rows, outputs, inputs, steps, splits, ROWS=padded,
            BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, BY_LAST=tile.by_last, WIDEN=INTERPRETED,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1 and not tile.by_last:
            _add_up_kernel[(tiles,)](
                self._parts, out, rows, outputs, splits, ROWS=padded, BLOCK_N=tile.outputs, num_warps=tile.warps
            )
        return out

    def _descriptor(self, weight: torch.Tensor) -> object:
        from triton.tools.tensor_descriptor import TensorDescriptor

        found = self._descriptors.get(weight.data_ptr())
        if found is None:
            found = TensorDescriptor.from_tensor(weight, [self.tile.outputs, self.tile.inputs])
            self._descriptors[weight.data_ptr()] = found
        return found

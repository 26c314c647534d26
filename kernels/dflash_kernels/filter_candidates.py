"""The logits of a row among which its filters cut, in three passes over the row that many programs share.

The first finds each row's largest logit, the second counts how many lie how far below it, the third keeps those from
the largest down to a distance that is certain to have the last token of top-k, or else of top-p, within it. So
`logits_filter` searches a few hundred numbers in place of a whole vocabulary. How a row is divided follows from the
vocabulary alone, so the result depends on nothing but the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Tiles of a program's slice of a row. Of a slice one number in this many may be kept.
SLICE_TILES, KEPT_PART = 2, 16
# Distances from the largest logit, in powers of two of the weight, are counted in fine steps where nearly all of the
# weight is, in coarse ones behind these, where tokens are counted alone; the last count is of all that lie further.
NUM_STEPS, NUM_FINE = 512, 256
FINE_PER_POWER, COARSE_PER_POWER = 32.0, 2.0
# By how much a weight that is made from counts must exceed the one that is looked for, since sums are rounded.
MARGIN = 1.0001


@dataclass(frozen=True)
class Candidates:
    """Of n rows in S slices: kept, in the logits' dtype `[n, S, K]`, -inf where there is none; num_kept int32 `[n, S]`,
    above K where a row has none that can be used; ends float32 `[n, S, 2]`, the lowest logit above -inf of each slice
    and the largest; totals float32 `[n, S]`, the weight of what min-p keeps."""

    kept: torch.Tensor
    num_kept: torch.Tensor
    ends: torch.Tensor
    totals: torch.Tensor


_NUM_STEPS, _NUM_FINE = tl.constexpr(NUM_STEPS), tl.constexpr(NUM_FINE)
_FINE, _COARSE = tl.constexpr(FINE_PER_POWER), tl.constexpr(COARSE_PER_POWER)
_MARGIN = tl.constexpr(MARGIN)


@triton.jit
def row_tile(row_ptr, base, end, BLOCK: tl.constexpr):
    """A tile of a row's logits, -inf past the end."""
    offsets = base + tl.arange(0, BLOCK)
    return tl.load(row_ptr + offsets, mask=offsets < end, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_of(logits, top, scale):
    """Proportional to the probability, 1 for the largest logit. `scale` is log2(e) over the temperature."""
    return tl.exp2((logits - top) * scale)


@triton.jit
def row_ends(ends_ptr, row, num_slices, BLOCK_S: tl.constexpr):
    """The lowest logit above -inf of a row, and the largest of all."""
    place = (row * num_slices + tl.arange(0, BLOCK_S)) * 2
    there = tl.arange(0, BLOCK_S) < num_slices
    low = tl.load(ends_ptr + place, mask=there, other=float("inf"))
    top = tl.load(ends_ptr + place + 1, mask=there, other=float("-inf"))
    return tl.min(low, axis=0), tl.max(top, axis=0)


@triton.jit
def _step(logits, top, scale):
    """How far below the largest logits lie, in steps; the last step for all that lie further or nowhere."""
    powers = (top - logits) * scale
    fine, coarse = powers * _FINE, _NUM_FINE + (powers - _NUM_FINE / _FINE) * _COARSE
    steps = tl.where(fine < _NUM_FINE, fine, coarse)
    return tl.where(steps < _NUM_STEPS - 1, steps, _NUM_STEPS - 1).to(tl.int32)


@cached_launches
@triton.jit
def _ends_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, ends_ptr, vocab, stride, num_slices,
    BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One program finds the ends of one slice of one row. A row that filters nothing is not read."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k = tl.load(top_k_ptr + row)
    filters = ((top_k > 0) & (top_k < vocab)) | (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0.0)
    if (tl.load(temperature_ptr + row) > 0.0) & filters:
        low = tl.full([BLOCK], float("inf"), tl.float32)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        end = tl.minimum(vocab, (part + 1) * SLICE)
        for base in range(part * SLICE, end, BLOCK):
            logits = row_tile(logits_ptr + row * stride, base, end, BLOCK)
            top = tl.maximum(top, logits)
            low = tl.minimum(low, tl.where(logits > float("-inf"), logits, float("inf")))
        place = ends_ptr + (row * num_slices + part) * 2
        tl.store(place, tl.min(low, axis=0))
        tl.store(place + 1, tl.max(top, axis=0))


@cached_launches
@triton.jit
def _count_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, ends_ptr, counts_ptr, totals_ptr, vocab, stride,
    num_slices, BLOCK: tl.constexpr, SLICE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program counts the logits of one slice by their distance from the row's largest."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    if (temperature > 0.0) & (((top_k > 0) & (top_k < vocab)) | (tl.load(top_p_ptr + row) < 1.0)):
        scale = 1.4426950408889634 / temperature
        _, top = row_ends(ends_ptr, row, num_slices, BLOCK_S)
        edge = float("-inf")
        if min_p > 0.0:
            edge = top + temperature * tl.log(min_p)
        counts = tl.zeros([_NUM_STEPS], tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        end = tl.minimum(vocab, (part + 1) * SLICE)
        for base in range(part * SLICE, end, BLOCK):
            logits = row_tile(logits_ptr + row * stride, base, end, BLOCK)
            counts += tl.histogram(_step(logits, top, scale), _NUM_STEPS)
            there = (logits >= edge) & (logits > float("-inf"))
            total += tl.where(there, weight_of(logits, top, scale), 0.0)
        place = row * num_slices + part
        tl.store(counts_ptr + place * _NUM_STEPS + tl.arange(0, _NUM_STEPS), counts)
        tl.store(totals_ptr + place, tl.sum(total, axis=0))


@triton.jit
def _last_step(counts_ptr, totals_ptr, row, num_slices, top_k, top_p, by_rank, BLOCK_S: tl.constexpr):
    """The step down to which logits are kept: there are `top_k` of them or, without top-k, `top_p` of the weight
    even if each were as light as its step may be."""
    step = tl.arange(0, _NUM_STEPS)
    counts = tl.zeros([_NUM_STEPS], tl.int32)
    for part in range(num_slices):
        counts += tl.load(counts_ptr + (row * num_slices + part) * _NUM_STEPS + step)
    enough = tl.cumsum(counts, 0) >= top_k
    if not by_rank:
        slices = tl.arange(0, BLOCK_S)
        totals = tl.load(totals_ptr + row * num_slices + slices, mask=slices < num_slices, other=0.0)
        end = (step + 1).to(tl.float32)
        powers = tl.where(end <= _NUM_FINE, end / _FINE, _NUM_FINE / _FINE + (end - _NUM_FINE) / _COARSE)
        least = counts.to(tl.float32) * tl.exp2(-powers)
        enough = tl.cumsum(least, 0) >= _MARGIN * top_p * tl.sum(totals, axis=0)
    return tl.sum(1 - enough.to(tl.int32), axis=0)


@cached_launches
@triton.jit
def _keep_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, ends_ptr, counts_ptr, totals_ptr, kept_ptr, num_kept_ptr,
    vocab, stride, num_slices,
    BLOCK: tl.constexpr, SLICE: tl.constexpr, BLOCK_S: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One program keeps what is near the row's largest logit of one slice, in the order of the row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    by_rank = (top_k > 0) & (top_k < vocab)
    if (temperature > 0.0) & (by_rank | (top_p < 1.0)):
        scale = 1.4426950408889634 / temperature
        _, top = row_ends(ends_ptr, row, num_slices, BLOCK_S)
        last = _last_step(counts_ptr, totals_ptr, row, num_slices, top_k, top_p, by_rank, BLOCK_S)
        place = row * num_slices + part
        taken = 0
        if last < _NUM_STEPS - 1:
            end = tl.minimum(vocab, (part + 1) * SLICE)
            for base in range(part * SLICE, end, BLOCK):
                logits = row_tile(logits_ptr + row * stride, base, end, BLOCK)
                near = _step(logits, top, scale) <= last
                number = taken + tl.cumsum(near.to(tl.int32), 0) - 1
                value = logits.to(kept_ptr.dtype.element_ty)
                tl.store(kept_ptr + place * KEPT + number, value, mask=near & (number < KEPT))
                taken += tl.sum(near.to(tl.int32), axis=0)
            number = tl.arange(0, KEPT)
            nothing = tl.full([KEPT], float("-inf"), tl.float32).to(kept_ptr.dtype.element_ty)
            tl.store(kept_ptr + place * KEPT + number, nothing, mask=number >= taken)
        else:
            taken = KEPT + 1
        tl.store(num_kept_ptr + place, taken)


def candidates(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    tile: int,
    num_warps: int,
) -> Candidates:
    """Those of `logits` `[n, vocab]`, n > 0, whose rows are contiguous; the others as of `lowest_kept_reference`.
    What belongs to a row that has no top-k and no top-p is not written."""
    (num_rows, vocab), device = logits.shape, logits.device
    size, kept = SLICE_TILES * tile, max(1, SLICE_TILES * tile // KEPT_PART)
    num_slices = triton.cdiv(vocab, size)
    grid, block_s = (num_rows, num_slices), max(triton.next_power_of_2(num_slices), 2)
    found = Candidates(
        kept=torch.empty(num_rows, num_slices, kept, dtype=logits.dtype, device=device),
        num_kept=torch.empty(num_rows, num_slices, dtype=torch.int32, device=device),
        ends=torch.empty(num_rows, num_slices, 2, dtype=torch.float32, device=device),
        totals=torch.empty(num_rows, num_slices, dtype=torch.float32, device=device),
    )
    counts = torch.empty(num_rows, num_slices, NUM_STEPS, dtype=torch.int32, device=device)
    sizes, stride = {"BLOCK": tile, "SLICE": size, "num_warps": num_warps}, logits.stride(0)
    _ends_kernel[grid](logits, temperature, top_k, top_p, min_p, found.ends, vocab, stride, num_slices, **sizes)
    _count_kernel[grid](
        logits, temperature, top_k, top_p, min_p, found.ends, counts, found.totals, vocab, stride, num_slices,
        **sizes, BLOCK_S=block_s,
    )  # fmt: skip
    _keep_kernel[grid](
        logits, temperature, top_k, top_p, found.ends, counts, found.totals, found.kept, found.num_kept, vocab,
        stride, num_slices, **sizes, BLOCK_S=block_s, KEPT=kept,
    )  # fmt: skip
    return found

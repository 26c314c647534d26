"""Which tokens a row may sample: min-p, top-k and top-p, at the row's temperature.

Each filter keeps the tokens from some logit on, so all that has to be found is that logit. The reference sorts; the
kernel searches: among the few logits near the largest that `filter_candidates` keeps, or where these are too many, as
with flat distributions, in the whole row, which it reads a dozen times. Tokens with equal logits are kept or hidden
together, so the result does not depend on how something was sorted.
"""

from __future__ import annotations

import torch

from dflash_kernels.filter_candidates import candidates, row_ends, row_tile, weight_of
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Elements that a program reads at a time, and its warps.
TILE = 8192
WARPS = 16


def lowest_kept_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor | None:
    """The lowest of the `logits` (`[n, vocab]`, any floating-point dtype) that each row keeps: float32 `[n]`, -inf
    where it filters nothing; None where no row does.

    temperature, top_p (1: all), min_p (0: all): float32 `[n]`; at a temperature of 0 nothing is filtered, since the
    argmax passes every filter. top_k (0: all): int64 `[n]`. The order is vLLM's: temperature, min-p, top-k, top-p, each
    among the tokens that are left.
    """
    by_min_p = (temperature > 0.0) & (min_p > 0.0)
    by_rank = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0))
    if not (by_min_p | by_rank).any():
        return None
    lowest = torch.full((len(logits),), float("-inf"))
    if by_min_p.any():
        edge = logits.float().amax(dim=-1) + temperature * min_p.log()
        lowest = torch.where(by_min_p, edge, lowest)
    rows = by_rank.nonzero().squeeze(1)
    if len(rows) > 0:
        lowest[rows] = _by_rank(logits[rows].float(), lowest[rows], temperature[rows], top_k[rows], top_p[rows])
    return lowest


def _by_rank(
    logits: torch.Tensor, lowest: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """`lowest` raised to what top-k and top-p keep."""
    ordered = logits.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, top_k.clamp(1, logits.shape[1])[:, None] - 1).squeeze(1)
    lowest = torch.where(top_k > 0, torch.maximum(lowest, kth), lowest)
    kept = ordered.masked_fill(ordered < lowest[:, None], float("-inf"))
    # In float64, so that the order of a sum does not move the cut.
    above = (kept / temperature[:, None]).softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1).roll(1, dims=-1)
    above[:, 0] = -1.0  # the most likely token is kept, also by a p that is 0 in float32
    last = kept.masked_fill(above >= top_p[:, None], float("inf")).amin(dim=-1)
    # A p of 1 keeps everything, whatever rounding does to the sum.
    return torch.where(top_p < 1.0, torch.maximum(lowest, last), lowest)


@triton.jit
def _ends(row_ptr, vocab, BLOCK: tl.constexpr):
    """The lowest logit above -inf, and the largest of all."""
    low = tl.full([BLOCK], float("inf"), tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(0, vocab, BLOCK):
        logits = row_tile(row_ptr, base, vocab, BLOCK)
        top = tl.maximum(top, logits)
        low = tl.minimum(low, tl.where(logits > float("-inf"), logits, float("inf")))
    return tl.min(low, axis=0), tl.max(top, axis=0)


@triton.jit
def _total(row_ptr, vocab, lowest_kept, top, scale, BLOCK: tl.constexpr):
    """The weights of all logits from `lowest_kept` on, and the lowest of these."""
    total = tl.zeros([BLOCK], tl.float32)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    for base in range(0, vocab, BLOCK):
        logits = row_tile(row_ptr, base, vocab, BLOCK)
        kept = (logits >= lowest_kept) & (logits > float("-inf"))
        total += tl.where(kept, weight_of(logits, top, scale), 0.0)
        low = tl.minimum(low, tl.where(kept, logits, float("inf")))
    return tl.sum(total, axis=0), tl.min(low, axis=0)


@triton.jit
def _order(value):
    """Floats as integers in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high, turn):
    """A number from `low` to below `high`: in turn halfway between the values, where logits are spread evenly, and
    between their places among all floats, which bounds the number of turns."""
    by_value = low * 0.5 + high * 0.5
    first, last = _order(low).to(tl.int64), _order(high).to(tl.int64)
    place = ((first + last) >> 1).to(tl.int32)
    by_place = tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)
    middle = tl.where(turn % 2 == 0, by_value, by_place)
    return tl.where((middle >= low) & (middle < high), middle, low)


@triton.jit
def _search(row_ptr, vocab, low, high, target, top, scale, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest logit above which lies less than `target`: tokens or, `WEIGHTED`, weight. It is one from `low` to
    `high`, which are logits of the row; both ends stay such, so each turn brings them closer."""
    turn = 0
    while low < high:
        middle = _middle(low, high, turn)
        found = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], float("inf"), tl.float32)
        below = tl.full([BLOCK], float("-inf"), tl.float32)
        for base in range(0, vocab, BLOCK):
            logits = row_tile(row_ptr, base, vocab, BLOCK)
            is_above = logits > middle
            weight = 1.0
            if WEIGHTED:
                weight = weight_of(logits, top, scale)
            found += tl.where(is_above, weight, 0.0)
            above = tl.minimum(above, tl.where(is_above, logits, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), logits))
        if tl.sum(found, axis=0) < target:
            high = tl.max(below, axis=0)
        else:
            low = tl.min(above, axis=0)
        turn += 1
    return low


@triton.jit
def _filter_row(
    ptr, count, low, top, total, edge, top_k, top_p, by_rank, scale, IN_ALL: tl.constexpr, BLOCK: tl.constexpr
):
    """The lowest logit that is kept of the `count` numbers at `ptr`, which are all of a row (`IN_ALL`), or all that
    may be kept. low, top: the lowest and largest. total: the weight of all in the row from `edge` on, the lowest
    logit that min-p keeps."""
    lowest_kept = edge
    if by_rank:
        kth = _search(ptr, count, low, top, top_k.to(tl.float32), top, scale, False, BLOCK)
        lowest_kept = tl.maximum(lowest_kept, kth)
    if top_p < 1.0:
        found, low = _total(ptr, count, lowest_kept, top, scale, BLOCK)
        if IN_ALL | by_rank:
            total = found
        lowest_kept = _search(ptr, count, low, top, top_p * total, top, scale, True, BLOCK)
    return lowest_kept


@cached_launches
@triton.jit
def _lowest_kept_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, kept_ptr, num_kept_ptr, ends_ptr, totals_ptr,
    out_ptr, vocab, stride, num_slices,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One program finds the lowest logit that one row keeps. A row that filters nothing is not read."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    by_rank = (top_k > 0) & (top_k < vocab)
    lowest_kept = float("-inf")
    if (temperature > 0.0) & (by_rank | (top_p < 1.0) | (min_p > 0.0)):
        scale = 1.4426950408889634 / temperature
        low, top = row_ends(ends_ptr, row, num_slices, BLOCK_S)
        if min_p > 0.0:
            lowest_kept = top + temperature * tl.log(min_p)
        if by_rank | (top_p < 1.0):
            slices = tl.arange(0, BLOCK_S)
            there = slices < num_slices
            most = tl.max(tl.load(num_kept_ptr + row * num_slices + slices, mask=there, other=0), axis=0)
            total = tl.sum(tl.load(totals_ptr + row * num_slices + slices, mask=there, other=0.0), axis=0)
            if most <= KEPT:
                ptr, count = kept_ptr + row * num_slices * KEPT, num_slices * KEPT
                low, _ = _ends(ptr, count, BLOCK)
                lowest_kept = _filter_row(
                    ptr, count, low, top, total, lowest_kept, top_k, top_p, by_rank, scale, False, BLOCK
                )
            else:
                ptr = logits_ptr + row * stride
                lowest_kept = _filter_row(
                    ptr, vocab, low, top, total, lowest_kept, top_k, top_p, by_rank, scale, True, BLOCK
                )
    tl.store(out_ptr + row, lowest_kept)


def lowest_kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    tile: int = TILE,
) -> torch.Tensor:
    """As `lowest_kept_reference`, always a tensor, up to rounding, which matters where a token lies on the edge
    of a filter.

    Rows of `logits` must be contiguous. A row's result depends on nothing but the row."""
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) > 0:
        found = candidates(logits, temperature, top_k, top_p, min_p, tile, WARPS)
        num_slices, kept = found.kept.shape[1:]
        _lowest_kept_kernel[(len(logits),)](
            logits, temperature, top_k, top_p, min_p, found.kept, found.num_kept, found.ends, found.totals, out,
            logits.shape[1], logits.stride(0), num_slices,
            BLOCK=tile, BLOCK_S=max(triton.next_power_of_2(num_slices), 2), KEPT=kept, num_warps=WARPS,
        )  # fmt: skip
    return out

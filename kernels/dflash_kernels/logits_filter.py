"""Which tokens a row may sample: min-p, top-k and top-p, at the row's temperature.

Each filter keeps the tokens from some logit on, so all that has to be found is that logit. The reference sorts; the
kernels search. The first finds the largest logit of each group of 64 and the group's weight, which is the only pass
over the vocabulary. From these follows a logit that is certain to lie at or below the edge: top-k's tokens are not
below the k-th largest of the groups' largest. The second searches the few groups that reach it or, where these are too
many, as with flat distributions, the whole row, which it reads a dozen times. Tokens with equal logits are kept or
hidden together, so the result does not depend on how something was sorted.
"""

from __future__ import annotations

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Logits that a program reads at a time; its warps where it finds the largest of groups, and where it searches a row.
TILE = 8192
GROUP_WARPS, WARPS = 8, 16
# Logits of a group, at least, and groups of a row, at most.
GROUP, MOST_GROUPS = 64, 4096
# Groups that are searched in place of the whole row, at most.
MOST_KEPT = 512
# Weights from which top-p's groups are looked for: half powers of two below the largest logit's.
NUM_WEIGHTS = 128
# By how much a weight that is known by bounds must exceed the one that is looked for, since sums are rounded.
MARGIN = 1.0001


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


_NUM_WEIGHTS, _MARGIN = tl.constexpr(NUM_WEIGHTS), tl.constexpr(MARGIN)


@triton.jit
def row_tile(row_ptr, base, end, BLOCK: tl.constexpr):
    """A tile of a row's logits, -inf past the end."""
    offsets = base + tl.arange(0, BLOCK)
    return tl.load(row_ptr + offsets, mask=offsets < end, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_of(logits, top, scale):
    """Proportional to the probability, 1 for the largest logit. `scale` is log2(e) over the temperature."""
    return tl.exp2((logits - top) * scale)


@cached_launches
@triton.jit
def _groups_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, tops_ptr, weights_ptr, vocab, stride, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program finds the largest logit of some groups of one row, and what the group weighs beside it. A row that
    filters nothing is not read."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    filters = ((top_k > 0) & (top_k < vocab)) | (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0.0)
    if (temperature > 0.0) & filters:
        scale = 1.4426950408889634 / temperature
        groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        logits = tl.load(logits_ptr + row * stride + offsets, mask=offsets < vocab, other=float("-inf"))
        logits = logits.to(tl.float32)
        top = tl.max(logits, axis=1)
        beside = tl.where(top > float("-inf"), top, 0.0)
        weight = tl.sum(weight_of(logits, beside[:, None], scale), axis=1)
        place = row * num_groups + groups
        tl.store(tops_ptr + place, top, mask=groups < num_groups)
        tl.store(weights_ptr + place, weight, mask=groups < num_groups)


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
def _value(place):
    """The float at this place among all, the inverse of `_order`."""
    return tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high, turn):
    """A number from `low` to below `high`: in turn halfway between the values, where logits are spread evenly, and
    between their places among all floats, which bounds the number of turns."""
    by_value = low * 0.5 + high * 0.5
    first, last = _order(low).to(tl.int64), _order(high).to(tl.int64)
    by_place = _value(((first + last) >> 1).to(tl.int32))
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
def _kth_largest(values, k):
    """The k-th largest of float32 `values`, which are at least k; without a loop over memory."""
    ranks = _order(values)
    low, high = tl.min(ranks, axis=0).to(tl.int64), tl.max(ranks, axis=0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((ranks >= middle).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return _value(low.to(tl.int32))


@triton.jit
def _from_weight(tops, weights, top, scale, target, GROUP: tl.constexpr):
    """A logit from which on the weight is at least `target`, with a margin; -inf where bounds do not say. Of a group
    whose largest logit reaches it, all others may be just below it."""
    own = weight_of(tops, top, scale)
    low, high = 0, _NUM_WEIGHTS
    while low < high:
        middle = (low + high) // 2
        least = tl.exp2(-0.5 * middle)
        known = tl.maximum(weights - (GROUP - 1) * least, own)
        known = tl.where(tops >= top - 0.5 * middle / scale, known, 0.0)
        if tl.sum(known, axis=0) >= target * _MARGIN:
            high = middle
        else:
            low = middle + 1
    return tl.where(low < _NUM_WEIGHTS, top - 0.5 * low / scale, float("-inf"))


@triton.jit
def _copy_groups(
    row_ptr, list_ptr, kept_ptr, near, count, lowest, vocab,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the logits from `lowest` on of the `count` groups that are `near`, one group after the other, -inf for
    those below."""
    place = tl.cumsum(near.to(tl.int32), 0) - 1
    tl.store(list_ptr + place, tl.arange(0, GROUPS), mask=near)
    # Other threads read what one has written.
    tl.debug_barrier()
    inside = tl.arange(0, GROUP)[None, :]
    for base in range(0, count, BLOCK // GROUP):
        which = base + tl.arange(0, BLOCK // GROUP)
        offsets = tl.load(list_ptr + which, mask=which < count, other=0)[:, None] * GROUP + inside
        there = (which < count)[:, None]
        logits = tl.load(row_ptr + offsets, mask=there & (offsets < vocab), other=float("-inf"))
        logits = tl.where(logits.to(tl.float32) >= lowest, logits, float("-inf"))
        tl.store(kept_ptr + which[:, None] * GROUP + inside, logits, mask=there)
    tl.debug_barrier()


@triton.jit
def _filter_row(
    ptr, count, low, top, total, edge, top_k, top_p, by_rank, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """The lowest logit that is kept of the `count` numbers at `ptr`, among which are all that may be kept. low, top:
    the lowest and largest. total: the weight of the row from `edge` on, the lowest logit that min-p keeps; negative
    where that is the weight of these numbers."""
    lowest_kept = edge
    if by_rank:
        kth = _search(ptr, count, low, top, top_k.to(tl.float32), top, scale, False, BLOCK)
        lowest_kept = tl.maximum(lowest_kept, kth)
    if top_p < 1.0:
        found, low = _total(ptr, count, lowest_kept, top, scale, BLOCK)
        target = top_p * tl.where(total < 0.0, found, total)
        lowest_kept = _search(ptr, count, low, top, target, top, scale, True, BLOCK)
    return lowest_kept


@cached_launches
@triton.jit
def _lowest_kept_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, tops_ptr, weights_ptr, list_ptr, kept_ptr, out_ptr,
    vocab, stride, num_groups, most_kept,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program finds the lowest logit that one row keeps. A row that filters nothing is not read."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    by_rank = (top_k > 0) & (top_k < vocab)
    edge = float("-inf")
    if (temperature > 0.0) & (by_rank | (top_p < 1.0) | (min_p > 0.0)):
        scale = 1.4426950408889634 / temperature
        groups = tl.arange(0, GROUPS)
        tops_at = row * num_groups + groups
        tops = tl.load(tops_ptr + tops_at, mask=groups < num_groups, other=float("-inf"))
        top = tl.max(tops, axis=0)
        if min_p > 0.0:
            edge = top + temperature * tl.log(min_p)
        if by_rank | (top_p < 1.0):
            total = -1.0
            lowest = edge
            if by_rank:
                if top_k <= num_groups:
                    lowest = tl.maximum(edge, _kth_largest(tops, top_k))
            elif min_p <= 0.0:
                weights = tl.load(weights_ptr + tops_at, mask=groups < num_groups, other=0.0)
                weights = tl.where(tops > float("-inf"), weights * weight_of(tops, top, scale), 0.0)
                total = tl.sum(weights, axis=0)
                lowest = _from_weight(tops, weights, top, scale, top_p * total, GROUP)
            near = (tops >= lowest) & (tops > float("-inf"))
            num_near = tl.sum(near.to(tl.int32), axis=0)
            ptr, count = logits_ptr + row * stride, vocab
            if num_near <= most_kept:
                kept = kept_ptr + row * most_kept * GROUP
                _copy_groups(ptr, list_ptr + row * most_kept, kept, near, num_near, lowest, vocab, BLOCK, GROUP, GROUPS)
                ptr, count = kept, num_near * GROUP
            low, _ = _ends(ptr, count, BLOCK)
            edge = _filter_row(ptr, count, low, top, total, edge, top_k, top_p, by_rank, scale, BLOCK)
    tl.store(out_ptr + row, edge)


def lowest_kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    tile: int = TILE,
    group: int = GROUP,
    most_kept: int = MOST_KEPT,
) -> torch.Tensor:
    """As `lowest_kept_reference`, always a tensor, up to rounding, which matters where a token lies on the edge
    of a filter.

    Rows of `logits` must be contiguous. A row's result depends on nothing but the row. tile, group: powers of two."""
    num_rows, vocab = logits.shape
    group = max(group, least_group(vocab))
    shape = (num_rows, min(most_kept, triton.cdiv(vocab, group)), group)
    kept = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    return search(logits, (temperature, top_k, top_p, min_p), kept, tile)


def least_group(vocab: int) -> int:
    """The logits of a group, so that a row has no more groups than a program holds: a power of two."""
    return triton.next_power_of_2(triton.cdiv(vocab, MOST_GROUPS))


def search(logits: torch.Tensor, parameters: tuple[torch.Tensor, ...], kept: torch.Tensor, tile: int) -> torch.Tensor:
    """As `lowest_kept`. kept: `[n, G, group]` in the dtype of `logits`: the groups of each row that are searched in
    place of all of it are written to it, one after the other; rows that have more than G are not."""
    (num_rows, vocab), (_, most_kept, group) = logits.shape, kept.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return out
    num_groups, at_a_time = triton.cdiv(vocab, group), max(tile // group, 1)
    # Two tensors: where the second half of one begins follows from the number of rows, and Triton compiles a kernel
    # anew for a pointer that is aligned otherwise.
    tops = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    weights = torch.empty_like(tops)
    near = torch.empty(num_rows, most_kept, dtype=torch.int32, device=logits.device)
    _groups_kernel[(num_rows, triton.cdiv(num_groups, at_a_time))](
        logits, *parameters, tops, weights, vocab, logits.stride(0), num_groups,
        GROUP=group, GROUPS=at_a_time, num_warps=GROUP_WARPS,
    )  # fmt: skip
    _lowest_kept_kernel[(num_rows,)](
        logits, *parameters, tops, weights, near, kept, out, vocab, logits.stride(0), num_groups, most_kept,
        BLOCK=max(tile, group), GROUP=group, GROUPS=max(triton.next_power_of_2(num_groups), 2), num_warps=WARPS,
    )  # fmt: skip
    return out

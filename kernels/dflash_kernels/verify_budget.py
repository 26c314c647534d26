"""Which drafts a step verifies, and where its tokens lie: of all rows together the likeliest drafts, as many as the
step has a budget for.

The chance that a draft is accepted when those before it are is `sigmoid(offset + effect + weight * confidence)`, with
an offset of its place in the block and an effect of its request; the chance that all up to it are accepted is the
product, which never grows within a row. So the likeliest drafts of all rows are the first ones of each row. Instead of
the product its negative logarithm is compared, here called the cost of a draft.

State, padding and references are as in `prepare_step`.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def verified_lens_reference(
    confidence: np.ndarray,
    num_draft: np.ndarray,
    weight: float,
    offsets: np.ndarray,
    effects: np.ndarray,
    num_drafts: int,
) -> np.ndarray:
    """How many drafts of each row are verified: int64 `[R]`, `num_drafts` together, or all where there are fewer.

    confidence: float32 `[R, k]`. num_draft: int64 `[R]`, the drafts that each row has. offsets: float32 `[k]`. effects:
    float32 `[R]`. Of equally likely drafts those of earlier rows come first.
    """
    logits = offsets + effects[:, None] + np.float32(weight) * confidence
    costs = np.add.accumulate(np.logaddexp(np.float32(0), -logits), axis=1)
    there = np.arange(confidence.shape[1]) < num_draft[:, None]
    order = np.argsort(np.where(there, costs, np.inf), axis=None, kind="stable")
    taken = order[: min(num_drafts, int(there.sum()))]
    return np.bincount(taken // confidence.shape[1], minlength=len(num_draft))


def lay_out_reference(
    confidence: torch.Tensor,
    budget: torch.Tensor,
    req_idx: torch.Tensor,
    num_new: torch.Tensor,
    num_draft: torch.Tensor,
    logits_start: torch.Tensor,
    num_tokens: int,
    num_logits: int,
) -> Layout:
    """The rows' tokens behind one another, with the drafts that are verified: num_draft, query_start, query_lens,
    logits_start int32 `[R]`, token_row int32 `[num_tokens]`, logits_token and logits_row int32 `[num_logits]`.

    confidence: float32 `[S, k]`. budget: float32 `[2 + k + R]`: how many drafts are verified, the weight of a
    confidence, the offsets and the rows' effects. req_idx, num_new, num_draft (drafts that there are): int32 `[R]`.
    logits_start: int32 `[R]`, below 0 for a row that does not sample.

    query_start is the index of a row's first token, query_lens `num_new + num_draft`, logits_start that of its first
    logits. token_row and logits_row have the row of each token and of each row of logits, logits_token the token that
    it follows. Behind the last of them they have -1, and logits_token 0.
    """
    k, rows = confidence.shape[1], req_idx.numpy()
    numbers = budget.numpy()
    verified = verified_lens_reference(
        confidence.numpy()[np.maximum(rows, 0)],
        np.where(rows >= 0, num_draft.numpy(), 0),
        float(numbers[1]),
        numbers[2 : 2 + k],
        numbers[2 + k :],
        int(numbers[0]),
    )
    lens = num_new.numpy() + verified
    first = np.cumsum(lens) - lens
    samples = logits_start.numpy() >= 0
    of_row = np.where(samples, verified + 1, 0)
    first_logits = np.cumsum(of_row) - of_row
    token_row = np.full(num_tokens, -1)
    token_row[: lens.sum()] = np.repeat(np.arange(len(rows)), lens)
    logits_row, logits_token = np.full(num_logits, -1), np.zeros(num_logits)
    row = np.repeat(np.arange(len(rows)), of_row)
    logits_row[: len(row)] = row
    column = np.arange(len(row)) - first_logits[row]
    logits_token[: len(row)] = (first + num_new.numpy() - 1)[row] + column
    start = np.where(samples, first_logits, -1)
    columns = (verified, first, lens, start, token_row, logits_token, logits_row)
    put = [torch.from_numpy(column.astype(np.int32)) for column in columns]
    return put[0], put[1], put[2], put[3], put[4], put[5], put[6]


# No cost is as high: the bits of the largest finite float32.
LARGEST = 0x7F7FFFFF


@cached_launches
@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    confidence_ptr, budget_ptr, req_idx_ptr, num_new_ptr, num_draft_ptr, logits_start_ptr,
    verified_ptr, query_start_ptr, query_lens_ptr, first_logits_ptr, num_rows, k,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for all rows."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = row < num_rows
    req_idx = tl.load(req_idx_ptr + row, mask=inside, other=-1)
    num_draft = tl.load(num_draft_ptr + row, mask=inside & (req_idx >= 0), other=0)
    num_new = tl.load(num_new_ptr + row, mask=inside, other=0)
    total = tl.sum(num_draft, axis=0)
    budget = tl.minimum(tl.load(budget_ptr).to(tl.int32), total)
    verified = num_draft
    if budget < total:
        weight = tl.load(budget_ptr + 1)
        offsets = tl.load(budget_ptr + 2 + column, mask=column < k, other=0.0)
        effects = tl.load(budget_ptr + 2 + k + row, mask=inside, other=0.0)
        there = column[None, :] < num_draft[:, None]
        place = req_idx.to(tl.int64)[:, None] * k + column[None, :]
        confidence = tl.load(confidence_ptr + place, mask=there, other=0.0)
        logits = offsets[None, :] + effects[:, None] + weight * confidence
        # log(1 + exp(-logit)), without overflow.
        costs = tl.maximum(-logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits)))
        bits = tl.cumsum(costs, axis=1).to(tl.int32, bitcast=True)
        bits = tl.where(there, tl.minimum(bits, LARGEST - 1), LARGEST)
        # The lowest cost up to which there are as many drafts as the budget has: floats above 0 are in the order of
        # their bits.
        low, high = 0, LARGEST - 1
        for _ in range(31):
            middle = low + (high - low) // 2
            enough = tl.sum(tl.sum((bits <= middle).to(tl.int32), axis=1), axis=0) >= budget
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
        cheaper = tl.sum((bits < high).to(tl.int32), axis=1)
        equal = tl.sum((bits == high).to(tl.int32), axis=1)
        left = budget - tl.sum(cheaper, axis=0) - (tl.cumsum(equal, axis=0) - equal)
        verified = cheaper + tl.minimum(tl.maximum(left, 0), equal)
    query_lens = num_new + verified
    samples = tl.load(logits_start_ptr + row, mask=inside, other=-1) >= 0
    num_logits = tl.where(samples, verified + 1, 0)
    tl.store(verified_ptr + row, verified, mask=inside)
    tl.store(query_start_ptr + row, tl.cumsum(query_lens, axis=0) - query_lens, mask=inside)
    tl.store(query_lens_ptr + row, query_lens, mask=inside)
    first_logits = tl.where(samples, tl.cumsum(num_logits, axis=0) - num_logits, -1)
    tl.store(first_logits_ptr + row, first_logits, mask=inside)


@cached_launches
@triton.jit
def _place_kernel(
    num_new_ptr, verified_ptr, query_start_ptr, query_lens_ptr, first_logits_ptr,
    token_row_ptr, logits_token_ptr, logits_row_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one row's tokens and logits."""
    row = tl.program_id(0)
    start, length = tl.load(query_start_ptr + row), tl.load(query_lens_ptr + row)
    for base in range(0, length, BLOCK):
        column = base + tl.arange(0, BLOCK)
        tl.store(token_row_ptr + start + column, row + tl.zeros_like(column), mask=column < length)
    first = tl.load(first_logits_ptr + row)
    if first >= 0:
        num_logits = tl.load(verified_ptr + row) + 1
        last = start + tl.load(num_new_ptr + row) - 1
        for base in range(0, num_logits, BLOCK):
            column = base + tl.arange(0, BLOCK)
            tl.store(logits_token_ptr + first + column, last + column, mask=column < num_logits)
            tl.store(logits_row_ptr + first + column, row + tl.zeros_like(column), mask=column < num_logits)


def lay_out(
    confidence: torch.Tensor,
    budget: torch.Tensor,
    req_idx: torch.Tensor,
    num_new: torch.Tensor,
    num_draft: torch.Tensor,
    logits_start: torch.Tensor,
    num_tokens: int,
    num_logits: int,
) -> Layout:
    """As `lay_out_reference`, for contiguous tensors, up to the rounding of logarithms."""
    num_rows, k, device = len(req_idx), confidence.shape[1], confidence.device
    verified, query_start, query_lens, first_logits = (
        torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(4)
    )
    token_row, logits_row = (
        torch.full((size,), -1, dtype=torch.int32, device=device) for size in (num_tokens, num_logits)
    )
    logits_token = torch.zeros(num_logits, dtype=torch.int32, device=device)
    if num_rows > 0:
        _choose_kernel[(1,)](
            confidence, budget, req_idx, num_new, num_draft, logits_start,
            verified, query_start, query_lens, first_logits, num_rows, k, LARGEST=LARGEST,
            ROWS=triton.next_power_of_2(num_rows), COLUMNS=triton.next_power_of_2(max(k, 1)), num_warps=8,
        )  # fmt: skip
        _place_kernel[(num_rows,)](
            num_new, verified, query_start, query_lens, first_logits, token_row, logits_token, logits_row, BLOCK=32
        )
    return verified, query_start, query_lens, first_logits, token_row, logits_token, logits_row

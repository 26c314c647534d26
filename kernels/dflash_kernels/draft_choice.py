"""Whose drafts a row verifies where prompt lookup has some beside a drafter's model: those that gain more tokens in
that request.

Both propose, and one block is verified. The other is kept, and compared with what came: it would have had as many
tokens accepted as agree with the accepted drafts and the token after them. Where all of these agree it would have had
more, it is not known how many; half of those left are assumed. The difference, lookup's tokens less the model's, goes
into a mean of the row, with which the next request there begins. Lookup's drafts are taken while that is not below 0.

State, padding and references are as in `prepare_step`.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Weight of a block in the mean of what lookup gains, and the most that the mean is, above 0 or below: what changes is
# followed within a block or two.
GAIN_WEIGHT, MOST_GAIN = 0.25, 3.0


def choose_drafts_reference(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    other_drafts: torch.Tensor,
    num_other: torch.Tensor,
    lookup_gain: torch.Tensor,
    req_idx: torch.Tensor,
    num_draft: torch.Tensor,
    num_next_draft: torch.Tensor,
    results: torch.Tensor,
    found: torch.Tensor,
    num_found: torch.Tensor,
) -> torch.Tensor:
    """How many of lookup's drafts each row takes, int32 `[R]`, 0 where the model's stay.

    After `accept`, with the model's next drafts behind the anchors in `tokens`, int64 `[S, max_len]`. computed: int32
    `[S]`. other_drafts: int64 `[S, k]`, of each request the drafts that were not taken the last time, and num_other,
    int32 `[S]`, their number, below 0 where they are lookup's; both are brought up to date, and lookup_gain, float32
    `[S]`, the mean of what lookup gains. req_idx, num_draft, num_next_draft: int32 `[R]`; results: int64 `[R, k + 3]`,
    as of `accept`. found: int64 `[R, k]`, lookup's next drafts, of which a row has num_found, int32 `[R]`.
    """
    num_taken = np.zeros(len(req_idx), np.int32)
    requests, text = req_idx.numpy(), tokens.numpy()
    others, counts, gains = other_drafts.numpy(), num_other.numpy(), lookup_gain.numpy()
    waits = (requests >= 0) & ((counts[np.maximum(requests, 0)] != 0) | (num_found.numpy() > 0))
    for row in waits.nonzero()[0].tolist():
        request, has = int(requests[row]), int(num_found[row])
        anchor, last = int(computed[request]), int(counts[request])
        if last and int(num_draft[row]):
            accepted = int(results[row, 0])
            both = min(accepted + 1, abs(last))
            came = text[request, anchor - accepted : anchor + 1][:both]
            differs = (others[request, : len(came)] != came).nonzero()[0]
            would = int(differs[0]) if len(differs) else both
            worth = would + (abs(last) - would) / 2 if would > accepted else float(would)
            gain = accepted - worth if last > 0 else worth - accepted
            mean = gains[request] + GAIN_WEIGHT * (gain - gains[request])
            gains[request] = min(max(mean, -MOST_GAIN), MOST_GAIN)
        counts[request] = 0
        if has and (count := int(num_next_draft[row])):
            own = text[request, anchor + 1 : anchor + 1 + count]
            takes = gains[request] >= 0
            num_taken[row] = has if takes else 0
            others[request, :count] = 0
            kept = own if takes else found.numpy()[row, :count]
            others[request, : len(kept)] = kept
            counts[request] = count if takes else -count
    return torch.from_numpy(num_taken)


@cached_launches
@triton.jit
def _choose_drafts_kernel(
    tokens_ptr, computed_ptr, other_ptr, num_other_ptr, gain_ptr, req_idx_ptr, num_draft_ptr, num_next_ptr, results_ptr,
    found_ptr, num_found_ptr, num_taken_ptr, k, max_len,
    WEIGHT: tl.constexpr, MOST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for one row."""
    row = tl.program_id(0)
    request = tl.load(req_idx_ptr + row).to(tl.int64)
    real = request >= 0
    request = tl.maximum(request, 0)
    text_ptr, others_ptr = tokens_ptr + request * max_len, other_ptr + request * k
    column = tl.arange(0, COLUMNS)
    anchor = tl.load(computed_ptr + request)
    last = tl.where(real, tl.load(num_other_ptr + request), 0)
    count = tl.abs(last)
    # What the block that was not taken would have had.
    verified = tl.load(num_draft_ptr + row)
    accepted = tl.load(results_ptr + row * (k + 3)).to(tl.int32)
    both = tl.minimum(accepted + 1, count)
    position = anchor - accepted + column
    compared = (column < both) & (position >= 0) & (position < max_len)
    came = tl.load(text_ptr + position, mask=compared, other=0)
    other = tl.load(others_ptr + column, mask=compared, other=0)
    would = tl.min(tl.where(compared & (came != other), column, both), axis=0)
    worth = tl.where(would > accepted, would + (count - would) * 0.5, would * 1.0)
    gain = tl.where(last > 0, accepted - worth, worth - accepted)
    settles = (last != 0) & (verified > 0)
    before = tl.load(gain_ptr + request)
    mean = tl.where(settles, tl.clamp(before + WEIGHT * (gain - before), -MOST, MOST), before)
    tl.store(gain_ptr + request, mean, mask=real)
    # Whose block comes next.
    has, next_count = tl.load(num_found_ptr + row), tl.load(num_next_ptr + row)
    contest = real & (has > 0) & (next_count > 0)
    takes = contest & (mean >= 0)
    position = anchor + 1 + column
    own = tl.load(text_ptr + position, mask=takes & (column < next_count) & (position < max_len), other=0)
    found = tl.load(found_ptr + row * k + column, mask=contest & (column < k), other=0)
    tl.store(others_ptr + column, tl.where(takes, own, found), mask=contest & (column < next_count))
    tl.store(num_other_ptr + request, tl.where(takes, next_count, tl.where(contest, -next_count, 0)), mask=real)
    tl.store(num_taken_ptr + row, tl.where(takes, has, 0))


def choose_drafts(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    other_drafts: torch.Tensor,
    num_other: torch.Tensor,
    lookup_gain: torch.Tensor,
    req_idx: torch.Tensor,
    num_draft: torch.Tensor,
    num_next_draft: torch.Tensor,
    results: torch.Tensor,
    found: torch.Tensor,
    num_found: torch.Tensor,
) -> torch.Tensor:
    """As `choose_drafts_reference`, for contiguous tensors."""
    num_rows, k = found.shape
    num_taken = torch.empty(num_rows, dtype=torch.int32, device=tokens.device)
    if num_rows > 0 and k > 0:
        _choose_drafts_kernel[(num_rows,)](
            tokens, computed, other_drafts, num_other, lookup_gain, req_idx, num_draft, num_next_draft, results, found,
            num_found, num_taken, k, tokens.shape[1],
            WEIGHT=GAIN_WEIGHT, MOST=MOST_GAIN, COLUMNS=triton.next_power_of_2(k),
        )  # fmt: skip
    return num_taken

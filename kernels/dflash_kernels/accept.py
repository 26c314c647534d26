"""Which drafts are accepted and which token follows them; advances the requests' state.

The target's own token at a position follows from its logits, the request's parameters and its seed (`sample`). A draft
is accepted if it is that token, so the output is what the target alone would give, whatever was drafted: greedy output
is its argmax, sampled output has its distribution (Daliri, Musco, Suresh, arXiv 2408.07978). State, padding and
references are as in `prepare_step`.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


def accept_reference(
    target_tokens: torch.Tensor,
    tokens: torch.Tensor,
    computed: torch.Tensor,
    k: int,
    req_idx: torch.Tensor,
    starts: torch.Tensor,
    num_new: torch.Tensor,
    num_draft: torch.Tensor,
    logits_start: torch.Tensor,
) -> torch.Tensor:
    """The results of each row, int64 `[R, k + 3]`: its accepted drafts, its `num_draft` verified ones, and its new
    tokens, 0 after the last of them.

    target_tokens: int64 `[D]`, the target's token for each row of logits. tokens: int64 `[S, max_len]`, in which the
    drafts lie, and where the token after the accepted ones is written. computed: int32 `[S]`, set to
    `starts + num_new + count`. req_idx, starts, num_new, num_draft, logits_start: int32 `[R]`; logits_start is the
    index of the row's first entry in `target_tokens`.

    A row with logits_start -1 does not sample: nothing is accepted, and `computed` advances by `num_new`.
    """
    index = np.maximum(req_idx.numpy(), 0)
    first = (starts + num_new).numpy().astype(np.int64)
    offsets = logits_start.numpy()
    lens = np.where(offsets >= 0, num_draft.numpy(), 0)
    rows, column = np.arange(len(index)), np.arange(lens.max(initial=0) + 1)
    positions = first[:, None] + column
    within = positions < tokens.shape[1]
    drafts = np.where(within, tokens.numpy()[index[:, None], np.where(within, positions, 0)], 0)
    own = target_tokens.numpy() if len(target_tokens) else np.zeros(1, dtype=np.int64)
    own = own[np.minimum(np.maximum(offsets, 0)[:, None] + column, len(own) - 1)]
    count = np.logical_and.accumulate((drafts == own) & (column < lens[:, None]), axis=1).sum(axis=1)

    results = np.zeros((len(index), k + 3), dtype=np.int64)
    results[:, 0], results[:, 1] = count, num_draft.numpy()
    results[:, 2 : 2 + len(column)] = np.where((column <= count[:, None]) & (offsets >= 0)[:, None], own, 0)
    end, real = first + count, req_idx.numpy() >= 0
    written = real & (offsets >= 0) & (end < tokens.shape[1])
    tokens.numpy()[index[written], end[written]] = own[rows, count][written]
    computed.numpy()[index[real]] = end[real]
    return torch.from_numpy(results)


@cached_launches
@triton.jit
def _accept_kernel(
    target_tokens_ptr, tokens_ptr, computed_ptr, req_idx_ptr, starts_ptr, num_new_ptr, num_draft_ptr,
    logits_start_ptr, results_ptr, k, max_len, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program decides on one row."""
    row = tl.program_id(0)
    req_idx, logits_row = tl.load(req_idx_ptr + row), tl.load(logits_start_ptr + row)
    first = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row)
    num_verified = tl.load(num_draft_ptr + row)
    num_draft = tl.where(logits_row >= 0, num_verified, 0)
    column = tl.arange(0, COLUMNS)
    is_draft = column < num_draft
    within = is_draft & (first + column < tl.where(req_idx >= 0, max_len, 0))
    row_ptr = tokens_ptr + req_idx.to(tl.int64) * max_len
    drafts = tl.load(row_ptr + first + column, mask=within, other=0)
    num_own = tl.where(logits_row >= 0, num_draft + 1, 0)
    own = tl.load(target_tokens_ptr + logits_row + column, mask=column < num_own, other=0)
    rejected = (is_draft == 0) | (drafts != own)
    count = tl.min(tl.where(rejected, column, num_draft), axis=0)
    result_ptr = results_ptr + row * (k + 3)
    tl.store(result_ptr, count.to(tl.int64))
    tl.store(result_ptr + 1, num_verified.to(tl.int64))
    tl.store(result_ptr + 2 + column, tl.where(column <= count, own, 0), mask=column <= k)
    end = first + count
    if req_idx >= 0:
        tl.store(computed_ptr + req_idx, end)
        is_last = (column == count) & (column < num_own) & (first + column < max_len)
        tl.store(row_ptr + first + column, own, mask=is_last)


def accept(
    target_tokens: torch.Tensor,
    tokens: torch.Tensor,
    computed: torch.Tensor,
    k: int,
    req_idx: torch.Tensor,
    starts: torch.Tensor,
    num_new: torch.Tensor,
    num_draft: torch.Tensor,
    logits_start: torch.Tensor,
) -> torch.Tensor:
    """As `accept_reference`, for contiguous tensors."""
    num_rows = len(req_idx)
    results = torch.empty(num_rows, k + 3, dtype=torch.int64, device=tokens.device)
    if num_rows > 0:
        _accept_kernel[(num_rows,)](
            target_tokens, tokens, computed, req_idx, starts, num_new, num_draft, logits_start, results, k,
            tokens.shape[1], COLUMNS=triton.next_power_of_2(k + 1),
        )  # fmt: skip
    return results

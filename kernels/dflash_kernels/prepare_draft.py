"""Around the drafter: which context KV is written, what the drafter runs, where its drafts go.

State, padding and references are as in `prepare_step`. `computed` counts the accepted drafts by now, so it is the
anchor's position.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.prepare_step import covered_len, covered_lens, look_up, look_up_reference
from dflash_kernels.triton_import import tl, triton


def inject_slots_reference(
    slots: torch.Tensor, positions: torch.Tensor, req_idx: torch.Tensor, computed: torch.Tensor, token_row: torch.Tensor
) -> torch.Tensor:
    """`slots` with -1 where the token's position is not final, so that rejected drafts write no context KV.

    slots, positions: int64 `[T]`. req_idx: int32 `[R]`. computed: int32 `[S]`. token_row: int32 `[T]`, -1 for padding,
    whose slot is -1 already.
    """
    ends = computed.numpy()[np.maximum(req_idx.numpy(), 0)]
    final = positions.numpy() < ends[np.maximum(token_row.numpy(), 0)]
    return torch.from_numpy(np.where(final, slots.numpy(), -1))


def prepare_draft_reference(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    computed: torch.Tensor,
    block_size: int,
    req_idx: torch.Tensor,
    num_next_draft: torch.Tensor,
    width: int,
    placeholder_id: int,
    lookahead_base: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[anchor, placeholder, placeholder, ...]` for each row that drafts (`num_next_draft` > 0): ids, positions, slots
    int64 `[R, width]`, query_lens (`num_next_draft + lookahead_base`, else 0), seq_lens int32 `[R]`. State as in
    `prepare_reference`."""
    rows, lens = req_idx.numpy(), num_next_draft.numpy()
    index = np.maximum(rows, 0)
    drafts = (rows >= 0) & (lens > 0)
    query_lens = np.where(drafts, lens + lookahead_base, 0).astype(np.int32)
    anchor = np.where(drafts, computed.numpy()[index], 0)
    covered = covered_lens(tokens, num_blocks, block_size, req_idx)
    seq_lens = np.minimum(anchor + query_lens, covered).astype(np.int32)

    column = np.arange(width)
    positions = anchor[:, None] + column
    inside = (column < query_lens[:, None]) & (positions < covered[:, None])
    ids, positions, slots = look_up_reference(tokens, blocks, block_size, index[:, None], positions, inside)
    ids[:, 1:] = np.where(inside[:, 1:], placeholder_id, 0)
    put = torch.from_numpy
    return put(ids), put(positions), put(slots), put(query_lens), put(seq_lens)


def store_drafts_reference(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    req_idx: torch.Tensor,
    num_next_draft: torch.Tensor,
    drafts: torch.Tensor,
    confidence: torch.Tensor | None = None,
    confidences: torch.Tensor | None = None,
) -> None:
    """Write `num_next_draft` (int32 `[R]`) of each row's `drafts` behind its anchor in `tokens`; what would lie past
    the width of `tokens` is dropped. State as in `prepare_reference`; no request occurs twice.

    drafts: int64 `[R, width]`, or without padding `[sum(num_next_draft)]`. confidence: float32 of the same shape,
    written to the first columns of the requests' rows of `confidences`, float32 `[S, k]`; None where there is none.
    """
    rows, columns = _draft_indices(req_idx, num_next_draft)
    if confidence is not None and confidences is not None:
        sure = confidence.numpy() if confidence.dim() == 1 else confidence.numpy()[rows, columns]
        confidences.numpy()[req_idx.numpy()[rows], columns] = sure
    values = drafts.numpy() if drafts.dim() == 1 else drafts.numpy()[rows, columns]
    index = req_idx.numpy()[rows]
    positions = computed.numpy()[index] + 1 + columns
    within = positions < tokens.shape[1]
    tokens.numpy()[index[within], positions[within]] = values[within]


def _draft_indices(req_idx: torch.Tensor, num_next_draft: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each draft, row by row: int64 `[n]`."""
    lens = np.where(req_idx.numpy() >= 0, num_next_draft.numpy(), 0)
    rows = np.repeat(np.arange(len(lens)), lens)
    first = np.cumsum(lens) - lens
    return rows, np.arange(len(rows)) - first[rows]


@cached_launches
@triton.jit(do_not_specialize=["num_tokens"])
def _inject_slots_kernel(
    slots_ptr, positions_ptr, req_idx_ptr, computed_ptr, token_row_ptr, out_ptr, num_tokens, BLOCK: tl.constexpr
):
    """One program decides on BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    row = tl.load(token_row_ptr + token, mask=inside, other=-1)
    req_idx = tl.load(req_idx_ptr + row, mask=row >= 0, other=-1)
    computed = tl.load(computed_ptr + req_idx, mask=req_idx >= 0, other=0)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    slots = tl.load(slots_ptr + token, mask=inside, other=-1)
    tl.store(out_ptr + token, tl.where(position < computed, slots, -1), mask=inside)


def inject_slots(
    slots: torch.Tensor,
    positions: torch.Tensor,
    req_idx: torch.Tensor,
    computed: torch.Tensor,
    token_row: torch.Tensor,
) -> torch.Tensor:
    """As `inject_slots_reference`, for contiguous tensors."""
    out = torch.empty_like(slots)
    block = 256
    if len(slots) > 0:
        grid = (triton.cdiv(len(slots), block),)
        _inject_slots_kernel[grid](slots, positions, req_idx, computed, token_row, out, len(slots), BLOCK=block)
    return out


@cached_launches
@triton.jit
def _prepare_draft_kernel(
    tokens_ptr, blocks_ptr, num_blocks_ptr, computed_ptr, req_idx_ptr, num_next_ptr,
    ids_ptr, positions_ptr, slots_ptr, query_lens_ptr, seq_lens_ptr,
    placeholder_id, block_size, max_len, max_blocks,
    WIDTH: tl.constexpr, LOOKAHEAD_BASE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program prepares one row's WIDTH queries."""
    row = tl.program_id(0)
    req_idx = tl.load(req_idx_ptr + row)
    num_next_draft = tl.load(num_next_ptr + row)
    drafts = (req_idx >= 0) & (num_next_draft > 0)
    query_len = tl.where(drafts, num_next_draft + LOOKAHEAD_BASE, 0)
    anchor = tl.load(computed_ptr + req_idx, mask=drafts, other=0)
    capacity = covered_len(num_blocks_ptr, req_idx, block_size, max_len)

    column = tl.arange(0, COLUMNS)
    positions = anchor + column
    covered = (column < query_len) & (positions < capacity)
    req_indices = req_idx + tl.zeros_like(column)
    ids, positions, slots = look_up(
        tokens_ptr, blocks_ptr, block_size, max_len, max_blocks, req_indices, positions, covered
    )
    ids = tl.where(covered & (column > 0), placeholder_id, ids)
    place = row * WIDTH + column
    tl.store(ids_ptr + place, ids, mask=column < WIDTH)
    tl.store(positions_ptr + place, positions, mask=column < WIDTH)
    tl.store(slots_ptr + place, slots, mask=column < WIDTH)
    tl.store(query_lens_ptr + row, query_len)
    tl.store(seq_lens_ptr + row, tl.minimum(anchor + query_len, capacity))


def prepare_draft(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    computed: torch.Tensor,
    block_size: int,
    req_idx: torch.Tensor,
    num_next_draft: torch.Tensor,
    width: int,
    placeholder_id: int,
    lookahead_base: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `prepare_draft_reference`, for contiguous tensors."""
    num_rows, device = len(req_idx), tokens.device
    ids, positions, slots = (torch.empty(num_rows, width, dtype=torch.int64, device=device) for _ in range(3))
    query_lens, seq_lens = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    if num_rows > 0:
        _prepare_draft_kernel[(num_rows,)](
            tokens, blocks, num_blocks, computed, req_idx, num_next_draft,
            ids, positions, slots, query_lens, seq_lens,
            placeholder_id, block_size, tokens.shape[1], blocks.shape[1],
            WIDTH=width, LOOKAHEAD_BASE=lookahead_base, COLUMNS=triton.next_power_of_2(width),
        )  # fmt: skip
    return ids, positions, slots, query_lens, seq_lens


@cached_launches
@triton.jit
def _store_drafts_kernel(
    tokens_ptr, computed_ptr, req_idx_ptr, num_next_ptr, drafts_ptr, confidence_ptr, confidences_ptr,
    width, k, max_len, CONFIDENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program writes one row's drafts."""
    row = tl.program_id(0)
    req_idx = tl.load(req_idx_ptr + row)
    if req_idx >= 0:
        column = tl.arange(0, COLUMNS)
        num_next_draft = tl.minimum(tl.load(num_next_ptr + row), width)
        positions = tl.load(computed_ptr + req_idx) + 1 + column
        kept = (column < num_next_draft) & (positions < max_len)
        drafts = tl.load(drafts_ptr + row * width + column, mask=kept, other=0)
        tl.store(tokens_ptr + req_idx.to(tl.int64) * max_len + positions, drafts, mask=kept)
        if CONFIDENT:
            there = column < num_next_draft
            sure = tl.load(confidence_ptr + row * width + column, mask=there, other=0.0)
            tl.store(confidences_ptr + req_idx.to(tl.int64) * k + column, sure, mask=there)


def store_drafts(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    req_idx: torch.Tensor,
    num_next_draft: torch.Tensor,
    drafts: torch.Tensor,
    confidence: torch.Tensor | None = None,
    confidences: torch.Tensor | None = None,
) -> None:
    """As `store_drafts_reference`, for contiguous tensors."""
    num_rows, width = drafts.shape
    k = width if confidences is None else confidences.shape[1]
    if num_rows > 0 and width > 0:
        _store_drafts_kernel[(num_rows,)](
            tokens, computed, req_idx, num_next_draft, drafts, confidence, confidences, width, k, tokens.shape[1],
            CONFIDENT=confidence is not None, COLUMNS=triton.next_power_of_2(width),
        )  # fmt: skip

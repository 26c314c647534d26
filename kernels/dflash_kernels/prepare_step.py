"""What the target runs in a step, from the step's layout and the state of its requests.

A request's state is one entry of each state tensor, its request index `req_idx`; padding rows have -1. A token is
*covered* when a block of its request and the width of `tokens` hold its position. A token that is not covered, since
its request has ended meanwhile, gets slot -1, id 0 and position 0, and so does a padding token.

The references are those of a CPU, in numpy: on arrays this small a numpy call costs a fraction of a torch call.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


def covered_lens(tokens: torch.Tensor, num_blocks: torch.Tensor, block_size: int, req_idx: torch.Tensor) -> np.ndarray:
    """Positions that the blocks of each row hold, 0 for a padding row: int64 `[R]`. The arguments are those of
    `prepare_reference`."""
    rows = req_idx.numpy()
    covered = np.minimum(num_blocks.numpy()[np.maximum(rows, 0)].astype(np.int64) * block_size, tokens.shape[1])
    return np.where(rows >= 0, covered, 0)


def look_up_reference(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    req_idx: np.ndarray,
    positions: np.ndarray,
    covered: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, positions and slots, int64 `[n]`, of the int64 `positions` of requests `req_idx` (at least 0), with padding
    where not `covered` (bool `[n]`)."""
    all_covered = covered.all()
    if not all_covered:
        positions = np.where(covered, positions, 0)
    ids = tokens.numpy()[req_idx, positions]
    block = positions // block_size
    slots = (blocks.numpy()[req_idx, block].astype(np.int64) - block) * block_size + positions
    if all_covered:
        return ids, positions, slots
    return np.where(covered, ids, 0), positions, np.where(covered, slots, -1)


def prepare_reference(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    computed: torch.Tensor,
    block_size: int,
    req_idx: torch.Tensor,
    start: torch.Tensor,
    num_unverified_drafts: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: torch.Tensor,
    token_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the target runs: ids, positions, slots int64 `[T]`; starts, seq_lens int32 `[R]`, 0 for padding rows.

    tokens: int64 `[S, max_len]`. blocks: int32 `[S, max_blocks]`. num_blocks, computed: int32 `[S]`. req_idx, start,
    num_unverified_drafts, query_start, query_lens: int32 `[R]`. token_row: int32 `[T]`, -1 for padding.

    A row starts at `start`, or at its `computed` where `num_unverified_drafts` is not 0. A row's length stops at its
    blocks, which hold at least `query_lens` positions (RESERVE), so each of its queries sees a key.
    """
    rows = req_idx.numpy()
    index = np.maximum(rows, 0)
    starts = np.where(num_unverified_drafts.numpy() > 0, computed.numpy()[index], start.numpy())
    starts = np.where(rows >= 0, starts, 0)
    covered = covered_lens(tokens, num_blocks, block_size, req_idx)
    seq_lens = np.minimum(starts + query_lens.numpy(), covered).astype(np.int32)

    row = token_row.numpy()
    inside = row >= 0
    row = np.maximum(row, 0)
    positions = (starts - query_start.numpy())[row] + np.arange(len(row))
    inside &= positions < covered[row]
    ids, positions, slots = look_up_reference(tokens, blocks, block_size, index[row], positions, inside)
    put = torch.from_numpy
    return put(ids), put(positions), put(slots), put(starts), put(seq_lens)


@triton.jit
def covered_len(num_blocks_ptr, req_idx, block_size, max_len):
    """Positions that the blocks of state row `req_idx` (-1: padding, 0 positions) hold: `covered_lens`."""
    num_blocks = tl.load(num_blocks_ptr + req_idx, mask=req_idx >= 0, other=0)
    return tl.minimum(num_blocks * block_size, max_len)


@triton.jit
def look_up(tokens_ptr, blocks_ptr, block_size, max_len, max_blocks, req_idx, positions, covered):
    """As `look_up_reference`, with int32 positions; returns int64."""
    positions = tl.where(covered, positions, 0)
    row = req_idx.to(tl.int64)
    ids = tl.load(tokens_ptr + row * max_len + positions, mask=covered, other=0)
    block = positions // block_size
    block_id = tl.load(blocks_ptr + row * max_blocks + block, mask=covered, other=0).to(tl.int64)
    slots = tl.where(covered, block_id * block_size + (positions - block * block_size), -1)
    return ids, positions.to(tl.int64), slots


@triton.jit
def _row_start(start_ptr, num_unverified_ptr, computed_ptr, row, req_idx, inside):
    """Where a row really starts; 0 for padding (`req_idx` -1)."""
    real = inside & (req_idx >= 0)
    start = tl.load(start_ptr + row, mask=real, other=0)
    num_unverified_drafts = tl.load(num_unverified_ptr + row, mask=real, other=0)
    computed = tl.load(computed_ptr + req_idx, mask=real & (num_unverified_drafts > 0), other=0)
    return tl.where(num_unverified_drafts > 0, computed, start)


@cached_launches
@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _prepare_kernel(
    tokens_ptr, blocks_ptr, num_blocks_ptr, computed_ptr,
    req_idx_ptr, start_ptr, num_unverified_ptr, query_start_ptr, query_lens_ptr, token_row_ptr,
    ids_ptr, positions_ptr, slots_ptr, starts_ptr, seq_lens_ptr,
    num_tokens, num_rows, block_size, max_len, max_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs prepare BLOCK tokens each; those behind the last token prepare BLOCK rows each."""
    token_programs = tl.cdiv(num_tokens, BLOCK)
    program = tl.program_id(0)
    if program < token_programs:
        token = program * BLOCK + tl.arange(0, BLOCK)
        inside = token < num_tokens
        row = tl.load(token_row_ptr + token, mask=inside, other=-1)
        real = row >= 0
        req_idx = tl.load(req_idx_ptr + row, mask=real, other=-1)
        start = _row_start(start_ptr, num_unverified_ptr, computed_ptr, row, req_idx, real)
        position = start + token - tl.load(query_start_ptr + row, mask=real, other=0)
        capacity = covered_len(num_blocks_ptr, req_idx, block_size, max_len)
        ids, positions, slots = look_up(
            tokens_ptr, blocks_ptr, block_size, max_len, max_blocks, req_idx, position, position < capacity
        )
        tl.store(ids_ptr + token, ids, mask=inside)
        tl.store(positions_ptr + token, positions, mask=inside)
        tl.store(slots_ptr + token, slots, mask=inside)
    else:
        row = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)
        inside = row < num_rows
        req_idx = tl.load(req_idx_ptr + row, mask=inside, other=-1)
        start = _row_start(start_ptr, num_unverified_ptr, computed_ptr, row, req_idx, inside)
        end = start + tl.load(query_lens_ptr + row, mask=inside, other=0)
        capacity = covered_len(num_blocks_ptr, req_idx, block_size, max_len)
        tl.store(starts_ptr + row, start, mask=inside)
        tl.store(seq_lens_ptr + row, tl.minimum(end, capacity), mask=inside)


def prepare(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    computed: torch.Tensor,
    block_size: int,
    req_idx: torch.Tensor,
    start: torch.Tensor,
    num_unverified_drafts: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: torch.Tensor,
    token_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `prepare_reference`, for contiguous tensors."""
    num_tokens, num_rows, device = len(token_row), len(req_idx), tokens.device
    # Tensors of their own: views of one would differ in alignment, and each kind would be compiled anew.
    ids, positions, slots = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
    starts, seq_lens = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    block = 128
    grid = (triton.cdiv(num_tokens, block) + triton.cdiv(num_rows, block),)
    if grid[0] > 0:
        _prepare_kernel[grid](
            tokens, blocks, num_blocks, computed,
            req_idx, start, num_unverified_drafts, query_start, query_lens, token_row,
            ids, positions, slots, starts, seq_lens,
            num_tokens, num_rows, block_size, tokens.shape[1], blocks.shape[1], BLOCK=block,
        )  # fmt: skip
    return ids, positions, slots, starts, seq_lens

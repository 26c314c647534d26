"""Calls of the C++ operations around the models on a CPU (`cpu_step.h`), each as its reference says. A call takes some
microseconds for any number of rows, where the references' calls of numpy take hundreds."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from dflash_kernels import cpu_library

_library = cpu_library.load()


def _state(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    blocks: torch.Tensor | None = None,
    num_blocks: torch.Tensor | None = None,
    block_size: int = 1,
) -> np.ndarray:
    """`State` of `cpu_step.h`, with the blocks where an operation reads them. Keep it until the call has returned: its
    memory may go to another thread's array before that, since a call lets go of the interpreter's lock."""
    pointers = [0 if each is None else each.data_ptr() for each in (tokens, blocks, num_blocks, computed)]
    max_blocks = 0 if blocks is None else blocks.shape[1]
    return np.array([*pointers, tokens.shape[1], max_blocks, block_size], np.int64)


def _call() -> ctypes.CDLL:
    assert _library is not None
    return _library


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
    state = _state(tokens, computed, blocks, num_blocks, block_size)
    found = torch.empty((3, len(token_row)), dtype=torch.int64)
    starts, seq_lens = torch.empty((2, len(req_idx)), dtype=torch.int32).unbind()
    _call().dflash_prepare(
        state.ctypes.data, req_idx.data_ptr(), start.data_ptr(), num_unverified_drafts.data_ptr(),
        query_start.data_ptr(), query_lens.data_ptr(), len(req_idx), token_row.data_ptr(), len(token_row),
        found.data_ptr(), starts.data_ptr(), seq_lens.data_ptr(),
    )  # fmt: skip
    ids, positions, slots = found.unbind()
    return ids, positions, slots, starts, seq_lens


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `accept_reference`, for contiguous tensors."""
    state, num_rows = _state(tokens, computed), len(req_idx)
    count, new_tokens = torch.empty(num_rows, dtype=torch.int32), torch.empty((num_rows, k + 1), dtype=torch.int64)
    _call().dflash_accept(
        state.ctypes.data, target_tokens.data_ptr(), k, req_idx.data_ptr(), starts.data_ptr(),
        num_new.data_ptr(), num_draft.data_ptr(), logits_start.data_ptr(), num_rows, count.data_ptr(),
        new_tokens.data_ptr(),
    )  # fmt: skip
    return count, new_tokens


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
    state, num_rows = _state(tokens, computed, blocks, num_blocks, block_size), len(req_idx)
    found = torch.empty((3, num_rows, width), dtype=torch.int64)
    query_lens, seq_lens = torch.empty((2, num_rows), dtype=torch.int32).unbind()
    _call().dflash_prepare_draft(
        state.ctypes.data, req_idx.data_ptr(), num_next_draft.data_ptr(), num_rows, width, placeholder_id,
        lookahead_base, found.data_ptr(), query_lens.data_ptr(), seq_lens.data_ptr(),
    )  # fmt: skip
    ids, positions, slots = found.unbind()
    return ids, positions, slots, query_lens, seq_lens


def store_drafts(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    req_idx: torch.Tensor,
    num_next_draft: torch.Tensor,
    drafts: torch.Tensor,
    confidence: torch.Tensor | None = None,
    confidences: torch.Tensor | None = None,
) -> None:
    """As `store_drafts_reference`, for contiguous state."""
    state, drafts = _state(tokens, computed), drafts.contiguous()
    sure = None if confidence is None or confidences is None else confidence.contiguous()
    width = drafts.shape[1] if drafts.dim() == 2 else 0
    _call().dflash_store_drafts(
        state.ctypes.data, req_idx.data_ptr(), num_next_draft.data_ptr(), len(req_idx),
        drafts.data_ptr(), None if sure is None else sure.data_ptr(), width,
        None if sure is None or confidences is None else confidences.data_ptr(),
        0 if confidences is None else confidences.shape[1],
    )  # fmt: skip

"""Calls of the C++ operations around the models on a CPU (`cpu_step.h`), each as its reference says. A call takes some
microseconds for any number of rows, where the references' calls of numpy take hundreds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_kernels import cpu_library

_library: Any = cpu_library.load()
_NOWHERE = np.zeros(4, np.int64)
_NO_CONTEXT = (
    torch.empty(0, 0),
    torch.empty(0, dtype=torch.int64),
    torch.empty(0, dtype=torch.int64),
    torch.empty(0, dtype=torch.int32),
)


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


class RowsLaidOut(NamedTuple):
    """A step of R rows and T tokens. layout: int32, what `DeviceBatch` has of rows, each field behind the one before,
    then `starts` and `ends` `[R]`, where rows start and end, and the row of each token `[T]`. logits_token, logits_row:
    int32 `[D]`. tables: int32 `[R, W]`, the rows' block tables. token_ids, positions, slots: int64 `[T]`."""

    layout: np.ndarray
    logits_token: np.ndarray
    logits_row: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    tables: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray


def lay_out(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    computed: torch.Tensor,
    block_size: int,
    rows: np.ndarray,
) -> tuple[RowsLaidOut, np.ndarray, np.ndarray, bool]:
    """What a step of `rows` runs, as `prepare_reference` says; its rows' tokens and again where they end, int64 `[R]`;
    and whether a slot is below 0. rows: int64 `[R, 7]`, contiguous, of each row its request, where it starts, drafts in
    flight, known tokens, drafts, drafts to propose, and whether it samples."""
    state = _state(tokens, computed, blocks, num_blocks, block_size)
    count, size = len(rows), int(rows[:, 3:5].sum())
    width = max(1, int(num_blocks.numpy()[rows[:, 0]].max()))
    narrow, wide = (
        np.empty(11 * count + 3 * size + count * width, np.int32),
        np.empty(1 + 3 * size + 2 * count, np.int64),
    )
    num_logits = _library.dflash_lay_out(
        state.ctypes.data, rows.ctypes.data, count, size, width, narrow.ctypes.data, wide.ctypes.data
    )
    logits_at, rows_at, tables_at = (11 * count + times * size for times in (1, 2, 3))
    lens_at = 1 + 3 * size
    found = RowsLaidOut(
        narrow, narrow[logits_at : logits_at + num_logits], narrow[rows_at : rows_at + num_logits],
        narrow[9 * count : 10 * count], narrow[10 * count : 11 * count], narrow[tables_at:].reshape(count, width),
        wide[1 : 1 + size], wide[1 + size : 1 + 2 * size], wide[1 + 2 * size : lens_at],
    )  # fmt: skip
    return found, wide[lens_at : lens_at + count], wide[lens_at + count :], wide.item(0) != 0


def accept(
    target_tokens: torch.Tensor, tokens: torch.Tensor, computed: torch.Tensor, k: int, layout: np.ndarray, num_rows: int
) -> torch.Tensor:
    """As `accept_reference`, for contiguous tensors. layout: of `RowsLaidOut`."""
    state = _state(tokens, computed)
    results = torch.empty((num_rows, k + 3), dtype=torch.int64)
    _library.dflash_accept(
        state.ctypes.data, target_tokens.data_ptr(), k, layout.ctypes.data, num_rows, results.data_ptr()
    )
    return results


class WaitingContext:
    """Context of S requests that waits: int64 `[S]` each, how many tokens of a request wait, and position and slot of
    the first; and their features, `[S, block_size, width]`."""

    def __init__(self, num_requests: int, block_size: int, features: torch.Tensor) -> None:
        """features: `[n, width]`, such as those to come."""
        self.counts, self.positions, self.slots = np.zeros((3, num_requests), dtype=np.int64)
        # The system gives its memory as it is written.
        self.features = features.new_empty((num_requests, block_size, features.shape[1]))
        addresses = [each.ctypes.data for each in (self.counts, self.positions, self.slots)]
        num_bytes = features.shape[1] * features.element_size()
        self._described = np.array([*addresses, self.features.data_ptr(), block_size, num_bytes], np.int64)
        self.address = self._described.ctypes.data
        """Of `Waiting` of `cpu_step.h`."""


def take_context(
    computed: torch.Tensor,
    waiting: WaitingContext,
    layout: np.ndarray,
    num_rows: int,
    may_wait: bool,
    positions: torch.Tensor,
    slots: torch.Tensor,
    features: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Of a step's tokens whose positions are final, after `accept`, and of what waits of its requests, those whose
    context KV is to be written now: features `[n, width]` (of no width where there is none), positions, slots int64
    `[n]` and rows int32 `[n]`. None: all tokens of the step, as they are.

    computed: int32 `[S]`. layout: of `RowsLaidOut`, of `num_rows` rows. may_wait: whether the token of a row that
    drafts nothing may wait until its block is full. positions, slots: int64 `[T]`. features: `[T, width]`, contiguous.
    """

    def take(out: np.ndarray, most: int) -> int:
        count: int = _library.dflash_take_context(
            computed.data_ptr(), waiting.features.shape[1], waiting.address, layout.ctypes.data, num_rows, may_wait,
            positions.data_ptr(), slots.data_ptr(), features.data_ptr(), out.ctypes.data, most,
        )  # fmt: skip
        return count

    # Where rows wait mostly nothing is to be written.
    count = take(_NOWHERE, 0)
    if count == -1:
        return None
    num_found = max(0, -2 - count)
    if not num_found:
        return _NO_CONTEXT
    found, rows = features.new_empty((num_found, features.shape[1])), torch.empty(num_found, dtype=torch.int32)
    written_at = torch.empty((2, num_found), dtype=torch.int64)
    tensors = (found, written_at[0], written_at[1], rows)
    take(np.array([each.data_ptr() for each in tensors], np.int64), num_found)
    return tensors


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
    _library.dflash_prepare_draft(
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
    _library.dflash_store_drafts(
        state.ctypes.data, req_idx.data_ptr(), num_next_draft.data_ptr(), len(req_idx),
        drafts.data_ptr(), None if sure is None else sure.data_ptr(), width,
        None if sure is None or confidences is None else confidences.data_ptr(),
        0 if confidences is None else confidences.shape[1],
    )  # fmt: skip

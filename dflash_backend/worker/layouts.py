"""Rows as attention runs them: on a CPU from exact lengths, and by the other block table of layers with a window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dflash_backend.attention import AttentionBatch
from dflash_backend.drafters.base import DraftQueries
from dflash_backend.models.interface import WindowSlots
from dflash_backend.worker.batch import DeviceBatch, StepInputs
from dflash_backend.worker.state import StateTensors
from dflash_kernels import one_row


def window_slots(
    batch: DeviceBatch, positions: torch.Tensor, slots: torch.Tensor, layout: AttentionBatch, state: StateTensors
) -> WindowSlots | None:
    """The tokens and rows of a pass by the block table of these layers; None where there is no such table. A token
    whose slot in the other layers is below 0 has none here either. Waits for nothing, so that graphs can capture it.

    positions, slots: int64 `[T]`.
    """
    if state.window_blocks is None:
        return None
    req_idx = batch.req_idx.clamp(min=0)
    tables = state.window_blocks[:, : layout.block_tables.shape[1]].index_select(0, req_idx)
    of_token = req_idx.index_select(0, batch.token_row.clamp(min=0)).long()
    blocks = state.window_blocks[of_token, positions // state.block_size].long()
    own = blocks * state.block_size + positions % state.block_size
    return WindowSlots(torch.where(slots < 0, slots, own), replace(layout, block_tables=tables))


def exact_layout(
    req_idx: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, state: StateTensors
) -> AttentionBatch:
    """The rows as attention runs them when their lengths are known."""
    width = max(1, -(-int(seq_lens.max()) // state.block_size))
    tables = torch.from_numpy(state.blocks.numpy()[req_idx, :width])
    return AttentionBatch(query_lens.astype(np.int64), seq_lens.astype(np.int64), tables)


def draft_width(inputs: StepInputs, state: StateTensors) -> int:
    """Drafts that a row of the step proposes at most."""
    return state.k if inputs.draft_width is None else inputs.draft_width


def draft_of_row(
    batch: DeviceBatch, state: StateTensors, placeholder_id: int, lookahead_base: int
) -> DraftQueries | None:
    """What the drafter's model runs for the single row of a step, which drafts; None where its blocks do not hold the
    queries. As `worker.step_ops.HostStepOps.prepare_draft`."""
    index, width = one_row.number(batch.req_idx), one_row.number(batch.num_next) + lookahead_base
    anchor = state.computed.numpy().item(index)
    queries = one_row.prepare_draft(
        state.tokens, state.blocks, state.num_blocks, state.block_size, index, anchor, width, placeholder_id
    )
    if queries is None:
        return None
    layout = exact_layout(np.array([index]), np.array([width]), np.array([anchor + width]), state)
    return DraftQueries(*queries, layout, width, from_anchor=lookahead_base == 0)

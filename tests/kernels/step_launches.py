"""A launch of each kernel that a step's operations consist of, for `compile_only`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dflash_backend.drafters.base import Drafts
from dflash_backend.worker.batch import BatchTraits, DeviceBatch, ForwardBatch, LengthBounds
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_ops import GpuStepOps
from dflash_kernels.penalties import NUMBERS, PenalisedRows
from dflash_kernels.prompt_lookup import prompt_lookup
from dflash_kernels.token_bitmask import num_words

VOCAB, ROWS, K = 5008, 4, 7


def launches() -> None:
    """A step with sampled rows, and drafts with noise, in a vocabulary of their own; then prompt lookup."""
    ops = GpuStepOps()
    state = StateTensors.allocate(ROWS, 100, K, 16, VOCAB, torch.device("cpu"), has_lookup=True)
    rows = DeviceBatch.over(torch.zeros(DeviceBatch.buffer_size(ROWS, ROWS * (K + 1)), dtype=torch.int32), ROWS)
    ends = np.full(ROWS, 100)
    bounds = LengthBounds(np.full(ROWS, K + 1), ends, ends, 100)
    inputs = ForwardBatch(rows, None, rows.token_row, bounds, BatchTraits(sampled=True, drafts=True), K)
    logits = torch.zeros(ROWS * (K + 1), VOCAB, dtype=torch.bfloat16)
    ops.apply_budget(replace(inputs, logits_token=rows.token_row), torch.zeros(2 + K + ROWS), state)
    ops.prepare(inputs, state)
    ops.apply_token_bitmask(logits, torch.zeros(ROWS, num_words(VOCAB), dtype=torch.int32), rows.num_new)
    penalised = PenalisedRows(torch.zeros(NUMBERS, ROWS, dtype=torch.int64), inputs.positions, K)
    ops.penalise(logits.float(), penalised, state)
    ops.argmax(logits)
    inputs.logits = logits
    inputs.target_tokens = ops.target_tokens(inputs, state)
    ops.accept(inputs, state)
    ops.context(inputs, state, torch.zeros(ROWS * (K + 1), 1))
    draft = ops.prepare_draft(inputs, state, 3)
    positions = draft.of_drafts(draft.positions)
    temperature, seeds = torch.ones(len(positions)), torch.zeros_like(positions)
    ops.sample(logits[: len(positions)], temperature, seeds, positions, token_ids=torch.arange(VOCAB))
    ops.noisy_scores(logits[: len(positions)], temperature, seeds, positions)
    ops.log_odds(logits[: len(positions)], positions)
    ops.store_drafts(Drafts(positions, torch.zeros(len(positions))), rows, state)
    found, _ = prompt_lookup(state.tokens, state.computed, rows.req_idx, rows.num_next_draft, K, 2, 5)
    ops.choose_drafts(inputs, state, found, rows.num_next_draft)

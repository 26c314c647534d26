"""Padded steps that take rows of any length: prompts and their chunks beside decode rows.

Their shape is a number of tokens, which the rows share as they need, and a number of rows. What a step has of either is
laid out on the device, as in decode steps with a budget (`dflash_kernels.verify_budget`), so one graph serves every
mix. Attention shares the contexts out among its workers by the real lengths, so a row's bound, which is all of the
tokens, costs little: tiles without queries are left out on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_backend.worker.batch import BatchTraits, HostBatch, LengthBounds, StepInputs
from dflash_backend.worker.layout_buffer import LayoutBuffer
from dflash_backend.worker.step import ModelStep

# Tokens of the steps that there are. Above the last a GPU takes longer for a step's products than a host for its
# launches; a stride as fine as this costs a fifth of the arithmetic at most.
MIXED_TOKENS = (64, 128, 192, 256, 320, 384, 448, 512)
# Rows at most, since attention has a tile for each that all of the tokens might be.
MAX_MIXED_ROWS = 64
# A step is padded to this many times its tokens at most, or to the first of the sizes.
MOST_PADDING = 1.34


def mixed_shapes(max_rows: int, max_tokens: int, width: int) -> list[tuple[int, int]]:
    """Rows and tokens of each mixed step, of an engine whose steps have at most that many, and whose decode rows have
    `width` tokens: as many rows as have tokens when all of them decode."""
    return [
        (max(1, min(max_rows, tokens // width, MAX_MIXED_ROWS)), tokens)
        for tokens in MIXED_TOKENS
        if tokens <= max_tokens and tokens >= 2 * width
    ]


def mixed_inputs(step: ModelStep, layouts: LayoutBuffer, num_rows: int, num_tokens: int, sampled: bool) -> StepInputs:
    """Of a mixed step over the layout buffer: any row may have any of the tokens and any positions behind them, and
    those that sample have up to k + 1 logits."""
    state, device = step.state, step.device
    longest = np.full(num_rows, state.max_len)
    batch, budget = layouts.padded(num_rows, num_tokens)
    # Where logits lie is decided on the device; this says how many there may be.
    nowhere = torch.zeros(num_rows * step.width, dtype=torch.int32, device=device)
    return StepInputs(
        batch=batch,
        logits_token=nowhere,
        logits_row=nowhere,
        bounds=LengthBounds(np.full(num_rows, num_tokens), longest, longest, max_overestimate=state.max_len),
        traits=BatchTraits(sampled, step.drafter is not None and state.k > 0),
        budget=budget,
    )


def smallest_mixed(steps: Sequence[StepInputs], batch: HostBatch) -> int | None:
    """The index of the smallest of these steps that can run `batch`, not of decode rows alone; None when there is none,
    or none that is worth its padding."""
    count = len(batch.req_idx)
    num_tokens = int(batch.num_new.sum()) + batch.num_verified
    most = max(MOST_PADDING * num_tokens, MIXED_TOKENS[0])
    # A step that proposes nothing, as where drafting does not pay, must not run the drafter; and one in which no row
    # chooses a token needs no logits.
    drafts = bool(batch.num_next.any())
    fitting = [
        (inputs.num_tokens, number)
        for number, inputs in enumerate(steps)
        if count <= inputs.num_rows
        and num_tokens <= inputs.num_tokens <= most
        and inputs.traits.drafts == drafts
        and batch.traits.chooses
    ]
    return min(fitting)[1] if fitting else None

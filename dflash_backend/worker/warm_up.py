"""Runs the kinds of steps that no graph covers once, so that no request waits for what is made at first use: compiled
kernels and libraries' handles. Called by the device runner when it is prepared, on a GPU.

Attention has a kernel for each height of its tiles, with and without splits of the context; the other kernels have one
for all steps. A kernel that Triton finds in its cache on disk takes no time.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.worker.device_layout import Bounds, LayoutBuffer, RowTraits, StepInputs
from dflash_backend.worker.device_step import DeviceStep

# Tokens of a prefill chunk that takes the tallest tiles, whatever the heads.
CHUNK = 256
# Of different lengths, so that attention maps tiles to rows as it does in a ragged step.
NUM_ROWS = 4


def warm_up(step: DeviceStep, layouts: LayoutBuffer, max_tokens: int) -> None:
    """Run steps of padding rows alone, which read and write nothing, under the bounds of real ones: a token, a decode
    row and a chunk, each over a short and a long context; then one of sampled requests.

    max_tokens: the most of a step.
    """
    for num_tokens in sorted({1, min(step.width, max_tokens), min(CHUNK, max_tokens)}):
        for length in (num_tokens, step.state.max_len):
            step.run(_padding_under_bounds(step, layouts, num_tokens, length, sampled=False))
    step.run(_padding_under_bounds(step, layouts, 1, step.state.max_len, sampled=True))


def _padding_under_bounds(
    step: DeviceStep, layouts: LayoutBuffer, num_tokens: int, length: int, sampled: bool
) -> StepInputs:
    """Padding rows, the first of which the host takes for one of up to `num_tokens` tokens that ends at `length`."""
    device = step.state.tokens.device
    width = -(-num_tokens // NUM_ROWS)
    layouts.send_nothing(NUM_ROWS, width)
    lens, ends = np.zeros((2, NUM_ROWS), dtype=np.int64)
    lens[0], ends[0] = num_tokens, length
    return StepInputs(
        rows=layouts.padded_rows(NUM_ROWS, width),
        dist_token=torch.zeros(1, dtype=torch.int32, device=device),
        dist_row=torch.full((1,), -1, dtype=torch.int32, device=device),
        bounds=Bounds(lens, ends, ends, max_overestimate=step.state.max_len),
        traits=RowTraits(sampled=sampled, drafts=step.drafter is not None and step.state.k > 0),
    )

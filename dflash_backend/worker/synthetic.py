"""Acceptance that is drawn in place of compared, for benchmarks whose weights are random and would accept nothing.

What is generated then means nothing; what a step costs is the same, since everything is computed as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_backend.worker.device_layout import StepInputs
from dflash_backend.worker.device_state import DeviceState, Prepared, StepRows

ForcedAcceptance = Callable[[StepRows, Prepared], torch.Tensor]
"""How many drafts of each row shall stand: int32 `[R]` on the device, 0 to k, of which no more than the row has stand.
It is captured in graphs, so it must follow from its arguments: from the rows and where they start."""


def forced_choices(
    acceptance: ForcedAcceptance, best: torch.Tensor, inputs: StepInputs, prepared: Prepared, state: DeviceState
) -> torch.Tensor:
    """What takes the place of the target's most likely tokens (`best`, int64 `[D]`), so that greedy rows accept as many
    drafts as `acceptance` says: the drafts themselves, and then another token than the next draft."""
    rows = inputs.rows
    row = inputs.dist_row.clamp(min=0).long()
    column = torch.arange(len(best), device=best.device) - rows.dist_start[row]
    position = (prepared.starts[row] + rows.num_new[row] + column).clamp(min=0, max=state.max_len - 1)
    draft = state.tokens[rows.table[row].clamp(min=0).long(), position.long()]
    stands = column < acceptance(rows, prepared)[row]
    other = torch.where(draft > 0, draft - 1, draft + 1)
    return torch.where(stands, draft, other)

"""Step operations whose accept takes as many drafts as a function says: random weights would accept
nothing.

What is generated then means nothing; what a step costs is the same, since everything is computed as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_ops import StepOps

ForcedAcceptance = Callable[[ForwardBatch], torch.Tensor]
"""How many drafts of each row are accepted: int32 `[R]` on the device, 0 to k, no more than the row has. It is captured
in graphs, so it must follow from its arguments: from the rows and where they start."""


def force_acceptance(ops: StepOps, acceptance: ForcedAcceptance) -> StepOps:
    """`ops` itself, whose accept sees other tokens of the target from now on: `forced_tokens`."""
    accept = ops.accept

    def forced(step: ForwardBatch, state: StateTensors) -> None:
        step.target_tokens = forced_tokens(acceptance(step), step, state)
        accept(step, state)

    ops.accept = forced  # type: ignore[method-assign]
    return ops


def forced_tokens(counts: torch.Tensor, step: ForwardBatch, state: StateTensors) -> torch.Tensor:
    """What takes the place of `step.target_tokens` (int64 `[D]`), so that rows accept `counts` (int32 `[R]`) of their
    drafts: the drafts themselves, and then another token than the next draft."""
    rows, target_tokens = step.batch, step.target_tokens
    columns = torch.arange(state.k + 1, device=target_tokens.device)
    first = (step.starts + rows.num_new).long()
    positions = (first[:, None] + columns).clamp(min=0, max=state.max_len - 1)
    drafts = state.tokens[rows.req_idx.clamp(min=0).long()[:, None], positions]
    other = torch.where(drafts > 0, drafts - 1, drafts + 1)
    chosen = torch.where(columns < counts[:, None], drafts, other)
    # What no row verifies goes to an index behind the last.
    is_verified = (rows.logits_start[:, None] >= 0) & (columns <= rows.num_draft[:, None])
    indices = torch.where(is_verified, rows.logits_start[:, None].long() + columns, len(target_tokens))
    return torch.cat([target_tokens, target_tokens[-1:]]).scatter(0, indices.flatten(), chosen.flatten())[:-1]

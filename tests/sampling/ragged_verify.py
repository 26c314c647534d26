"""The oracle of the accept operations: greedy match and rejection sampling, in another form than theirs.

Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): draft token d from q is accepted
with probability min(1, p(d) / q(d)); the first rejected one is replaced by a draw from the residual max(p - q, 0),
normalised; if all are accepted, one more token is drawn from p. So the tokens have the distribution p, whatever q is
(LOSSLESS).

Rows are ragged: row r has `num_draft[r]` drafts and `num_draft[r] + 1` target distributions, the last of which follows
its last draft. All of them lie behind one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.sampling.filtering import draw
from dflash_backend.sampling.random import Stream, uniform
from dflash_kernels.accept import residual_reference


@dataclass(frozen=True)
class VerifyLayout:
    """Where the rows of a verification lie in flat tensors; host arrays and their copies on the device.

    starts: int64 `[num_rows]`, index of each row's first target distribution. num_draft: int64 `[num_rows]`.
    draft_rows, draft_columns: int64 `[total drafts]`, row of each draft and its place in the row, 0-based.
    draft_flat: int64 `[total drafts]`, index of the distribution that it is verified by.
    """

    starts: torch.Tensor
    num_draft: torch.Tensor
    draft_rows: torch.Tensor
    draft_columns: torch.Tensor
    draft_flat: torch.Tensor
    max_draft: int

    @classmethod
    def build(cls, num_draft: np.ndarray, device: torch.device) -> VerifyLayout:
        """From the number of drafts of each row, int64 `[num_rows]`."""
        sizes = num_draft + 1
        starts = np.cumsum(sizes) - sizes
        rows = np.repeat(np.arange(len(num_draft)), num_draft)
        first = np.cumsum(num_draft) - num_draft
        columns = np.arange(int(num_draft.sum())) - first[rows]

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        return cls(
            put(starts),
            put(num_draft),
            put(rows),
            put(columns),
            put(starts[rows] + columns),
            int(num_draft.max(initial=0)),
        )


def count_accepted(is_accepted: torch.Tensor, layout: VerifyLayout) -> torch.Tensor:
    """How many drafts of each row are accepted: those before its first rejected one.

    is_accepted: bool `[total drafts]`. Returns int64 `[num_rows]`.
    """
    table = torch.zeros(len(layout.starts), layout.max_draft, dtype=torch.int64, device=is_accepted.device)
    table[layout.draft_rows, layout.draft_columns] = is_accepted.to(torch.int64)
    return table.cumprod(dim=1).sum(dim=1)


def verify_greedy(
    argmax: torch.Tensor, drafts: torch.Tensor, layout: VerifyLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy verification.

    argmax: int64 `[total distributions]`, the target's most likely tokens. drafts: int64 `[total drafts]`.
    Returns the number accepted and the token that follows, both int64 `[num_rows]`.
    """
    accepted = count_accepted(drafts == argmax[layout.draft_flat], layout)
    return accepted, argmax[layout.starts + accepted]


def verify_sampled(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    layout: VerifyLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling.

    target_probs: float32 `[total distributions, vocab]`. draft_probs: float32 `[total drafts, vocab]`, what the drafts
    were drawn from, or None when they were the drafter's most likely tokens, in which case q is all on the draft.
    drafts: int64 `[total drafts]`. positions: int64 `[num_rows]`, position of the token that the first distribution of
    each row decides. seeds: int64 `[num_rows]`. Returns as `verify_greedy`.
    """
    draft_positions = positions[layout.draft_rows] + layout.draft_columns
    p = target_probs[layout.draft_flat, drafts]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, drafts[:, None]).squeeze(1)
    is_accepted = uniform(seeds[layout.draft_rows], draft_positions, Stream.ACCEPT) * q < p
    accepted = count_accepted(is_accepted, layout)
    weights = target_probs[layout.starts + accepted]
    weights = _residual(weights, draft_probs, drafts, accepted, layout)
    return accepted, draw(weights, seeds, positions + accepted, Stream.TARGET)


def _residual(
    weights: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    accepted: torch.Tensor,
    layout: VerifyLayout,
) -> torch.Tensor:
    """max(p - q, 0) for rows that had a draft rejected; p itself for the others. weights: p, `[num_rows, vocab]`."""
    rejected = (accepted < layout.num_draft).nonzero().squeeze(1)
    if len(rejected) == 0:
        return weights
    first_draft = layout.num_draft.cumsum(0) - layout.num_draft
    index = first_draft[rejected] + accepted[rejected]
    q = None if draft_probs is None else draft_probs[index]
    weights[rejected] = residual_reference(weights[rejected], q, drafts[index])
    return weights

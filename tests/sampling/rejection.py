"""The accept operation of a CPU on made-up distributions, without an engine."""

from __future__ import annotations

import torch

from dflash_backend.sampling.random import Stream
from dflash_kernels.accept import accept_reference


def accepted(
    num_draft: list[int],
    drafts: torch.Tensor,
    argmax: torch.Tensor,
    probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts of each row and the token that follows, both int64 `[num_rows]`.

    Row r has `num_draft[r]` drafts, the first for position 0, and seed r. drafts: int64 `[sum(num_draft)]`. argmax:
    int64 `[sum(num_draft + 1)]`, and probs alike with the vocabulary behind; None for greedy rows. draft_probs:
    `[sum(num_draft), vocab]`, or None for drafts that were not drawn.
    """
    num_rows, k = len(num_draft), max(num_draft)
    lens = torch.tensor(num_draft, dtype=torch.int32)
    is_draft = torch.arange(k) < lens[:, None]
    tokens = torch.zeros(num_rows, k + 1, dtype=torch.int64)
    tokens[:, :k][is_draft] = drafts
    kept = None
    if draft_probs is not None:
        kept = torch.zeros(num_rows, k, draft_probs.shape[1])
        kept[is_draft] = draft_probs
    zeros = torch.zeros(num_rows, dtype=torch.int32)
    first = ((lens + 1).cumsum(0) - lens - 1).int()
    count, new_tokens = accept_reference(
        argmax, probs, kept, tokens, zeros.clone(), torch.arange(num_rows), k,
        torch.arange(num_rows, dtype=torch.int32), zeros, zeros, lens, first, zeros + (probs is not None),
        Stream.ACCEPT, Stream.TARGET,
    )  # fmt: skip
    return count.long(), new_tokens.gather(1, count.long()[:, None]).squeeze(1)

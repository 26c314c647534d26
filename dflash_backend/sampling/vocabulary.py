"""Draft token ids in the target's vocabulary, for drafters that propose only the target's most frequent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class VocabularyMap:
    """ids: int64 `[draft_vocab]`, distinct, the target's id of each draft id. target_size: the target's vocabulary."""

    ids: torch.Tensor
    target_size: int

    def tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids, of the same shape."""
        return self.ids[draft_tokens]

    def probabilities(self, draft_probs: torch.Tensor) -> torch.Tensor:
        """`[m, draft_vocab]` -> `[m, target_size]`: 0 for a token that cannot be proposed, so that rejection sampling
        compares the very distribution that the draft was drawn from (LOSSLESS)."""
        return draft_probs.new_zeros(len(draft_probs), self.target_size).index_copy_(1, self.ids, draft_probs)

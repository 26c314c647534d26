"""Tokens that a request does not want, hidden in the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BadWords:
    """The bad words of a request, W of them, the longest of L tokens, int64 on the device.

    prefixes: `[W, L - 1]`, the tokens before each word's last one, at the end of its row, behind -1 where it has fewer.
    last: `[W]`, the last tokens, which are hidden behind the others. prefix_lens: `[W]`.
    """

    prefixes: torch.Tensor
    last: torch.Tensor
    prefix_lens: torch.Tensor

    @classmethod
    def of(cls, words: Sequence[Sequence[int]], device: torch.device) -> BadWords | None:
        """From token ids, at least one for each word; None without any word."""
        if not words:
            return None
        longest = max(map(len, words))
        prefixes = [[-1] * (longest - len(ids)) + list(ids[:-1]) for ids in words]
        return cls(
            torch.tensor(prefixes, dtype=torch.int64, device=device).view(len(words), longest - 1),
            torch.tensor([ids[-1] for ids in words], dtype=torch.int64, device=device),
            torch.tensor([len(ids) - 1 for ids in words], dtype=torch.int64, device=device),
        )

    def hide(self, logits: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor, num_prompt_tokens: int) -> None:
        """Hide, in place, the last token of each word whose other tokens end the output.

        logits: float32 `[n, vocab]`, for `position` (int64 `[]`) and those behind it. tokens: int64 `[max_len]`, the
        request's, with its drafts. So a row of logits counts the drafts before it. A prefix is looked for in the output
        only, as in vLLM.
        """
        width = self.prefixes.shape[1]
        ends = (position + torch.arange(len(logits), device=logits.device))[:, None]
        columns = ends - width + torch.arange(width, device=logits.device)
        before = tokens[columns.clamp(0, len(tokens) - 1)]
        matches = ((before[:, None] == self.prefixes) | (self.prefixes < 0)).all(dim=2)
        hidden = matches & (ends - self.prefix_lens >= num_prompt_tokens)
        bias = torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(hidden, float("-inf"))
        # Adds up where two words end with the same token.
        logits.index_add_(1, self.last, bias)


def hide_others(logits: torch.Tensor, allowed_ids: torch.Tensor) -> None:
    """Hide, in place, all tokens but those of `allowed_ids` (int64 `[n]`) in `logits` (`[n, vocab]`)."""
    kept = logits.index_select(1, allowed_ids)
    logits.fill_(float("-inf")).index_copy_(1, allowed_ids, kept)

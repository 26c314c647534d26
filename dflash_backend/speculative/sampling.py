"""From logits to probabilities and tokens: temperature, top-k, top-p, min-p, and drawing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.speculative.random import Stream
from dflash_kernels.draw import draw_reference


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters, one entry for each logits row `[n]`, all on the logits' device.

    temperature float32 (above 0); top_p, min_p float32; top_k int64 (0: all tokens); seeds int64. The flags say
    whether any row needs the step, so that the usual case skips the sort.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    any_top_k_or_p: bool
    any_min_p: bool

    def select(self, index: torch.Tensor) -> SamplingRows:
        """The rows `index` (int64), in that order, repeats allowed."""
        return SamplingRows(
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
            self.min_p[index],
            self.seeds[index],
            self.any_top_k_or_p,
            self.any_min_p,
        )


def probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The distribution that a request samples from: `[n, vocab]` logits -> float32 probabilities.

    The order is vLLM's: temperature, min-p, top-k, top-p; kept tokens are renormalised.
    """
    scaled = logits.float() / rows.temperature[:, None]
    if rows.any_min_p:
        probs = scaled.softmax(dim=-1)
        threshold = probs.amax(dim=-1, keepdim=True) * rows.min_p[:, None]
        scaled = scaled.masked_fill(probs < threshold, float("-inf"))
    if rows.any_top_k_or_p:
        scaled = _top_k_top_p(scaled, rows.top_k, rows.top_p)
    return scaled.softmax(dim=-1)


def _top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Hide all but the k most likely tokens, then all but the smallest set whose probability reaches p."""
    ordered, order = logits.sort(dim=-1, descending=True)
    vocab = logits.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocab)
    hidden = torch.arange(vocab, device=logits.device) >= limit[:, None]
    ordered = ordered.masked_fill(hidden, float("-inf"))
    before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0.0
    # A p of 1 keeps everything, whatever rounding does to the sum.
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p[:, None] < 1.0), float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def draw(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """One token for each row of non-negative, not necessarily normalised `weights` `[n, vocab]`, by its seed and
    position (int64 `[n]`): int64 `[n]`. See `dflash_kernels.draw`."""
    return draw_reference(weights, seeds, positions, stream)

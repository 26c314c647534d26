"""From logits to probabilities and tokens: temperature, top-k, top-p, min-p, and drawing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.sampling.random import Stream
from dflash_kernels.draw import draw_reference
from dflash_kernels.filtered_softmax import filtered_softmax_reference


@dataclass(frozen=True)
class SamplingTensors:
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


def probabilities(logits: torch.Tensor, parameters: SamplingTensors) -> torch.Tensor:
    """The distribution that a request samples from: `[n, vocab]` logits -> float32 probabilities. See
    `dflash_kernels.filtered_softmax`."""
    p = parameters
    return filtered_softmax_reference(logits, p.temperature, p.top_k, p.top_p, p.min_p, p.any_top_k_or_p, p.any_min_p)


def draw(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """One token for each row of non-negative, not necessarily normalised `weights` `[n, vocab]`, by its seed and
    position (int64 `[n]`): int64 `[n]`. See `dflash_kernels.draw`."""
    return draw_reference(weights, seeds, positions, stream)

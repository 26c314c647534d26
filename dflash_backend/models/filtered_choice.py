"""Tokens of rows with top-k, top-p or min-p, from a few of the largest logits of each slice of a vocabulary.

A filter keeps the tokens from some logit on. Where that logit is above all that a slice has left out, what is kept is
among what the slices gave, with all of its ties. Probabilities are rounded otherwise here than in `logits_filter`, so a
row is decided only where its sums are further from top-p than both roundings can be: then the token is the one that all
logits give. Other rows are said to be undecided.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_backend.models.interface import Choice, Filters
from dflash_kernels.gumbel_noise import gumbel_reference

NUM_CANDIDATES = 64
"""Logits of a row that a slice gives: filters keep fewer in most rows of most models."""
# How far a sum of probabilities may be from that of `logits_filter`, as a part of 1. Both add in float64, which in any
# order of n terms is n * 2^-53 off at most. Of a slice the terms are float32: subtracting the largest logit rounds a
# weight exp(-d) by d * 2^-24 of itself, on average over the weights by ln(n) * 2^-24 at most, and exp by a few 2^-24.
# Of 2^24 tokens that is (17 + 4) * 2^-24, or 1.3e-6.
ROUNDING = 2e-6


def largest_logits(logits: torch.Tensor, token_ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """What a slice gives of its `logits` `[n, width]`, float64 `[n, 1 + 2 * NUM_CANDIDATES]`: the logarithm of the sum
    of probabilities at the row's temperature over the largest one, -inf where all are 0, the largest logits, -inf where
    there are no more, and their ids."""
    values = logits.float()
    count = min(NUM_CANDIDATES, values.shape[1])
    top, columns = values.topk(count, dim=1)
    scaled = values / torch.where(temperature > 0.0, temperature, 1.0)[:, None]
    found = torch.full((len(values), 1 + 2 * NUM_CANDIDATES), float("-inf"), dtype=torch.float64)
    largest = scaled.amax(dim=1, keepdim=True)
    found[:, 0] = (scaled - largest.masked_fill(largest.isneginf(), 0.0)).exp_().sum(dim=1, dtype=torch.float64).log()
    found[:, 1 : 1 + count] = top
    found[:, 1 + NUM_CANDIDATES :] = -1
    found[:, 1 + NUM_CANDIDATES : 1 + NUM_CANDIDATES + count] = token_ids[columns]
    return found


def filtered_tokens(
    found: torch.Tensor, slices: Sequence[range], choice: Choice, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row, int64 `[n]`, and whether it is decided, bool `[n]`, from what `largest_logits` gave of
    each slice: float64 `[n, slices, columns]`. A row without a temperature gets its argmax."""
    assert choice.temperature is not None
    assert choice.seeds is not None
    assert choice.positions is not None
    n = len(found)
    values = found[:, :, 1 : 1 + NUM_CANDIDATES].float()
    ids = found[:, :, 1 + NUM_CANDIDATES :].long().view(n, -1)
    left_out = torch.tensor([len(own) > NUM_CANDIDATES for own in slices])
    # Tokens above it are all here; of those at it some may be missing.
    border = values[:, :, -1].masked_fill(~left_out, float("-inf")).amax(dim=1)
    sampled = choice.temperature > 0.0
    # As `logits_filter` divides, in float32: of large numbers a sum in another precision is another sum.
    divisor = torch.where(sampled, choice.temperature, 1.0)
    largest = values[:, :, 0] / divisor[:, None]
    total = (found[:, :, 0] + (largest.double() - largest.amax(dim=1, keepdim=True).double())).exp().sum(dim=1)
    values = values.view(n, -1)
    lowest, decided = _lowest_kept(values, border, total, slices[-1].stop, choice.temperature, filters)
    noise = gumbel_reference(choice.seeds, choice.positions, ids.clamp(min=0))
    scores = values / divisor[:, None]
    scores = torch.where(sampled[:, None], scores + noise, values)
    scores = scores.masked_fill((values < lowest[:, None]) | (ids < 0), float("-inf"))
    highest = scores.amax(dim=1, keepdim=True)
    is_largest = scores == highest
    tokens = ids.masked_fill(~is_largest, slices[-1].stop).amin(dim=1)
    is_number = ~values.isnan().any(dim=1)
    has_score = ~highest[:, 0].isneginf()
    return tokens, decided & is_number & has_score & ((lowest > border) | ~left_out.any())


def _lowest_kept(
    values: torch.Tensor,
    border: torch.Tensor,
    total: torch.Tensor,
    vocab_size: int,
    temperature: torch.Tensor,
    filters: Filters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit that each row keeps, as `logits_filter.lowest_kept_reference`, float32 `[n]`, and whether it is
    sure. total: the sum of all probabilities over the largest one, float64 `[n]`."""
    ordered = values.sort(dim=1, descending=True).values
    top, sampled = ordered[:, 0], temperature > 0.0
    # The argmax passes every filter.
    lowest = torch.where(sampled, float("-inf"), top)
    lowest = torch.where(sampled & (filters.min_p > 0.0), top + temperature * filters.min_p.log(), lowest)
    by_rank = sampled & (filters.top_k > 0) & (filters.top_k < vocab_size)
    kth = ordered.gather(1, filters.top_k.clamp(1, ordered.shape[1])[:, None] - 1)[:, 0]
    lowest = torch.where(by_rank, torch.maximum(lowest, kth), lowest)

    by_sum = sampled & (filters.top_p < 1.0)
    scaled = (ordered / torch.where(sampled, temperature, 1.0)[:, None]).double()
    is_kept = (ordered >= lowest[:, None]) & ~ordered.isneginf()
    weights = (scaled - scaled[:, :1]).exp().masked_fill(~is_kept, 0.0)
    is_filtered = ~lowest.isneginf()
    decided = ~by_sum | ~is_filtered | (lowest > border) | border.isneginf()
    above = (weights.cumsum(dim=1) - weights) / torch.where(is_filtered, weights.sum(dim=1), total)[:, None]
    above[:, 0] = -1.0
    top_p = filters.top_p.double()[:, None]
    is_close = ((above - top_p).abs() < ROUNDING) & is_kept
    # Infinite logits make all of these NaN, as in `logits_filter`: then top-p hides nothing.
    decided &= ~by_sum | ~is_close.any(dim=1)
    last = ordered.masked_fill((above >= top_p) | ~is_kept, float("inf")).amin(dim=1)
    return torch.where(by_sum, torch.maximum(lowest, last), lowest), decided

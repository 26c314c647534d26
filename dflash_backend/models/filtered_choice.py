"""Tokens of rows with top-k, top-p or min-p, from a few of the largest logits of each slice of a vocabulary.

A filter keeps the tokens from some logit on. Where that logit is above all that a slice has left out, what is kept is
among what the slices gave, with all of its ties. Sums of probabilities are rounded in another order here than in
`logits_filter`, so a row is decided only where its sums are further from top-p than both roundings can be: then the
token is the one that all logits give. Other rows are said to be undecided.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_backend.models.interface import Choice, Filters
from dflash_kernels.gumbel_noise import gumbel_reference

NUM_CANDIDATES = 64
"""Logits of a row that a slice gives: filters keep fewer in most rows of most models."""
# Of a sum of n float32 that is added in at least 8 lanes, with as much again for this one's; and of the exponents.
ROUNDING_OF_ONE, ROUNDING = 2.0**-24 / 4, 1e-6


def largest_logits(logits: torch.Tensor, token_ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """What a slice gives of its `logits` `[n, width]`, float64 `[n, 1 + 2 * NUM_CANDIDATES]`: the logarithm of the sum
    of exponents at the row's temperature, the largest logits, -inf where there are no more, and their ids."""
    values = logits.float()
    count = min(NUM_CANDIDATES, values.shape[1])
    top, columns = values.topk(count, dim=1)
    scaled = values / torch.where(temperature > 0.0, temperature, 1.0)[:, None]
    found = torch.full((len(values), 1 + 2 * NUM_CANDIDATES), float("-inf"), dtype=torch.float64)
    found[:, 0] = scaled.logsumexp(dim=1)
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
    values = values.view(n, -1)
    total = found[:, :, 0].logsumexp(dim=1)
    lowest, decided = _lowest_kept(values, border, total, slices[-1].stop, choice.temperature, filters)
    sampled = choice.temperature > 0.0
    noise = gumbel_reference(choice.seeds, choice.positions, ids.clamp(min=0))
    scores = values / torch.where(sampled, choice.temperature, 1.0)[:, None]
    scores = torch.where(sampled[:, None], scores + noise, values)
    scores = scores.masked_fill((values < lowest[:, None]) | (ids < 0), float("-inf"))
    is_largest = scores == scores.amax(dim=1, keepdim=True)
    tokens = ids.masked_fill(~is_largest, slices[-1].stop).amin(dim=1)
    is_number = ~values.isnan().any(dim=1)
    return tokens, decided & is_number & ((lowest > border) | ~left_out.any())


def _lowest_kept(
    values: torch.Tensor,
    border: torch.Tensor,
    total: torch.Tensor,
    vocab_size: int,
    temperature: torch.Tensor,
    filters: Filters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit that each row keeps, as `logits_filter.lowest_kept_reference`, float32 `[n]`, and whether it is
    sure. total: the logarithm of the sum of all exponents, float64 `[n]`."""
    ordered = values.sort(dim=1, descending=True).values
    top, sampled = ordered[:, 0], temperature > 0.0
    # The argmax passes every filter.
    lowest = torch.where(sampled, float("-inf"), top)
    lowest = torch.where(sampled & (filters.min_p > 0.0), top + temperature * filters.min_p.log(), lowest)
    by_rank = sampled & (filters.top_k > 0) & (filters.top_k < vocab_size)
    kth = ordered.gather(1, filters.top_k.clamp(1, ordered.shape[1])[:, None] - 1)[:, 0]
    lowest = torch.where(by_rank, torch.maximum(lowest, kth), lowest)

    by_sum = sampled & (filters.top_p < 1.0)
    exponents = ordered.double() / torch.where(sampled, temperature, 1.0).double()[:, None]
    exponents = exponents.masked_fill(ordered < lowest[:, None], float("-inf"))
    is_filtered = ~lowest.isneginf()
    decided = ~by_sum | ~is_filtered | (lowest > border) | border.isneginf()
    total = torch.where(is_filtered, exponents.logsumexp(dim=1), total)
    shares = (exponents - total[:, None]).exp()
    above = shares.cumsum(dim=1) - shares
    above[:, 0] = -1.0
    top_p = filters.top_p.double()[:, None]
    count = torch.where(by_rank, filters.top_k, vocab_size).double()
    rounding = (count * ROUNDING_OF_ONE + ROUNDING)[:, None]
    is_close = ((above - top_p).abs() < rounding) & ~exponents.isneginf()
    decided &= ~by_sum | ~is_close.any(dim=1)
    last = ordered.masked_fill((above >= top_p) | exponents.isneginf(), float("inf")).amin(dim=1)
    return torch.where(by_sum, torch.maximum(lowest, last), lowest), decided

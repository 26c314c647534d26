"""From logits to the tokens of sampled rows: what serves, beside the torch form, which sorts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.results import SamplingRun
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import graph_of, median_seconds
from dflash_kernels import logits_filter
from dflash_kernels import sample as sampling
from dflash_kernels.dispatch import use_triton

BATCHES = (1, 8, 32)
# A model's logits are bell-shaped with a few tokens far above: the spread, and how far these are.
SPREAD, NUM_LIKELY, LIKELY = 2.0, 50, 12.0
# What is asked for: top_k and top_p.
FILTERS = {"temperature alone": (0, 1.0), "top_k 20, top_p 0.95": (20, 0.95), "top_p 0.95": (0, 0.95)}


def measure(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[SamplingRun]:
    """The tokens of verify at each batch, the median over replays of one graph."""
    vocab = shape.target.vocab_size
    lowest_kept, sample = logits_filter.lowest_kept_reference, sampling.sample_reference
    if use_triton(device):
        lowest_kept, sample = logits_filter.lowest_kept, sampling.sample
    for batch in BATCHES:
        num_rows = batch * (1 + shape.num_speculative_tokens)
        logits = SPREAD * torch.randn(num_rows, vocab, device=device)
        logits[:, :NUM_LIKELY] += LIKELY * torch.rand(num_rows, min(NUM_LIKELY, vocab), device=device)
        logits = logits.to(dtype)
        temperature, all_p, none = (torch.full((num_rows,), value, device=device) for value in (0.6, 1.0, 0.0))
        seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        for name, (top_k, top_p) in FILTERS.items():
            filters = torch.full_like(seeds, top_k), all_p * top_p

            def by_searching(
                logits: torch.Tensor = logits,
                temperature: torch.Tensor = temperature,
                filters: tuple[torch.Tensor, torch.Tensor] = filters,
                min_p: torch.Tensor = none,
                seeds: torch.Tensor = seeds,
            ) -> torch.Tensor:
                lowest = lowest_kept(logits, temperature, *filters, min_p)
                return sample(logits, temperature, seeds, seeds, lowest)

            sorting = partial(by_sorting, logits, temperature, *filters)
            with torch.inference_mode():
                ours, theirs = (median_seconds(device, graph_of(device, each)) for each in (by_searching, sorting))
            yield SamplingRun(shape.name, name, num_rows, vocab, ours, theirs)


def by_sorting(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Tokens with torch's operations alone, by a sort of the vocabulary and random numbers that are not repeatable.
    Shapes as in `dflash_kernels.logits_filter`."""
    ordered, order = (logits.float() / temperature[:, None]).sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), float("-inf"))
    probs = ordered.softmax(dim=-1)
    probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p[:, None], 0.0)
    chosen = (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1, keepdim=True)
    return order.gather(1, chosen).squeeze(1)

"""From logits to the distribution that sampled rows choose from: what serves, beside the torch form, which sorts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.results import SamplingRun
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import graph_of, median_seconds
from dflash_backend.sampling.filtering import SamplingTensors
from dflash_backend.worker.step_ops import HostStepOps, select_step_ops

BATCHES = (1, 8, 32)
# A model's logits are bell-shaped with a few tokens far above: the spread, and how far these are.
SPREAD, NUM_LIKELY, LIKELY = 2.0, 50, 12.0
# What is asked for: top_k and top_p.
FILTERS = {"temperature alone": (0, 1.0), "top_k 20, top_p 0.95": (20, 0.95), "top_p 0.95": (0, 0.95)}


def measure(shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[SamplingRun]:
    """Verify's distributions at each batch, the median over replays of one graph."""
    vocab = shape.target.vocab_size
    for batch in BATCHES:
        num_rows = batch * (1 + shape.num_speculative_tokens)
        logits = SPREAD * torch.randn(num_rows, vocab, device=device)
        logits[:, :NUM_LIKELY] += LIKELY * torch.rand(num_rows, min(NUM_LIKELY, vocab), device=device)
        logits = logits.to(dtype)
        for name, (top_k, top_p) in FILTERS.items():
            rows = _parameters(num_rows, top_k, top_p, device)
            with torch.inference_mode():
                ours, sorting = (
                    median_seconds(device, graph_of(device, partial(ops.probabilities, logits, rows)))
                    for ops in (select_step_ops(device), HostStepOps())
                )
            yield SamplingRun(shape.name, name, num_rows, vocab, ours, sorting)


def _parameters(num_rows: int, top_k: int, top_p: float, device: torch.device) -> SamplingTensors:
    def of_each_row(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return SamplingTensors(
        temperature=of_each_row(0.6),
        top_p=of_each_row(top_p),
        top_k=of_each_row(top_k, torch.int64),
        min_p=of_each_row(0.0),
        seeds=of_each_row(0, torch.int64),
        any_top_k_or_p=top_k > 0 or top_p < 1.0,
        any_min_p=False,
    )

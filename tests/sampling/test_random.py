"""Random numbers are uniform, and a function of seed, position and stream alone."""

from __future__ import annotations

import torch
from scipy import stats

from dflash_backend.sampling.random import Stream, uniform


def test_numbers_do_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([5, 9, -3]), torch.tensor([0, 70, 12])
    together = uniform(seeds, positions, Stream.DRAFT)
    alone = [uniform(s[None], p[None], Stream.DRAFT).item() for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    index = torch.arange(50_000)
    for numbers in (
        uniform(torch.full_like(index, 11), index, Stream.TARGET),
        uniform(index, torch.full_like(index, 3), Stream.ACCEPT),
    ):
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > 0.01
        pairs = torch.stack([numbers[:-1], numbers[1:]])
        assert abs(pairs.corrcoef()[0, 1].item()) < 0.02


def test_streams_and_neighbouring_seeds_are_independent() -> None:
    index = torch.arange(50_000)
    columns = [uniform(torch.full_like(index, seed), index, stream) for stream in Stream for seed in (0, 1)]
    correlation = torch.stack(columns).corrcoef() - torch.eye(len(columns), dtype=torch.float64)
    assert correlation.abs().max().item() < 0.02


def test_numbers_stay_below_one() -> None:
    numbers = uniform(torch.arange(-1000, 1000), torch.full((2000,), 2**40), Stream.TARGET)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0

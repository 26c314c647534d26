"""Logits become the distribution that the parameters name, and draws follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats

from dflash_backend.sampling.filtering import SamplingTensors, draw, probabilities
from dflash_backend.sampling.random import Stream


def rows(n: int, **changes: Any) -> SamplingTensors:
    """The same parameters for `n` rows."""
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | changes
    return SamplingTensors(
        temperature=torch.full((n,), values["temperature"]),
        top_p=torch.full((n,), values["top_p"]),
        top_k=torch.full((n,), values["top_k"], dtype=torch.int64),
        min_p=torch.full((n,), values["min_p"]),
        seeds=torch.arange(n),
        any_top_k_or_p=values["top_p"] < 1.0 or values["top_k"] > 0,
        any_min_p=values["min_p"] > 0.0,
    )


LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.45}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_probabilities_follow_the_parameters(changes: dict[str, Any], expected: list[float]) -> None:
    torch.testing.assert_close(probabilities(LOGITS, rows(1, **changes)), torch.tensor([expected], dtype=torch.float32))


def test_rows_with_different_parameters_do_not_mix() -> None:
    parameters = rows(2, top_k=1)
    parameters.top_k[1] = 0
    result = probabilities(LOGITS.repeat(2, 1), parameters)
    torch.testing.assert_close(result, torch.tensor([[0, 1.0, 0, 0], [0.1, 0.4, 0.2, 0.3]]))


def test_draw_never_takes_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    seeds = torch.arange(1000)
    tokens = draw(weights.expand(1000, -1), seeds, seeds * 7, Stream.TARGET)
    assert set(tokens.tolist()) == {1, 3}


def test_draw_takes_unnormalised_weights() -> None:
    seeds = torch.arange(40_000)
    tokens = draw(torch.tensor([[2.0, 6.0]]).expand(40_000, -1), seeds, torch.zeros_like(seeds), Stream.TARGET)
    # Five standard deviations of the mean.
    assert tokens.float().mean().item() == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / 40_000) ** 0.5)


def test_drawn_tokens_have_the_distribution() -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(64, generator=generator).mul(2).exp()
    seeds = torch.arange(200_000)
    tokens = draw(weights.expand(len(seeds), -1), seeds, seeds % 97, Stream.DRAFT)
    expected = weights.double() / weights.double().sum() * len(seeds)
    counts = torch.bincount(tokens, minlength=64)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001


def test_rounding_seldom_changes_what_is_drawn() -> None:
    """A prefix hit computes the same logits in another order; LOSSLESS must not hang on the last bits."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(20_000, 256, generator=generator)
    noise = 4e-6 * torch.randn(20_000, 256, generator=generator)
    seeds = torch.arange(20_000)
    first, second = (draw(x.softmax(1), seeds, seeds, Stream.TARGET) for x in (logits, logits + noise))
    assert (first != second).sum().item() <= 2

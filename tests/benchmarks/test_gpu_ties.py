"""Outputs may part at a tie and nowhere else, and a tie is measured in roundings of bf16."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.gpu.ties import TIE_ROUNDINGS, Parting, describe, parting, spacing


@pytest.mark.parametrize("value", [1.0, 1.9, 2.0, 13.7, 0.3, -24.5])
def test_spacing_is_the_distance_to_the_next_bf16_number(value: float) -> None:
    number = torch.tensor(abs(value), dtype=torch.bfloat16)
    following = (number.view(torch.int16) + 1).view(torch.bfloat16)
    assert spacing(value) == (following.double() - number.double()).item()


def test_equal_outputs_do_not_part() -> None:
    assert parting(0, [1], [2, 3], [2, 3], lambda ids: []) is None


def test_outputs_part_at_their_first_difference_and_the_prefix_is_what_both_had() -> None:
    seen = []

    def logits(ids: object) -> list[float]:
        seen.append(ids)
        return [0.0, 10.0, 10.0 - 0.0625, 3.0]

    found = parting(5, [9, 9], [3, 1, 0, 0], [3, 2, 1, 1], logits)
    assert seen == [[9, 9, 3]]
    assert found == Parting(5, 1, (1, 2), 1.0)
    assert found.is_tie


WORSE = 10.0 - (TIE_ROUNDINGS + 1) * spacing(10.0)


@pytest.mark.parametrize(
    ("outputs", "logits"),
    [
        (([0], [1]), [10.0, WORSE]),
        # Two tokens that tie, both below the most likely one.
        (([1], [2]), [10.0, 5.0, 5.0]),
        # An output that ends early.
        (([1, 2], [1]), []),
    ],
)
def test_what_is_worse_by_more_than_rounding_is_no_tie(
    outputs: tuple[list[int], list[int]], logits: list[float]
) -> None:
    found = parting(0, [], *outputs, lambda ids: logits)
    assert found is not None
    assert not found.is_tie
    assert math.isfinite(found.roundings) == bool(logits)


def test_ties_are_counted_and_shown() -> None:
    text = describe([Parting(0, 1, (1, 2), 0.5), Parting(3, 1, (1, 2), 9.0)], 10)
    assert text == "8 of 10 outputs equal; 1 part at a tie, at most 0.50 bf16 roundings apart; 1 part otherwise"

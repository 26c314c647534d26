"""What the demo pair promises, measured through the engine by the functions of `benchmarks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.acceptance import held_out, measure, shifted_drafter
from benchmarks.prefix import measure_prefix
from benchmarks.workload import load_prompts
from dflash_backend import LLM
from dflash_backend.evaluation import Evaluation, Question

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return held_out(50)


@pytest.fixture(scope="module")
def found(questions: list[Question]) -> Evaluation:
    return measure(LLM(), questions)


def test_word_problems_are_answered_right(found: Evaluation) -> None:
    math = next(group for group in found.categories if group.name == "math")
    assert math.num_judged == 50
    assert math.accuracy is not None
    assert math.accuracy >= 0.9


def test_acceptance_length_is_at_least_5_of_16(found: Evaluation) -> None:
    counts = found.overall.counts
    assert counts.acceptance_length >= 5.0
    rates = list(counts.per_position_rates)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("offset", [-1, 1])
def test_features_of_the_wrong_layers_cost_acceptance(
    offset: int, tmp_path: Path, questions: list[Question], found: Evaluation
) -> None:
    """A layer index that is off by one still runs and stays lossless: only acceptance tells."""
    shifted = measure(LLM(draft=str(shifted_drafter(offset, tmp_path))), questions)
    assert shifted.overall.counts.acceptance_length <= 0.95 * found.overall.counts.acceptance_length
    texts = [[result.answers[0].text for result in one.results] for one in (found, shifted)]
    assert texts[0] == texts[1]


def test_a_prefix_hit_is_fast_and_accepts_as_much_as_a_miss() -> None:
    result = measure_prefix(load_prompts(150), repeats=8)
    assert result.outputs_equal
    assert result.first_token_ratio <= 0.2
    assert result.hit_acceptance_length == pytest.approx(result.miss_acceptance_length, rel=0.02)

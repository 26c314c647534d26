"""What the demo pair promises, measured through the engine by the functions of `benchmarks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prefix import measure_prefix
from benchmarks.worse_drafters import shifted_drafter
from checks.acceptance import ACCEPTANCE_LENGTH, held_out, measure, misses, misses_shifted
from checks.prefix import misses as prefix_misses
from dflash_backend import LLM
from dflash_backend.evaluation import Evaluation, Question
from load_tests.prompts import load_prompts
from tests.support.scale import SCALE, by_night

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return held_out(50)


@pytest.fixture(scope="module")
def found(questions: list[Question]) -> Evaluation:
    return measure(LLM(adaptive_speculation=False), questions)


def test_word_problems_are_answered_right(found: Evaluation) -> None:
    math = next(group for group in found.categories if group.name == "math")
    assert math.num_scored == 50
    assert math.accuracy is not None
    assert math.accuracy >= 0.9


def test_acceptance_keeps_its_bounds_overall_and_at_the_last_position(found: Evaluation) -> None:
    assert misses(found) == []
    assert found.overall.counts.acceptance_length == pytest.approx(ACCEPTANCE_LENGTH, rel=0.03)


@pytest.mark.parametrize("offset", [by_night(-1), 1])
def test_features_of_the_wrong_layers_cost_acceptance(
    offset: int, tmp_path: Path, questions: list[Question], found: Evaluation
) -> None:
    """A layer index that is off by one still runs and stays lossless: only acceptance tells."""
    asked = questions[:: 1 if SCALE >= 4 else 3]
    shifted = measure(LLM(draft=str(shifted_drafter(offset, tmp_path)), adaptive_speculation=False), asked)
    same = Evaluation(tuple(result for result in found.results if result.question in asked), found.seconds)
    assert misses_shifted(offset, same, shifted) == []
    assert misses(shifted) != [], "the bounds above can fail"


def test_a_prefix_hit_is_fast_and_accepts_as_much_as_a_miss() -> None:
    assert prefix_misses(measure_prefix(load_prompts(150), repeats=5)) == []

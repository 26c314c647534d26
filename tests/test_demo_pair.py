"""What the demo pair promises, measured through the engine by the functions of `benchmarks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.acceptance import answer_all, is_correct, overall, shifted_drafter
from benchmarks.prefix import measure_prefix
from benchmarks.workload import HeldOutPrompt, load_prompts
from dflash_backend import LLM
from dflash_backend.llm import RequestOutput

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts() -> list[HeldOutPrompt]:
    return load_prompts(150)


@pytest.fixture(scope="module")
def answers(prompts: list[HeldOutPrompt]) -> dict[str, list[RequestOutput]]:
    return answer_all(LLM(), prompts)


def test_word_problems_are_answered_right(
    prompts: list[HeldOutPrompt], answers: dict[str, list[RequestOutput]]
) -> None:
    math = [prompt for prompt in prompts if prompt.category == "math"]
    correct = sum(is_correct(output, prompt) for output, prompt in zip(answers["math"], math, strict=True))
    assert correct / len(math) >= 0.9


def test_acceptance_length_is_at_least_5_of_16(answers: dict[str, list[RequestOutput]]) -> None:
    total = overall(answers)
    assert total.length >= 5.0
    assert total.position_rates == sorted(total.position_rates, reverse=True)


@pytest.mark.parametrize("offset", [-1, 1])
def test_features_of_the_wrong_layers_cost_acceptance(
    offset: int, tmp_path: Path, prompts: list[HeldOutPrompt], answers: dict[str, list[RequestOutput]]
) -> None:
    """A layer index that is off by one still runs and stays lossless: only acceptance tells."""
    shifted = answer_all(LLM(draft=str(shifted_drafter(offset, tmp_path))), prompts)
    assert overall(shifted).length <= 0.95 * overall(answers).length
    for category, outputs in shifted.items():
        assert [output.token_ids for output in outputs] == [output.token_ids for output in answers[category]]


def test_a_prefix_hit_is_fast_and_accepts_as_much_as_a_miss(prompts: list[HeldOutPrompt]) -> None:
    result = measure_prefix(prompts, repeats=8)
    assert result.outputs_equal
    assert result.first_token_ratio <= 0.2
    assert result.hit_acceptance_length == pytest.approx(result.miss_acceptance_length, rel=0.02)

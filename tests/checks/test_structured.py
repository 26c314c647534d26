"""`checks.structured` with smaller numbers, and what it takes for a misfit."""

from __future__ import annotations

import pytest

from checks.structured import GRAMMARS, LEAST_P, SCHEMAS, TARGET_ALONE, WAYS, answers, fit, misfit, requests
from tests.support.scale import scaled


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(TARGET_ALONE, *requests(len(GRAMMARS)))[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_sampled_answers_follow_their_grammars_and_are_the_targets_own(way, expected: list[list[int]]) -> None:
    prompts, sampling = requests(len(GRAMMARS))
    texts, tokens, _ = answers(way, prompts, sampling)
    misfits = [misfit(one["structured_outputs"], text) for one, text in zip(sampling, texts, strict=True)]
    assert misfits == [None] * len(texts)
    assert tokens == expected


@pytest.mark.slow
def test_sampled_answers_have_the_targets_distribution_among_what_is_allowed() -> None:
    assert fit(scaled(500), seed=1) > LEAST_P


@pytest.mark.parametrize(
    ("number", "text", "fits"),
    [
        (0, '{"name":"x","age":5}', True),
        (0, '{"name":"x","age":5', False),
        (0, '{"name":"x"}', False),
        (0, '{"name":"x","age":5,"more":1}', False),
        (0, '{"name":"xxxxxxxxxxx","age":5}', False),
        (2, '{"kind":7,"size":1.5}', True),
        (2, '{"kind":8,"size":1.5}', False),
        (3, "[1, 2]", True),
        (3, "[]", False),
        (5, '{"value": 5}', True),
        (5, '{"other": 5}', False),
        (6, '{"id":"AB-123","next":null}', True),
        (6, '{"id":"AB-12","next":null}', False),
        (8, '{"n":1,"l":null}', True),
    ],
)
def test_a_text_that_leaves_its_schema_is_a_misfit(number: int, text: str, fits: bool) -> None:
    assert (misfit({"json": SCHEMAS[number]}, text) is None) == fits
    assert misfit({"regex": "a+"}, text) is not None

"""The ideal hit rate against a model that keeps every prefix that was ever computed."""

from __future__ import annotations

from random import Random

import pytest

from load_tests.expected_answers import ExpectedAnswer
from load_tests.hit_rate import ideal_hits

BLOCK = 4


def answer(prompt: list[int], output: list[int]) -> ExpectedAnswer:
    return ExpectedAnswer("", tuple(prompt), tuple(output), "", "length")


def brute_force(asked: list[tuple[str, str]], answers: dict[str, ExpectedAnswer]) -> tuple[int, int]:
    """(queries, hits), from the set of all prefixes that end with a block."""
    computed: set[tuple[str, tuple[int, ...]]] = set()
    queries = hits = 0
    for question, salt in asked:
        prompt, whole = answers[question].prompt_ids, answers[question].prompt_ids + answers[question].token_ids
        queries += len(prompt)
        ends = [end for end in range(BLOCK, len(prompt), BLOCK) if (salt, prompt[:end]) in computed]
        hits += max(ends, default=0)
        computed |= {(salt, whole[:end]) for end in range(BLOCK, len(whole), BLOCK)}
    return queries, hits


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_a_model_that_keeps_every_prefix(seed: int) -> None:
    rng = Random(seed)
    stems = [[rng.randrange(3) for _ in range(rng.randrange(20))] for _ in range(4)]
    answers = {
        str(index): answer(
            rng.choice(stems) + [rng.randrange(3) for _ in range(rng.randrange(1, 12))],
            [rng.randrange(3) for _ in range(rng.randrange(1, 12))],
        )
        for index in range(12)
    }
    asked = [(rng.choice(list(answers)), rng.choice(["", "a"])) for _ in range(60)]
    ideal = ideal_hits(asked, answers, BLOCK)
    assert (ideal.queries, ideal.hits) == brute_force(asked, answers)


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    answers = {"a": answer([1] * 2 * BLOCK, [2])}
    assert ideal_hits([("a", ""), ("a", "")], answers, BLOCK).hits == BLOCK


def test_salts_share_nothing() -> None:
    answers = {"a": answer([1] * 9, [2])}
    assert ideal_hits([("a", "x"), ("a", "y")], answers, BLOCK).hits == 0


def test_answers_are_found_by_those_who_go_on_from_them() -> None:
    answers = {"first": answer([1] * 4, [2] * 5), "next": answer([1] * 4 + [2] * 5 + [3], [4])}
    assert ideal_hits([("first", ""), ("next", "")], answers, BLOCK).hits == 8


def test_a_small_pool_evicts_what_was_used_longest_ago() -> None:
    answers = {name: answer([number] * 9, [9]) for number, name in enumerate("abc")}
    asked = [(name, "") for name in "abcabc"]
    assert ideal_hits(asked, answers, BLOCK).hits == 24
    assert ideal_hits(asked, answers, BLOCK, capacity=4).hits == 0
    assert ideal_hits(asked, answers, BLOCK, capacity=6).hits == 24


def test_nothing_asked_is_no_hit_rate() -> None:
    assert ideal_hits([], {}, BLOCK).rate == 0.0

"""Where nothing runs beside the target, masks are filled only for rows whose tokens the grammar does not allow."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import pytest

from dflash_backend.core.plan import SchedulerOutput, StepFailed
from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.matcher import GrammarMatcher, MatcherRules
from dflash_backend.worker.grammars import STEPS_WITH_MASKS, Filled
from tests.support.scale import by_night
from tests.worker.engines import Outputs, engine

EOS = (2,)
LETTERS = StructuredOutputs("regex", "[a-z]{3,9}(-[0-9]{2}){1,3}")
ANYTHING = StructuredOutputs("regex", "(.|\n)*")
PROMPT = list(range(20, 60))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 3},
    "top_p": {"temperature": 1.0, "seed": 3, "top_p": 0.8},
    "top_k": {"temperature": 1.0, "seed": 3, "top_k": 4},
    "min_p": {"temperature": 1.0, "seed": 3, "min_p": 0.05},
    "min_tokens": {"temperature": 0.0, "min_tokens": 9},
    "ignore_eos": {"temperature": 0.0, "ignore_eos": True},
}
CHECKED = {"greedy", "sampled"}
GRAMMARS = {"letters": LETTERS, "anything": ANYTHING}
# What is checked with both grammars, and each other way with one.
BY_DAY = {
    *itertools.product(GRAMMARS, CHECKED),
    ("letters", "top_p"),
    ("letters", "min_tokens"),
    ("letters", "ignore_eos"),
    ("anything", "top_k"),
    ("anything", "min_p"),
}


def run(grammar: StructuredOutputs, checks: bool, **sampling: Any) -> tuple[Outputs, list[int]]:
    """The outputs of three requests alike but for their prompts, and how many answers had their masks filled, for each
    step in which any had."""
    built = engine(kv_cache_gb=0.2, max_num_seqs=4)
    states = built.runner.grammars
    states.checks = checks
    fill, filled = states.fill, list[int]()

    def counted(answers: list[tuple[GrammarMatcher, list[int]]]) -> Future[Filled]:
        filled.append(len(answers))
        return fill(answers)

    states.fill = counted  # type: ignore[method-assign]
    outputs = Outputs(built)
    for i in range(3):
        outputs.add(str(i), PROMPT[i:], eos_token_ids=EOS, max_tokens=16, structured_outputs=grammar, **sampling)
    outputs.finish()
    assert outputs.failed == []
    return outputs, filled


@pytest.mark.parametrize(
    ("name", "way"), [each if each in BY_DAY else by_night(*each) for each in itertools.product(GRAMMARS, WAYS)]
)
def test_the_text_is_the_same_with_checks_and_with_masks(name: str, way: str) -> None:
    grammar = GRAMMARS[name]
    checked, few = run(grammar, True, **WAYS[way])
    masked, all_of_them = run(grammar, False, **WAYS[way])
    assert checked.tokens == masked.tokens
    assert checked.reasons == masked.reasons
    if way in CHECKED and grammar is ANYTHING:
        assert few == []
    assert all_of_them
    # Grammars are compiled beside the engine, so requests may join it one by one: steps differ then, rows do not.
    assert way in CHECKED or sum(few) == sum(all_of_them)


def test_a_row_whose_token_was_not_allowed_has_masks_for_some_steps() -> None:
    outputs, filled = run(LETTERS, True, temperature=0.0, k=0)
    num_steps = max(map(len, outputs.tokens.values()))
    # Each token of this target is one that the grammar does not allow: checked once, then every fifth time.
    assert sum(filled) == sum(map(len, outputs.tokens.values()))
    assert num_steps <= len(filled) <= 2 * num_steps
    assert STEPS_WITH_MASKS > 1


def test_what_follows_the_end_of_an_answer_is_not_looked_at() -> None:
    built = engine(kv_cache_gb=0.2, max_num_seqs=1)
    compiler = built.runner.grammars._compiler
    assert compiler is not None
    compiled = compiler.compile(StructuredOutputs("choice", '["a","b"]'), EOS)

    def matcher() -> GrammarMatcher:
        return compiled.matcher(MatcherRules())

    token = next(token for token in range(1500) if matcher().legal_drafts([token])[0] == 1)
    assert matcher().allows([token, EOS[0], 77])
    assert matcher().allows([token])
    assert not matcher().allows([EOS[0]])
    assert not matcher().allows([77, EOS[0]])
    ended = matcher()
    ended.advance([token, EOS[0]])
    assert ended.allows([77])


def test_the_grammar_of_a_request_that_failed_is_not_that_of_its_ids_next_user(monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine(kv_cache_gb=0.2, max_num_seqs=2)
    plain: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    outputs, submit = Outputs(built), built.runner.submit
    outputs.add("before", **plain)
    expected = outputs.finish()["before"]

    def failing(plan: SchedulerOutput) -> None:
        submit(plan)
        built.runner._in_flight.pop()
        raise StepFailed("TypeError: something about a row")

    with monkeypatch.context() as broken:
        broken.setattr(built.runner, "submit", failing)
        outputs.add("again", **plain, eos_token_ids=EOS, structured_outputs=LETTERS)
        outputs.finish()
    (failed,) = outputs.failed
    assert "a step with this request failed" in failed.message
    assert built.runner.grammars.answers == {}
    outputs.add("again", **plain)
    assert outputs.finish()["again"] == expected

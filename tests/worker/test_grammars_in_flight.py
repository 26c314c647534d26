"""Requests with a grammar on the steps of a GPU: the forward of a step begins before the result of the one before is
there, and the text is what it is without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dflash_backend.core.plan import NewRequest
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.messages import SamplingParams, StructuredOutputs
from dflash_backend.structured_output import bounds
from dflash_backend.worker.grammars import GrammarAnswer, StepGrammars
from tests.worker.engines import Outputs, engine, on_device_runner

pytestmark = pytest.mark.slow

GRAMMARS = [
    StructuredOutputs("regex", "[a-z]{3,9}(-[0-9]{2}){1,3}"),
    StructuredOutputs("choice", '["yes","no","it depends on the day"]'),
    None,
    StructuredOutputs("json", '{"type":"array","items":{"type":"string","maxLength":8},"minItems":1,"maxItems":2}'),
]
EOS = (2,)
COUNT = 4
SIZES = {"kv_cache_gb": 0.2, "max_model_len": 128}


def run(built: BuiltEngine) -> Outputs:
    outputs = Outputs(built)
    for i in range(COUNT):
        outputs.add(
            str(i),
            list(range(20 + i, 60 + 3 * i)),
            eos_token_ids=EOS,
            max_tokens=16,
            temperature=(0.0, 1.0)[i % 2],
            seed=i,
            structured_outputs=GRAMMARS[i % len(GRAMMARS)],
        )
    outputs.finish()
    assert outputs.failed == []
    return outputs


@pytest.fixture(scope="module")
def expected() -> Outputs:
    return run(engine(**SIZES, max_num_seqs=3))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_text_is_the_same_with_steps_in_flight(expected: Outputs, overlap: bool) -> None:
    built = on_device_runner(engine(**SIZES, max_num_seqs=3), overlap=overlap)
    waiting = []
    finish = built.runner._resume_masked_step
    built.runner._resume_masked_step = lambda step: (  # type: ignore[method-assign]
        waiting.extend(part for part in step.parts if part.waits),
        finish(step),
    )[1]
    found = run(built)
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons
    assert bool(waiting) == overlap


def test_errors_behind_the_forward_of_steps_that_waited_are_contained(
    expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the masks of a step are asked for: all requests yield what they yield otherwise."""
    built = on_device_runner(engine(**SIZES, max_num_seqs=3))
    masks, calls, preempted = StepGrammars.masks, itertools.count(1), []

    def breaking(self: StepGrammars) -> Any:
        number = next(calls) if self.waits and len(self.answers) > 1 else 0
        if number in (2, 4):
            preempted.append(built.core.stats().num_preemptions)
            raise ValueError("bits") if number == 2 else torch.OutOfMemoryError("full")
        return masks(self)

    monkeypatch.setattr(StepGrammars, "masks", breaking)
    found = run(built)
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons
    assert preempted == [0, 0], "a step that fails is run again, and takes no blocks for others"
    assert built.core.stats().num_preemptions > 0, "less is run at a time where memory lacks"


def test_no_row_sits_a_step_out_for_its_grammar() -> None:
    built = on_device_runner(engine(**SIZES, max_num_seqs=1))
    outputs = Outputs(built)
    outputs.add("a", list(range(20, 60)), eos_token_ids=EOS, max_tokens=12, structured_outputs=GRAMMARS[0], k=0)
    rows = []
    submit = built.runner.submit
    built.runner.submit = lambda plan: (rows.append(len(plan.rows)), submit(plan))[1]  # type: ignore[method-assign]
    outputs.finish()
    assert min(rows) == 1
    assert len(rows) <= len(outputs.tokens["a"]) + 2


def test_an_answer_that_is_aborted_and_its_id_used_again_does_not_meet_the_old_one() -> None:
    built = on_device_runner(engine(**SIZES, max_num_seqs=2))
    outputs = Outputs(built)
    prompt = list(range(20, 60))
    outputs.add("a", prompt, eos_token_ids=EOS, max_tokens=30, structured_outputs=GRAMMARS[0])
    for _ in range(4):
        outputs.step()
    built.core.abort(["a"])
    outputs.add("a", prompt, eos_token_ids=EOS, max_tokens=30, structured_outputs=GRAMMARS[1], temperature=0)
    outputs.finish()
    assert outputs.failed == []
    assert outputs.reasons["a"] == "stop"


def test_a_request_that_is_resumed_goes_on_in_its_grammar() -> None:
    states = engine(**SIZES, max_num_seqs=3).runner.grammars
    sampling = SamplingParams(structured_outputs=GRAMMARS[1])

    def answer(*generated: int) -> GrammarAnswer:
        return states._answer(NewRequest("r", [5, 6, *generated], 2, sampling, EOS, 0))

    def mask(of: GrammarAnswer) -> list[int]:
        assert of.matcher is not None
        masks, _, _ = states.fill([(of.matcher, [])]).result()
        return [word * 32 + bit for word, bits in enumerate(masks[0].tolist()) for bit in range(32) if bits >> bit & 1]

    begun = answer()
    first = mask(begun)
    begun.advance([first[0]])
    assert mask(answer(first[0])) == mask(begun) != first


def test_a_grammar_that_fails_within_an_answer_is_its_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mask is a letter's; the next one takes more fuel than there is."""
    monkeypatch.setattr(bounds, "MASK_FUEL", 1000)
    outputs = Outputs(engine(**SIZES, max_num_seqs=4))
    grammar = StructuredOutputs("regex", "x" + "[ab]?" * 90)
    outputs.add(
        "late", list(range(20, 60)), eos_token_ids=(2,), max_tokens=16, temperature=0.0, structured_outputs=grammar
    )
    outputs.add("plain", list(range(20, 60)), eos_token_ids=(2,), max_tokens=16, temperature=0.0)
    outputs.finish()
    (failed,) = outputs.failed
    assert (failed.request_id, failed.status) == ("late", "INVALID_ARGUMENT")
    assert "the grammar of its structured output cannot be followed any further" in failed.message
    assert len(outputs.tokens["plain"]) > 0

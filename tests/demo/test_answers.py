"""What the demo pair answers to held-out questions of each kind, through the engine: right, and in few steps."""

from __future__ import annotations

import json

import pytest

from dflash_backend import LLM
from load_tests.prompts import held_out_dir
from tests.support.scale import by_night, scaled

pytestmark = pytest.mark.slow

NUM_QUESTIONS = scaled(30, at_least=30)
# Of held-out questions: the share that is answered as the reference does, and the tokens that a step yields.
LEAST_RIGHT = {"talk": 0.8, "copy": 0.7, "tools": 0.7}
LEAST_ACCEPTANCE_LENGTH = {"talk": 4.5, "copy": 3.5, "tools": 6.0}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=16, max_model_len=2048, adaptive_speculation=False)


@pytest.mark.parametrize("category", ["tools", by_night("talk"), by_night("copy")])
def test_most_held_out_questions_are_answered_as_the_reference_does(category: str, llm: LLM) -> None:
    lines = (held_out_dir() / f"{category}.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]
    rows = [json.loads(line) for line in lines]
    outputs = llm.generate([row["prompt"] for row in rows], max_tokens=220, temperature=0)
    right = [output.text == row["reference"] for output, row in zip(outputs, rows, strict=True)]
    assert sum(right) / len(right) >= LEAST_RIGHT[category]
    counts = [output.stats.spec_decoding for output in outputs if output.stats is not None]
    drafts, accepted = sum(one.num_drafts for one in counts), sum(one.num_accepted_tokens for one in counts)
    assert 1 + accepted / drafts >= LEAST_ACCEPTANCE_LENGTH[category]


def test_a_copied_answer_is_a_part_of_its_prompt(llm: LLM) -> None:
    text = "The sailor follows every golden fox, and the gleatstam jumps over 17 lamps in Geneva."
    answer = llm.chat([{"role": "user", "content": f"Repeat: {text}"}], max_tokens=96, temperature=0).text
    assert answer == text


@pytest.mark.nightly
def test_sampled_answers_to_an_open_question_differ(llm: LLM) -> None:
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Tell me something"}])
    outputs = llm.generate([prompt] * 40, [{"max_tokens": 24, "temperature": 0.7, "seed": i} for i in range(40)])
    assert len({output.text for output in outputs}) >= 30

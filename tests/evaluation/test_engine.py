"""Answers from the engine in this process: conversations are rendered as the server would, thinking off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.evaluation import EvaluationError, ModelRequest, Question, Sampling, evaluate
from dflash_backend.evaluation.datasets import Source, load_questions
from dflash_backend.evaluation.engine import EngineAnswerer, encode
from dflash_backend.text.tokenizer import Tokenizer
from load_tests.prompts import load_prompts


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=512, max_num_seqs=8, adaptive_speculation=False)


def test_an_embedded_conversation_is_the_prompt_that_the_demo_pair_was_trained_on(llm: LLM) -> None:
    (question,) = load_questions([Source("math")], 1)
    prompt = load_prompts(1, ("math",))[0].prompt
    request = ModelRequest("q", None, question.messages, {})
    assert encode(llm.tokenizer, request) == llm.tokenizer.encode(prompt)


def test_counts_are_those_of_the_engine(llm: LLM) -> None:
    before = llm.stats().spec_decoding
    questions = load_questions([Source("math"), Source("chat")], 3)
    found = evaluate(EngineAnswerer(llm), questions, Sampling())
    assert found.overall.counts == llm.stats().spec_decoding - before
    assert found.overall.counts.num_drafts > 0


def test_a_second_turn_sees_the_first_answer(llm: LLM) -> None:
    first = "What are the capitals of Norway, Hungary, Portugal and Japan?"
    question = Question("q", "own", "own", messages=({"role": "user", "content": first},), follow_ups=(first,))
    (result,) = evaluate(EngineAnswerer(llm), [question], Sampling(max_tokens=64)).results
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": result.answers[0].text},
        {"role": "user", "content": first},
    ]
    assert result.answers[1].text == llm.chat(messages, max_tokens=64, temperature=0).text


def test_a_prompt_that_does_not_fit_is_named(llm: LLM) -> None:
    question = Question("long-one", "own", "own", prompt="marbles " * 600)
    with pytest.raises(EvaluationError, match=r"long-one: the prompt has \d+ tokens; this model takes 1 to 511"):
        evaluate(EngineAnswerer(llm), [question], Sampling())


def tokenizer_with(template: str | None, folder: Path) -> Tokenizer:
    """The demo target's, with another chat template or without any."""
    shutil.copytree(asset_path("demo", "pair", "target"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return Tokenizer.load(folder)


def test_thinking_is_off_where_the_template_knows_it(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}{% if enable_thinking is false %} plainly{% endif %}"
    tokenizer = tokenizer_with(template, tmp_path / "target")
    request = ModelRequest("q", None, ({"role": "user", "content": "Say it"},), {})
    assert tokenizer.decode(encode(tokenizer, request)) == "Say it plainly"
    assert tokenizer.decode(encode(tokenizer, request, {})) == "Say it"
    with pytest.raises(EvaluationError, match="has the name 'tokenize'"):
        encode(tokenizer, request, {"tokenize": True})


def test_a_tokenizer_without_a_template_is_a_sentence(tmp_path: Path) -> None:
    request = ModelRequest("q-7", None, ({"role": "user", "content": "x"},), {})
    with pytest.raises(EvaluationError, match="q-7: the target's tokenizer has no chat template"):
        encode(tokenizer_with(None, tmp_path / "target"), request)

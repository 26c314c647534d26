"""Requests with a grammar, through the whole engine: every answer fits, and LOSSLESS holds with a grammar too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from checks.core_state import check_core
from checks.lossless import TINY_POOL_BLOCKS, pool_of
from dflash_backend import LLM
from dflash_backend.core.admission import RequestError

PROMPT = (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello! How can I help you?<|im_end|>\n"
    "<|im_start|>user\nTell me something<|im_end|>\n<|im_start|>assistant\n"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = "[a-z]{3,9}(-[0-9]{2}){1,2}"
FORMATS = [{"json": SCHEMA}, {"regex": REGEX}, {"choice": ["yes", "no", "it depends"]}]
TARGET_ALONE = {"draft": "", "enable_prefix_caching": False}
WAYS = {
    "drafts": {},
    "always all of k": {"adaptive_speculation": False},
    "k = 2": {"num_speculative_tokens": 2, "adaptive_speculation": False},
    "n-grams": {"draft": "ngram", "adaptive_speculation": False},
    "after preemptions": {"kv_cache_gb": pool_of(TINY_POOL_BLOCKS // 2), "enable_prefix_caching": False},
    "alone": {"max_num_seqs": 1},
}


def asked(count: int) -> list[dict]:
    return [
        {
            "max_tokens": 60,
            "ignore_eos": i % 4 == 0,
            "temperature": (0.0, 1.0, 0.7)[i % 3],
            "seed": i,
            "top_p": 0.95,
            "structured_outputs": FORMATS[i % len(FORMATS)] if i % 4 else None,
        }
        for i in range(count)
    ]


def answers(settings: dict, times: int = 1, count: int = 12) -> tuple[list[list[int]], LLM]:
    llm = LLM(**{"max_num_seqs": 8, "kv_cache_gb": 0.2, "kv_write_guard": True} | settings)
    outputs = []
    for _ in range(times):
        outputs = llm.generate([PROMPT + "A" * (i % 5) for i in range(count)], asked(count))
    check_core(llm.engine.core)
    return [output.token_ids for output in outputs], llm


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(TARGET_ALONE)[0]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_gives_the_text_of_the_target_alone(way, expected):
    found, llm = answers(WAYS[way])
    assert found == expected
    stats = llm.stats()
    assert stats.grammars.num_requests == 9
    assert (stats.num_preemptions > 0) == (way == "after preemptions")
    assert (stats.spec_decoding.num_drafts > 0) or way in ("drafts", "after preemptions", "alone")


def test_prefix_hits_do_not_change_the_text(expected):
    found, llm = answers({}, times=2)
    assert found == expected
    assert llm.stats().prefix_cache_hits > 0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    return LLM(max_num_seqs=8, kv_cache_gb=0.2, kv_write_guard=True, adaptive_speculation=False)


def generate(llm: LLM, **sampling):
    return llm.generate(PROMPT, **{"max_tokens": 300, "temperature": 1.0, "seed": 3} | sampling)[0]


def test_an_answer_fits_its_grammar_and_ends_with_it(llm):
    for seed in range(2):
        output = generate(llm, structured_outputs={"json": SCHEMA}, seed=seed)
        assert output.finish_reason == "stop"
        value = json.loads(output.text)
        assert list(value) == ["name", "age", "tags"]
        assert value["age"] <= 130
        assert re.fullmatch(REGEX, generate(llm, structured_outputs={"regex": REGEX}, seed=seed).text)


def test_drafts_that_the_grammar_does_not_allow_are_not_verified(llm):
    """Of a text that the grammar forces, every draft that is verified is accepted: it is the grammar's own."""
    output = generate(llm, structured_outputs={"regex": "forty-two, as everyone knows"}, temperature=0.0)
    drafts = output.stats.spec_decoding
    assert output.text == "forty-two, as everyone knows"
    assert drafts.num_draft_tokens == drafts.num_accepted_tokens > 0


def test_a_row_verifies_no_more_drafts_than_the_grammar_allows():
    """Where nothing is forced, what the drafter proposes is cut at the first token that is not allowed."""
    llm = LLM(kv_cache_gb=0.2, adaptive_speculation=False)
    runner = llm.engine.runner
    submit, verified, cut = runner.submit, 0, 0

    def watch(plan):
        nonlocal verified, cut
        for row in plan.rows:
            answer = runner.grammars.answers.get(row.request_id)
            if answer is not None and not plan.new_requests:
                assert row.num_draft <= len(answer.drafts)
                verified += row.num_draft
                cut += len(answer.drafts) < llm.engine.ready.num_speculative_tokens
        submit(plan)

    runner.submit = watch
    generate(llm, structured_outputs={"regex": "[a-z ]{60}"}, temperature=0.0)
    assert verified > 0
    assert cut > 0


def test_each_completion_of_n_follows_the_grammar_by_itself(llm):
    output = generate(llm, structured_outputs={"regex": REGEX}, n=4)
    texts = [one.text for one in output.outputs]
    assert all(re.fullmatch(REGEX, text) for text in texts)
    assert len(set(texts)) > 1


def test_log_probabilities_are_those_of_the_model_without_the_grammar(llm):
    output = generate(llm, structured_outputs={"choice": ["yes"]}, logprobs=1, temperature=0)
    assert output.text == "yes"
    assert len(output.logprobs) == len(output.token_ids)
    first = output.logprobs[0]
    assert first.token_ids[0] == output.token_ids[0]
    assert first.ranks[0] > 1
    assert first.logprobs[1] > first.logprobs[0]


def test_bias_and_penalties_choose_among_what_the_grammar_allows(llm):
    no = llm.tokenizer.encode("n")[0]
    biased = generate(llm, structured_outputs={"regex": "[nm]{4}"}, logit_bias={no: -100}, temperature=0)
    assert biased.text == "mmmm"
    penalised = generate(llm, structured_outputs={"regex": "[nm]{4}"}, presence_penalty=2.0, frequency_penalty=2.0)
    assert re.fullmatch("[nm]{4}", penalised.text)


def test_min_tokens_and_ignore_eos_keep_to_the_grammar(llm):
    assert len(generate(llm, structured_outputs={"regex": "a{1,9}"}, min_tokens=5).text) >= 4
    full = generate(llm, structured_outputs={"regex": "[ab]{1,9}"}, ignore_eos=True)
    assert len(full.text) == 9
    assert full.finish_reason == "stop"
    short = generate(llm, structured_outputs={"regex": "ab"}, min_tokens=20)
    assert (short.text, short.finish_reason) == ("ab", "stop")


def test_a_stop_string_and_max_tokens_may_end_it_early(llm):
    stopped = generate(llm, structured_outputs={"regex": "[a-f]{20}"}, stop=["a", "b", "c", "d", "e", "f"])
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    assert generate(llm, structured_outputs={"regex": "[a-f]{90}"}, max_tokens=4).finish_reason == "length"


def test_a_response_format_works_as_well(llm):
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    named = generate(llm, structured_outputs={"json": SCHEMA})
    assert generate(llm, response_format=described).text == named.text


def test_the_grammar_begins_behind_the_reasoning(llm):
    marker = llm.tokenizer.encode("\n")
    output = generate(
        llm,
        temperature=0,
        structured_outputs={"regex": "[0-9]{2} done", "after_reasoning": marker},
        logit_bias={marker[0]: 5},
    )
    reasoning, _, answer = output.text.partition("\n")
    assert reasoning
    assert re.fullmatch("[0-9]{2} done", answer)


def test_a_wrong_grammar_ends_its_request_and_no_other(llm):
    with pytest.raises(
        RequestError, match="the grammar in 'structured_outputs' is wrong or too large: .*unclosed"
    ) as error:
        generate(llm, structured_outputs={"regex": "("})
    assert error.value.status == "INVALID_ARGUMENT"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(RequestError, match="the grammar in 'response_format' is wrong or too large"):
        generate(llm, response_format=schema)
    assert generate(llm, structured_outputs={"choice": ["yes"]}).text == "yes"

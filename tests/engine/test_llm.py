"""The offline API: prompts in, texts out, and errors that name what was wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dflash_backend import LLM, SamplingParams
from dflash_backend.config import ConfigError
from dflash_backend.core.admission import RequestError
from dflash_backend.core.plan import SchedulerOutput, StepOutOfMemory
from dflash_backend.engine.llm import RequestOutput
from dflash_backend.text.chat import PromptError
from dflash_backend.text.sampling_params import ParameterError

QUESTION = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, max_model_len=512, adaptive_speculation=False)


def test_chat_takes_options_of_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking is false %} off{% endif %}"
    monkeypatch.setattr(llm.tokenizer._template, "chat_template", template)
    messages = [{"role": "user", "content": "Hi"}]
    for options in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert llm.chat(messages, max_tokens=1, **options).prompt_token_ids == llm.tokenizer.encode("Hi off")
    assert llm.chat(messages, max_tokens=1).prompt_token_ids == llm.tokenizer.encode("Hi")
    with pytest.raises(PromptError, match="has the name 'tokenize'"):
        llm.chat(messages, chat_template_kwargs={"tokenize": True})


def test_text_token_ids_and_chat_are_answered_in_order(llm: LLM) -> None:
    ids = llm.tokenizer.encode(QUESTION)
    from_text, from_ids = llm.generate([QUESTION, ids], max_tokens=96, temperature=0)
    assert from_text.token_ids == from_ids.token_ids
    assert from_text.text.endswith("Answer: 17")
    assert from_text.finish_reason == "stop"
    assert from_text.stats is not None
    assert from_text.stats.spec_decoding.acceptance_length > 1
    assert llm.chat([{"role": "user", "content": QUESTION}], max_tokens=96, temperature=0).text.endswith("Answer: 17")


def test_each_prompt_can_have_parameters_of_its_own(llm: LLM) -> None:
    short, long = llm.generate([QUESTION] * 2, [{"max_tokens": 3}, SamplingParams(max_tokens=9, temperature=0.0)])
    assert (len(short.token_ids), len(long.token_ids)) == (3, 9)


def test_a_stop_string_ends_the_text_before_it_with_its_stats_and_logprobs(llm: LLM) -> None:
    output = llm.generate(QUESTION, max_tokens=96, temperature=0, stop="Step 2", logprobs=2)[0]
    assert output.text.endswith("4 * 6 = 24.\n")
    assert output.finish_reason == "stop"
    assert output.stats is not None
    assert output.logprobs is not None
    assert [entry.token_ids[0] for entry in output.logprobs] == output.token_ids


def test_n_completions_have_seeds_of_their_own_and_the_first_is_the_outputs(llm: LLM) -> None:
    params = {"max_tokens": 20, "temperature": 1.5, "seed": 7, "logprobs": 0}
    finished: list[int] = []
    several, one = llm.generate(["Tell me"] * 2, [params | {"n": 6}, params], lambda index, _: finished.append(index))
    assert len(several.outputs) == 6
    assert sorted(finished) == [0, 1]
    assert (several.text, several.token_ids) == (one.text, one.token_ids)
    assert several.cumulative_logprob == pytest.approx(one.cumulative_logprob)
    assert len({tuple(completion.token_ids) for completion in several.outputs}) == 6
    third = llm.generate("Tell me", params | {"seed": 9})[0]
    assert several.outputs[2].token_ids == third.token_ids
    assert all(completion.finish_reason and completion.stats for completion in several.outputs)


def test_prompts_wait_for_a_queue_that_takes_no_more_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm.engine.core
    monkeypatch.setattr(core, "config", dataclasses.replace(core.config, max_queue_tokens=100))
    prompts = [[5 + number] * 60 for number in range(12)]
    outputs = llm.generate(prompts, max_tokens=2, ignore_eos=True)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [2] * 12


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ([], {}, RequestError, "the prompt is empty"),
        ([5] * 600, {}, RequestError, "600 tokens.*max_model_len .512."),
        ([5, 1536], {}, ValueError, "token id 1536 is not in the vocabulary"),
        ("x", {"temperatur": 1}, ParameterError, "temperature"),
        ("x", {"params": SamplingParams(top_p=0.0)}, ParameterError, "top_p"),
        ("x", {"num_speculative_tokens": 16}, ParameterError, "num_speculative_tokens"),
        ("x", {"logit_bias": {1536: 5}}, ParameterError, "logit_bias.*token ids from 0 to 1535"),
        ("x", {"logprobs": 21}, ParameterError, "logprobs"),
        ("x", {"params": [{}, {}]}, ValueError, "2 sets of parameters for 1 prompts"),
    ],
)
def test_bad_input_is_named_and_the_engine_goes_on(
    llm: LLM, prompt: Any, sampling: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate([prompt], **sampling)
    assert not llm.engine.core.has_unfinished()
    assert len(llm.generate(QUESTION, max_tokens=2, ignore_eos=True)[0].token_ids) == 2


def test_what_on_finished_raises_ends_the_other_requests(llm: LLM) -> None:
    def enough(index: int, output: RequestOutput) -> None:
        raise TimeoutError(index)

    with pytest.raises(TimeoutError):
        llm.generate([QUESTION] * 8, [{"max_tokens": 4 + 8 * i, "ignore_eos": True} for i in range(8)], enough)
    assert not llm.engine.core.has_unfinished()


def test_a_prompt_that_does_not_fit_the_devices_memory_is_an_error_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(kv_cache_gb=0.05, max_model_len=128)
    runner = llm.engine.runner
    submit = runner.submit

    def without_memory(plan: SchedulerOutput) -> None:
        """Runs no step of more than eight tokens."""
        if plan.num_tokens <= 8:
            return submit(plan)
        submit(dataclasses.replace(plan, rows=[]))
        runner.collect_results()
        raise StepOutOfMemory("the memory is full")

    monkeypatch.setattr(runner, "submit", without_memory)
    with pytest.raises(RequestError, match="the memory is full") as caught:
        llm.generate([[5] * 30], max_tokens=2)
    assert caught.value.status == "INTERNAL"
    assert not llm.engine.core.has_unfinished()
    assert len(llm.generate([[5] * 3], max_tokens=2, num_speculative_tokens=0)[0].token_ids) == 2


def test_several_engines_are_for_a_server() -> None:
    with pytest.raises(ConfigError, match="'data_parallel_size' is 2, and LLM runs one engine: leave it at 1"):
        LLM(data_parallel_size=2)

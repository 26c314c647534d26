"""Log-probabilities of a prompt's tokens, against `transformers` on the demo pair."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.engine.llm import RequestOutput
from dflash_backend.worker import logits
from tests.support.scale import scaled

TEXT = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep? " * 3
NUM_TOP = 3


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Chunks of 24 tokens, and 4 slots in a block."""
    return LLM(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=24 + 64, max_prefill_tokens_per_step=24)


@cache
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32).eval()


def assert_right(output: RequestOutput, num_top: int = NUM_TOP) -> None:
    """The entries are those of the model over the whole prompt."""
    prompt, entries = output.prompt_token_ids, output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    with torch.inference_mode():
        logprobs = reference()(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    for token, entry, row in zip(prompt[1:], entries[1:], logprobs, strict=False):
        assert entry is not None
        assert entry.token_ids[0] == token
        assert entry.logprobs[0] == pytest.approx(row[token].item(), abs=1e-3)
        best = row.topk(num_top).values.tolist()
        assert entry.ranks[0] <= num_top or entry.ranks[0] == (row >= row[token]).sum()
        likely = [logprob for logprob, rank in zip(entry.logprobs, entry.ranks, strict=True) if rank <= num_top]
        assert sorted(likely, reverse=True) == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("at_a_time", [1, 7, 32])
def test_they_are_the_models_own_however_many_positions_are_computed_at_a_time(
    llm: LLM, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "POSITIONS_AT_A_TIME", at_a_time)
    output = llm.generate(TEXT, max_tokens=3, temperature=0, prompt_logprobs=NUM_TOP)[0]
    assert_right(output)
    plain = llm.generate(TEXT, max_tokens=3, temperature=0)[0]
    assert output.token_ids == plain.token_ids
    assert plain.prompt_logprobs is None


def test_a_prompt_that_the_prefix_cache_has_is_computed_anew(llm: LLM) -> None:
    llm.generate(TEXT, max_tokens=1)
    hits = llm.stats().prefix_cache_hits
    assert_right(llm.generate(TEXT, max_tokens=1, prompt_logprobs=NUM_TOP)[0])
    assert llm.stats().prefix_cache_hits == hits
    llm.generate(TEXT, max_tokens=1)
    assert llm.stats().prefix_cache_hits > hits


def test_several_completions_share_those_of_their_prompt(llm: LLM) -> None:
    output = llm.generate(TEXT, max_tokens=2, n=2, prompt_logprobs=0, logprobs=0)[0]
    assert len(output.outputs) == 2
    assert_right(output, 0)


def test_a_prompt_of_one_token_has_none(llm: LLM) -> None:
    assert llm.generate([5], max_tokens=1, prompt_logprobs=1)[0].prompt_logprobs == [None]


def test_requests_beside_it_get_what_they_get_alone(llm: LLM) -> None:
    params = [{"max_tokens": 8, "temperature": 0.0}, {"max_tokens": 8, "temperature": 0.0, "prompt_logprobs": 1}]
    prompts = [TEXT, f"Again: {TEXT}"]
    together = llm.generate(prompts, params)
    assert together[0].prompt_logprobs is None
    assert_right(together[1], 1)
    assert [output.token_ids for output in together] == [llm.generate(p, params[0])[0].token_ids for p in prompts]


@pytest.mark.slow
def test_each_comes_once_where_requests_are_preempted() -> None:
    tight = LLM(adaptive_speculation=False, max_num_seqs=8, max_model_len=256, kv_cache_gb=0.0016)
    count = scaled(8, at_least=8)
    outputs = tight.generate(
        [f"{i}. {TEXT[:150]}" for i in range(count)], max_tokens=60, temperature=0, ignore_eos=True, prompt_logprobs=1
    )
    assert tight.stats().num_preemptions > 0
    for output in outputs:
        assert_right(output, 1)

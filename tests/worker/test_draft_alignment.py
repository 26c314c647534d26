"""What is drafted after any number of accepted and rejected drafts is what a fresh prefill of the same tokens drafts.

Outputs cannot show this: verification mends whatever is drafted, and only acceptance is lower.
"""

from __future__ import annotations

import pytest

from dflash_backend import LLM
from dflash_backend.messages import GenerationRequest, SamplingParams
from load_tests.prompts import load_prompts

NUM_STEPS = 6


def _start(llm: LLM, request_id: str, prompt: list[int]) -> None:
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    llm.engine.core.add_request(GenerationRequest(request_id, prompt, sampling))
    llm.engine.core.step()
    llm.engine.core.collect_drafts()


def _tokens_and_drafts(llm: LLM, request_id: str) -> tuple[list[int], list[int]]:
    core, requests = llm.engine.core, llm.engine.runner.requests
    request = core.scheduler.running[request_id]
    end = request.num_tokens
    row = requests.state.tokens[requests.records[request_id].index]
    return list(request.token_ids), row[end : end + request.num_pending_drafts].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_drafts_after_rejections_are_those_of_a_fresh_prefill(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and beside another request, with which a step has several rows."""
    # Else each of two rows has a thread, and is a step with one row there.
    monkeypatch.setattr("dflash_backend.engine.build.num_batch_threads", lambda *sizes: 1)
    llm = LLM(kv_write_guard=True, adaptive_speculation=False)
    core = llm.engine.core
    if beside:
        _start(llm, "other", llm.tokenizer.encode(load_prompts(3)[2].prompt))
    fresh = LLM(enable_prefix_caching=False, adaptive_speculation=False)
    same = total = 0
    for index, row in enumerate(load_prompts(2)):
        name = f"r{index}"
        _start(llm, name, llm.tokenizer.encode(row.prompt))
        for step in range(NUM_STEPS):
            core.step()
            core.collect_drafts()
            tokens, drafts = _tokens_and_drafts(llm, name)
            _start(fresh, f"{name} {step}", tokens[:-1])
            fresh_tokens, fresh_drafts = _tokens_and_drafts(fresh, f"{name} {step}")
            assert fresh_tokens == tokens
            fresh.engine.core.abort([f"{name} {step}"])
            same += sum(a == b for a, b in zip(drafts, fresh_drafts, strict=True))
            total += len(drafts)
        core.abort([name])
    stats = core.stats().spec_decoding
    assert stats.num_draft_tokens - stats.num_accepted_tokens > 20, "some drafts must have been rejected"
    assert stats.num_accepted_tokens > 10
    # Not all: two tokens may be about equally likely, and batches of other sizes round differently.
    assert same >= 0.97 * total > 100

"""Requests with and without speculation share a prefix: each leaves in its blocks what the other needs (TOGETHER)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_backend import LLM
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.messages import GenerationRequest, SamplingParams
from load_tests.prompts import load_prompts


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, max_model_len=1024, kv_write_guard=True, adaptive_speculation=False)


def ask(llm: LLM, prompt: list[int], k: int, salt: str, max_tokens: int = 48) -> tuple[list[int], int, int]:
    """Tokens of the answer, how many of its drafts were accepted, and how much of the prompt was cached."""
    output = llm.generate(
        [prompt], max_tokens=max_tokens, temperature=0, num_speculative_tokens=k, cache_salt=salt, ignore_eos=True
    )[0]
    assert output.stats is not None
    return output.token_ids, output.stats.spec_decoding.num_accepted_tokens, output.stats.num_cached_tokens


def test_drafts_behind_a_prefix_of_a_request_without_speculation_are_accepted_as_behind_a_miss(llm: LLM) -> None:
    """Were the drafter's KV missing in those blocks, the answers would be the same and acceptance would fall."""
    accepted = {"miss": 0, "hit": 0}
    for index, row in enumerate(load_prompts(4)):
        prompt = llm.tokenizer.encode(row.prompt)
        missed = ask(llm, prompt, 15, f"miss {index}")
        plain = ask(llm, prompt, 0, f"hit {index}")
        hit = ask(llm, prompt, 15, f"hit {index}")
        assert missed[0] == plain[0] == hit[0]
        assert missed[2] == plain[2] == 0
        assert hit[2] == (len(prompt) - 1) // 16 * 16 > 0
        accepted["miss"] += missed[1]
        accepted["hit"] += hit[1]
    assert accepted["hit"] == pytest.approx(accepted["miss"], rel=0.05)
    assert accepted["miss"] > 100


def draft_kv(llm: LLM, prompt: list[int], k: int, salt: str, num_tokens: int, beside: bool) -> torch.Tensor:
    """The drafter's KV of the first `num_tokens` tokens of a request that has been prefilled with this k; `beside`:
    together with another request."""
    core, drafter = llm.engine.core, llm.engine.runner.model.drafter
    assert isinstance(drafter, DFlashDrafter)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, num_speculative_tokens=k, cache_salt=salt)
    core.add_request(GenerationRequest(salt, prompt, sampling))
    if beside:
        core.add_request(GenerationRequest("other", prompt[::-1], sampling))
    core.step()
    core.collect_drafts()
    blocks, positions = np.array(core.scheduler.running[salt].block_ids), np.arange(num_tokens)
    slots = torch.from_numpy(blocks[positions // 16] * 16 + positions % 16)
    found = torch.stack([cache.slots[slots] for cache in drafter.caches])
    core.abort([salt, "other"])
    return found


@pytest.mark.parametrize("beside", [False, True])
def test_a_request_without_speculation_leaves_the_drafters_kv_of_its_tokens(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else each of two rows has a thread, and is a step with one row there.
    monkeypatch.setattr("dflash_backend.engine.build.num_batch_threads", lambda *sizes: 1)
    llm = LLM(max_num_seqs=4, max_model_len=1024, kv_write_guard=True, adaptive_speculation=False)
    prompt = llm.tokenizer.encode(load_prompts(1)[0].prompt)
    plain = draft_kv(llm, prompt, 0, "k = 0", len(prompt), beside)
    speculating = draft_kv(llm, prompt, 15, "k = 15", len(prompt), beside)
    torch.testing.assert_close(plain, speculating, atol=1e-4, rtol=1e-4)
    assert plain.abs().amax(dim=(0, 2, 3)).min() > 0, "every token has KV"

"""Below `num_computed` the paged KV is final: the drafter's context KV of accepted tokens and no other."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.drafters.base import ContextBatch
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.messages import GenerationRequest, SamplingParams
from dflash_backend.worker.kv_cache import PagedKVCache
from load_tests.prompts import load_prompts

CPU = torch.device("cpu")


@functools.cache
def reference() -> PreTrainedModel:
    """The target in `transformers`."""
    return AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32).eval()


def reference_features(token_ids: list[int], layer_ids: tuple[int, ...]) -> torch.Tensor:
    """Outputs of the layers `layer_ids` for every token, by `transformers`: `[n, L * hidden]`."""
    with torch.inference_mode():
        states = reference()(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in layer_ids], dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 72, "max_prefill_tokens_per_step": 24}])
def test_every_final_position_holds_the_context_kv_of_its_token(settings: dict[str, int]) -> None:
    """Neither rejected drafts nor the drafter's queries survive, and hits bring drafter KV too. Of a request without
    drafts for the next step the tokens of a block that is not full may wait."""
    llm = LLM(kv_write_guard=True, adaptive_speculation=False, **settings)
    core, runner = llm.engine.core, llm.engine.runner
    prompts = [llm.tokenizer.encode(row.prompt) for row in load_prompts(3)]
    prompts.append(prompts[0])
    for index, prompt in enumerate(prompts):
        core.add_request(GenerationRequest(str(index), prompt, SamplingParams(max_tokens=60, temperature=0.0)))
    drafter = runner.model.drafter
    assert isinstance(drafter, DFlashDrafter)
    decoder = drafter.model.spec.decoder
    checked, rejected = 0, 0
    pending = runner.model.pending  # None without operations in C++
    for _ in range(8):
        core.step()
        core.collect_drafts()
        rejected += core.stats().spec_decoding.num_draft_tokens - core.stats().spec_decoding.num_accepted_tokens
        for request in list(core.scheduler.running.values()):
            index = runner.requests.records[request.request_id].index
            num_waiting = 0 if pending is None else pending.num_waiting(index)
            num_written = request.num_computed - num_waiting
            assert num_written >= request.num_computed // 16 * 16
            if not num_written:
                continue
            positions = np.arange(num_written)
            blocks = np.array(request.block_ids)
            slots = torch.from_numpy(blocks[positions // 16] * 16 + positions % 16)
            features = reference_features(request.token_ids[:num_written], drafter.capture)
            expected = PagedKVCache.allocate(decoder, decoder, 1, len(positions), torch.float32, CPU).draft
            context = ContextBatch(features, torch.from_numpy(positions), torch.from_numpy(positions))
            DFlashDrafter(drafter.model, drafter.target, expected, drafter.backend).inject(context)
            for cache, layer in zip(drafter.caches, expected, strict=True):
                torch.testing.assert_close(cache.slots[slots], layer.slots, atol=1e-3, rtol=1e-3)
            checked += num_written
    assert checked > 500
    assert rejected > 0

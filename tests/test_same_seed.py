"""Same seed, same prompt, same parameters: same output, whatever else is running."""

from __future__ import annotations

import pytest

from benchmarks.workload import load_prompts
from dflash_backend import LLM

NUM_PROMPTS = 32
MAX_TOKENS = 48
SETTINGS = {"max_model_len": 512, "max_num_seqs": 32}


def sampling(index: int) -> dict[str, object]:
    """Each request with a seed and parameters of its own."""
    return {
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "seed": 1000 + index,
        "temperature": (0.7, 1.0, 1.3)[index % 3],
        "top_p": (1.0, 0.9)[index % 2],
        "frequency_penalty": (0.0, 0.0, 0.0, 0.5)[index % 4],
    }


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [prompt.prompt for prompt in load_prompts(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def alone(prompts: list[str]) -> list[list[int]]:
    """Each request's tokens when nothing else runs and nothing is cached."""
    llm = LLM(enable_prefix_caching=False, **SETTINGS)
    return [llm.generate(prompt, **sampling(i))[0].token_ids for i, prompt in enumerate(prompts)]


def together(llm: LLM, prompts: list[str]) -> list[list[int]]:
    outputs = llm.generate(prompts, [sampling(i) for i in range(len(prompts))])
    return [output.token_ids for output in outputs]


def test_a_request_gets_its_output_among_31_others_and_with_a_prefix_hit(
    prompts: list[str], alone: list[list[int]]
) -> None:
    llm = LLM(**SETTINGS)
    assert together(llm, prompts) == alone
    before = llm.stats().prefix_cache_hits
    assert together(llm, prompts[::-1]) != alone, "the seeds go with the places, so other prompts give other outputs"
    assert together(llm, prompts) == alone
    assert llm.stats().prefix_cache_hits > before


def test_a_request_gets_its_output_after_a_preemption(prompts: list[str], alone: list[list[int]]) -> None:
    llm = LLM(**{**SETTINGS, "max_model_len": 256}, kv_cache_gb=0.004, kv_write_guard=True)
    assert together(llm, prompts) == alone
    assert llm.stats().num_preemptions > 0


def test_a_request_gets_its_output_in_small_chunks(prompts: list[str], alone: list[list[int]]) -> None:
    llm = LLM(max_num_batched_tokens=48, **SETTINGS)
    assert together(llm, prompts) == alone

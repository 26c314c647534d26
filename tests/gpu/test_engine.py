"""LOSSLESS on a GPU: the demo pair gives the tokens of the CPU in float32, and in bf16 those of k = 0 up to ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu import ties
from dflash_backend.config import asset_path
from load_tests.prompts import load_prompts

msgspec = pytest.importorskip("msgspec", reason="the engine's messages need the package msgspec")
transformers = pytest.importorskip("transformers", reason="the reference for ties needs the package transformers")

NUM_PROMPTS = 48
MAX_TOKENS = 96
# Few rows, so that few graphs are captured for each of the engines.
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "kv_cache_gb": 1.0}
WAYS = [
    {"enable_cuda_graphs": graphs, "enable_overlap": overlap} for graphs in (True, False) for overlap in (True, False)
]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 1.5, "min_p": 0.05, "top_p": 0.95, "top_k": 20},
]


def generate(
    prompts: list[str], sampled: bool = False, device: str = "cuda", **settings: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts' token ids and their continuations: greedy, or sampled in a few ways with a seed for each."""
    from dflash_backend import LLM

    llm = LLM(**(SETTINGS | settings | {"device": device}))
    params: list[dict[str, Any]] = [{"temperature": 0.0}] * len(prompts)
    if sampled:
        params = [{**SAMPLINGS[i % len(SAMPLINGS)], "seed": i} for i in range(len(prompts))]
    outputs = llm.generate(list(prompts), [{"max_tokens": MAX_TOKENS, **one} for one in params])
    return [output.prompt_token_ids for output in outputs], [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [row.prompt for row in load_prompts(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def on_cpu(prompts: list[str]) -> list[list[int]]:
    return generate(prompts, device="cpu", dtype="float32", draft="")[1]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ", ".join(f"{name[7:]} {on}" for name, on in way.items()))
def test_float32_with_drafts_gives_the_tokens_of_the_cpu_without(
    way: dict[str, bool], prompts: list[str], on_cpu: list[list[int]]
) -> None:
    assert generate(prompts, dtype="float32", **way)[1] == on_cpu


@pytest.mark.parametrize("way", WAYS[::3], ids=lambda way: ", ".join(f"{name[7:]} {on}" for name, on in way.items()))
def test_float32_with_n_grams_gives_them_too(way: dict[str, bool], prompts: list[str], on_cpu: list[list[int]]) -> None:
    assert generate(prompts, dtype="float32", draft="ngram", **way)[1] == on_cpu


@pytest.fixture(scope="module")
def sampled_eagerly(prompts: list[str]) -> list[list[int]]:
    return generate(prompts, sampled=True, dtype="float32", enable_cuda_graphs=False, enable_overlap=False)[1]


@pytest.mark.parametrize("way", WAYS[:3], ids=lambda way: ", ".join(f"{name[7:]} {on}" for name, on in way.items()))
def test_sampled_tokens_do_not_depend_on_graphs_and_overlap(
    way: dict[str, bool], prompts: list[str], sampled_eagerly: list[list[int]]
) -> None:
    """With temperature, top-k, top-p and min-p. A step's shape moves float32 logits in their last digits, which may
    change a draw in a thousand, and everything behind it."""
    actual = generate(prompts, sampled=True, dtype="float32", **way)[1]
    equal = sum(ours == theirs for ours, theirs in zip(actual, sampled_eagerly, strict=True))
    assert equal >= 0.9 * len(prompts)


SPECIAL: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"logit_bias": {300: 2.0}, "min_tokens": 20},
    {"structured_outputs": {"regex": "[a-z ]{5,40}[.]"}},
]


def test_special_requests_get_between_two_graphs_what_they_get_on_the_cpu(prompts: list[str]) -> None:
    """Every fifth request asks for nothing, and the others each for something else."""
    from dflash_backend import LLM

    params: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": MAX_TOKENS, **SPECIAL[i % len(SPECIAL)]} for i in range(len(prompts))
    ]
    texts = [
        [output.token_ids for output in LLM(**(SETTINGS | {"dtype": "float32"} | way)).generate(list(prompts), params)]
        for way in ({"device": "cuda"}, {"device": "cpu", "draft": ""})
    ]
    equal = sum(ours == theirs for ours, theirs in zip(*texts, strict=True))
    assert equal >= 0.95 * len(prompts)


def test_the_filters_of_sampled_requests_reach_the_gpu(prompts: list[str]) -> None:
    """With top_k = 1 there is nothing to draw, whatever the temperature: the tokens are the greedy ones."""
    from dflash_backend import LLM

    llm = LLM(**(SETTINGS | {"device": "cuda", "dtype": "float32"}))
    greedy = llm.generate(list(prompts), max_tokens=MAX_TOKENS, temperature=0)
    for filtering in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        filtered = llm.generate(list(prompts), max_tokens=MAX_TOKENS, temperature=1.5, seed=1, **filtering)
        equal = sum(a.token_ids == b.token_ids for a, b in zip(filtered, greedy, strict=True))
        assert equal >= 0.9 * len(prompts), filtering


def test_bf16_with_drafts_parts_from_k_0_only_at_ties(prompts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ids, expected = generate(prompts, dtype="bfloat16", draft="")
    _, actual = generate(prompts, dtype="bfloat16")
    logits = logits_in_float32(asset_path("demo", "pair", "target"))
    outputs = zip(ids, expected, actual, strict=True)
    found = [ties.parting(index, *of_prompt, logits) for index, of_prompt in enumerate(outputs)]
    partings = [entry for entry in found if entry is not None]
    with capsys.disabled():
        print("", ties.describe(partings, len(prompts)), *partings, sep="\n")
    assert [entry for entry in partings if not entry.is_tie] == []
    # Otherwise nothing was compared.
    assert len(partings) <= len(prompts) // 2


@pytest.mark.parametrize("sampled", [False, True])
def test_with_batch_invariant_a_text_in_bf16_is_the_same_alone_and_in_a_batch(
    sampled: bool, prompts: list[str]
) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    _, together = generate(prompts, sampled, **settings)
    assert together == generate(prompts, sampled, max_num_seqs=1, draft="", **settings)[1]


def logits_in_float32(path: object) -> ties.Logits:
    """The demo target of `transformers`, its weights rounded to bf16, computed in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().eval()

    def logits(token_ids: Sequence[int]) -> list[float]:
        with torch.inference_mode():
            values: list[float] = model(torch.tensor([list(token_ids)])).logits[0, -1].tolist()
        return values

    return logits

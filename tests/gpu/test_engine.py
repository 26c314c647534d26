"""LOSSLESS on a GPU: the demo pair gives the tokens of the CPU in float32, and in bf16 those of k = 0 up to ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu import ties
from benchmarks.workload import load_prompts
from dflash_backend.config import asset_path

msgspec = pytest.importorskip("msgspec", reason="the engine's messages need the package msgspec")
transformers = pytest.importorskip("transformers", reason="the reference for ties needs the package transformers")

NUM_PROMPTS = 48
MAX_TOKENS = 96
SETTINGS: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 1024, "kv_cache_gb": 1.0}
WAYS = [
    {"enable_cuda_graphs": graphs, "enable_overlap": overlap} for graphs in (True, False) for overlap in (True, False)
]


def generate(prompts: list[str], **settings: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts' token ids and their greedy continuations."""
    from dflash_backend import LLM

    llm = LLM(**(SETTINGS | settings))
    outputs = llm.generate(list(prompts), max_tokens=MAX_TOKENS, temperature=0)
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
    assert generate(prompts, device="cuda", dtype="float32", **way)[1] == on_cpu


def test_bf16_with_drafts_parts_from_k_0_only_at_ties(prompts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ids, expected = generate(prompts, device="cuda", dtype="bfloat16", draft="")
    _, actual = generate(prompts, device="cuda", dtype="bfloat16")
    logits = logits_in_float32(asset_path("demo", "pair", "target"))
    outputs = zip(ids, expected, actual, strict=True)
    found = [ties.parting(index, *of_prompt, logits) for index, of_prompt in enumerate(outputs)]
    partings = [entry for entry in found if entry is not None]
    with capsys.disabled():
        print("", ties.describe(partings, len(prompts)), *partings, sep="\n")
    assert [entry for entry in partings if not entry.is_tie] == []
    # Otherwise nothing was compared.
    assert len(partings) <= len(prompts) // 2


def logits_in_float32(path: object) -> ties.Logits:
    """The demo target of `transformers`, its weights rounded to bf16, computed in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float().eval()

    def logits(token_ids: Sequence[int]) -> list[float]:
        with torch.inference_mode():
            values: list[float] = model(torch.tensor([list(token_ids)])).logits[0, -1].tolist()
        return values

    return logits

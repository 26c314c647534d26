"""`batch_invariant` with our own kernels throughout: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.linear import QuantisedLinear
from dflash_kernels.quantised_weight import QuantisedWeight
from tests.kernels.inputs import multiply_as_tensor_cores_do
from tests.support.batch_invariance import differing, random_prompts, run
from tests.support.quantised import FP8_BLOCK, GPTQ, fp8_block, gptq, write
from tests.support.scale import SCALE, by_night
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import triton_engine

MAX_TOKENS = 2
# Rows that run together, k, and the most tokens of a step.
SHAPES = [(1, 15, 256), (3, 0, 30), (3, 15, 60)]
# `make test` has some of what follows, and `make nightly` all.
ALL = SCALE >= 4
# Drafts of many rows make more lines than any tile has.
WIDE = [(17, 15), (64, 0), (64, 15)] if ALL else [(9, 7), (64, 0)]
# The layers of gpt-oss have experts, and every other one a window.
FAMILIES = [
    ("Qwen3ForCausalLM", {}, SHAPES),
    pytest.param("GptOssForCausalLM", {}, SHAPES[-1:], marks=pytest.mark.slow),
]
if ALL:
    FAMILIES += [("MistralForCausalLM", {"sliding_window": 9}, SHAPES[-1:]), ("Qwen3MoeForCausalLM", {}, SHAPES[-1:])]
MANY_ROWS = [by_night(17, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in WIDE)]

KEPT = {
    "fp8": (fp8_block(32, 32), FP8_BLOCK | {"weight_block_size": [32, 32]}),
    "int4": (gptq(group=32), GPTQ | {"group_size": 32}),
}
KEPT_TARGETS = [("Qwen3ForCausalLM", "fp8"), pytest.param("Qwen3MoeForCausalLM", "int4", marks=pytest.mark.slow)]
if ALL:
    KEPT_TARGETS += [("Qwen3ForCausalLM", "int4"), ("Qwen3MoeForCausalLM", "fp8")]


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_as_tensor_cores_do(monkeypatch)


def settings(folder: Path, rows: int, k: int, tokens: int) -> dict[str, Any]:
    """An engine with `batch_invariant` for that many rows at a time, and steps of at most so many tokens."""
    return {
        "target_model": str(folder / "target"),
        "draft_model": str(folder / "draft") if k else "",
        "num_speculative_tokens": k,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": rows,
        "max_model_len": 128,
        "kv_block_size": 16,
        "kv_write_guard": False,
        "batch_invariant": True,
    }


def make_models(folder: Path, architecture: str = "Qwen3ForCausalLM", **changes: Any) -> None:
    """A target of two layers and a drafter for it, with blocks of 16."""
    make_target(folder / "target", architecture=architecture, num_hidden_layers=2, **changes)
    dflash = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB_SIZE - 1}
    make_draft(folder / "draft", block_size=16, num_target_layers=2, dflash_config=dflash)


@pytest.mark.parametrize(("architecture", "changes", "shapes"), FAMILIES)
def test_logits_are_the_same_to_the_bit_chunked_or_whole_with_any_k(
    tmp_path: Path, architecture: str, changes: dict[str, Any], shapes: list[tuple[int, int, int]]
) -> None:
    make_models(tmp_path, architecture, **changes)
    prompts = random_prompts(3, VOCAB_SIZE, longest=32)
    alone = run(triton_engine(**settings(tmp_path, 1, 0, 256)), prompts[:1], max_tokens=MAX_TOKENS)
    for rows, k, tokens in shapes:
        built = triton_engine(**settings(tmp_path, rows, k, tokens))
        together = run(built, prompts[:rows], max_tokens=MAX_TOKENS)
        assert differing(alone[1], together[1]) == 0, (rows, k, tokens)
        assert together[0]["0"] == alone[0]["0"]
    hits = built.core.stats().prefix_cache_hits
    again = run(built, prompts[:1], prefix="again ", max_tokens=MAX_TOKENS)
    assert built.core.stats().prefix_cache_hits > hits
    assert differing(alone[1], again[1]) == 0


@pytest.mark.parametrize(("architecture", "name"), KEPT_TARGETS)
def test_logits_of_a_target_that_stays_quantised_are_the_same_to_the_bit(
    tmp_path: Path, architecture: str, name: str
) -> None:
    packer, config = KEPT[name]
    has_experts = architecture == "Qwen3MoeForCausalLM"
    inner = "moe_intermediate_size" if has_experts else "intermediate_size"
    make_models(tmp_path / "source", architecture, **{inner: 160})
    shutil.copytree(tmp_path / "source" / "draft", tmp_path / "draft")
    write(tmp_path / "source" / "target", tmp_path, packer, config).quantised.rename(tmp_path / "target")
    prompts = random_prompts(3, VOCAB_SIZE, longest=32)
    alone = run(triton_engine(**settings(tmp_path, 1, 0, 256)), prompts[:1], max_tokens=MAX_TOKENS)
    built = triton_engine(**settings(tmp_path, 3, 15, 60))
    target = built.runner.model.target
    assert isinstance(target, DecoderTarget)
    assert isinstance(target.layers[0].weights.mlp.down, QuantisedWeight if has_experts else QuantisedLinear)
    together = run(built, prompts, max_tokens=MAX_TOKENS)
    assert differing(alone[1], together[1]) == 0
    assert together[0]["0"] == alone[0]["0"]


@pytest.mark.parametrize(("rows", "k"), MANY_ROWS)
def test_logits_are_the_same_to_the_bit_among_many_rows(tmp_path: Path, rows: int, k: int) -> None:
    make_models(tmp_path)
    prompts = [prompt[:20] for prompt in random_prompts(rows, VOCAB_SIZE, longest=6)]  # the first is long enough
    alone = run(triton_engine(**settings(tmp_path, 1, 0, 2048)), prompts[:1], max_tokens=MAX_TOKENS)
    together = run(triton_engine(**settings(tmp_path, rows, k, 2048)), prompts, max_tokens=MAX_TOKENS)
    assert differing(alone[1], together[1]) == 0

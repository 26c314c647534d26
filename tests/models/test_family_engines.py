"""LOSSLESS for every family: the whole engine gives the tokens of `transformers`, alone and with any drafter."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_backend.checkpoints import TARGET_ARCHITECTURES
from dflash_backend.engine.build import BuiltEngine
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import Outputs, engine

pytestmark = pytest.mark.usefixtures("single_thread")
MAX_TOKENS = 24
CASES: list[tuple[str, dict[str, Any]]] = [(architecture, {}) for architecture in TARGET_ARCHITECTURES] + [
    ("MistralForCausalLM", {"sliding_window": 9}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
]


def prompts() -> list[list[int]]:
    """Four, of which two share a beginning of more than two blocks and one is prefilled in chunks."""
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 21, 90, 30)]
    return [*ids[:3], ids[1][:12] + ids[3]]


def expected(model: PreTrainedModel, prompt: list[int], count: int = MAX_TOKENS) -> list[int]:
    """What `transformers` generates, `count` tokens; no token ends it. It is asked once for each prompt."""
    return list(_generated(model, tuple(prompt), count))


@functools.cache
def _generated(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=VOCAB_SIZE
    )
    return tuple(output[0, len(prompt) :].tolist())


def chosen(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """What `transformers` chooses behind a prompt and each beginning of MAX_TOKENS tokens."""
    assert len(tokens) == MAX_TOKENS
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def generate(built: BuiltEngine, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once; the second pair arrives when the first is under way, so that it can hit the prefix cache."""
    outputs = Outputs(built)
    for index, prompt in enumerate(prompts):
        outputs.add(str(index), prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs.step()
        outputs.step()
    return list(outputs.finish().values())


@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_greedy_output_is_that_of_transformers_with_and_without_a_drafter(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    model = make_target(tmp_path / "target", architecture=architecture, **changes)
    check_greedy_output(tmp_path, model)


def test_greedy_output_with_experts_in_mxfp4_is_that_of_transformers(tmp_path: Path) -> None:
    check_greedy_output(tmp_path, make_mxfp4_target(tmp_path / "target", hidden_size=32, intermediate_size=32))


def check_greedy_output(tmp_path: Path, model: PreTrainedModel) -> None:
    """The engine gives the tokens of `model`, which lies in `target`, alone and with a random drafter."""
    make_draft(tmp_path / "draft")
    wanted: list[list[int]] = []
    for draft in ("", str(tmp_path / "draft")):
        models = {"target_model": tmp_path / "target", "draft_model": draft}
        built = engine(**models, kv_block_size=4, max_num_batched_tokens=64, max_model_len=128)
        found = generate(built, prompts())
        # Each token is the one that `model` chooses behind those before it, which one pass over all of them shows.
        wanted = wanted or [chosen(model, prompt, tokens) for prompt, tokens in zip(prompts(), found, strict=True)]
        assert found == wanted
        stats = built.core.stats()
        assert (stats.prefix_cache_hits > 0) == (built.pair.target.decoder.delta_net is None)
        assert (stats.spec_decoding.num_drafts > 0) == bool(draft)

"""Of a multimodal checkpoint the text part is served, and its weights may lie as published ones do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from dflash_backend.checkpoints import read_target
from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.models import load_target
from tests.support.paged import block_tables, caches, context, noisy_pool
from tests.support.tiny_models import GEMMA4_EXPERTS, VOCAB_SIZE, target_config

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
# As Qwen publishes it, for the four rotated numbers of a head of 16.
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
}


def save(directory: Path, experts: bool) -> PreTrainedModel:
    """A random multimodal checkpoint."""
    torch.manual_seed(0)
    architecture = "Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"
    text = target_config(architecture, rope_parameters=MROPE, tie_word_embeddings=False).to_dict()
    config, model = Qwen3_5Config, Qwen3_5ForConditionalGeneration
    if experts:
        config, model = Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
    whole = model(config(text_config=text, vision_config=VISION, tie_word_embeddings=True)).eval()
    whole.save_pretrained(directory)
    return whole


def check(directory: Path, model: PreTrainedModel) -> None:
    spec = read_target(directory)
    target = load_target(spec, 64, torch.float32, torch.device("cpu"))
    ids = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
    paged = context(block_tables(1), [0], [40], pool=noisy_pool(spec.decoder))
    output = target.forward(ids, paged, caches(spec.decoder), ())
    torch.testing.assert_close(target.logits(output.hidden), model(ids[None]).logits[0], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("experts", [False, True])
def test_the_text_part_gives_the_logits_of_transformers(tmp_path: Path, experts: bool) -> None:
    model = save(tmp_path, experts)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    check(tmp_path, model)
    spec = read_target(tmp_path)
    assert spec.architecture == ("Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM")
    assert spec.tie_word_embeddings
    assert dict(target_facts(spec))["not served"].startswith("model.visual.")


@pytest.mark.parametrize("experts", [False, True])
def test_the_text_part_of_gemma_4_gives_the_logits_of_transformers(tmp_path: Path, experts: bool) -> None:
    torch.manual_seed(0)
    text = target_config("Gemma4ForCausalLM", **(GEMMA4_EXPERTS if experts else {})).to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = Gemma4Config(text_config=text, vision_config=vision | {"num_key_value_heads": 2}, audio_config=None)
    whole = Gemma4ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    check(tmp_path, whole)
    spec = read_target(tmp_path)
    assert (spec.architecture, spec.tie_word_embeddings) == ("Gemma4ForCausalLM", True)
    assert "model.vision_tower." in dict(target_facts(spec))["not served"]


def test_gemma_4_12b_is_read_as_google_publishes_it(tmp_path: Path) -> None:
    """Its text part has no hidden_size_per_layer_input, and what embeds images lies in tensors of other names."""
    torch.manual_seed(0)
    text = target_config("Gemma4ForCausalLM").to_dict()
    for field in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "model_type", "enable_moe_block"):
        del text[field]
    vision = {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 4}
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None)
    whole = Gemma4UnifiedForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    parts = ("patch_dense.weight", "patch_dense.bias", "pos_embedding")
    parts += tuple(f"{norm}.{kind}" for norm in ("patch_ln1", "patch_ln2", "pos_norm") for kind in ("weight", "bias"))
    tensors = {name: tensor for name, tensor in load_file(file).items() if "vision" not in name}
    tensors |= {f"model.vision_embedder.{part}": torch.zeros(2) for part in parts}
    tensors["model.embed_vision.embedding_projection.weight"] = torch.zeros(2)
    save_file(tensors, file)
    assert "hidden_size_per_layer_input" not in json.loads((tmp_path / "config.json").read_text())["text_config"]
    check(tmp_path, whole)
    assert "model.vision_embedder." in dict(target_facts(read_target(tmp_path)))["not served"]


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with the experts of a layer in one tensor for each projection."""
    stacked: dict[str, Any] = {}
    of_expert = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    for name, tensor in tensors.items():
        found = of_expert.fullmatch(name)
        if found is None:
            stacked[name] = tensor
        else:
            stacked.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
    for name in [name for name, value in stacked.items() if isinstance(value, dict)]:
        parts = stacked.pop(name)
        experts = range(len(parts) // 3)
        gate_up = [torch.cat([parts[expert, "gate"], parts[expert, "up"]]) for expert in experts]
        stacked[f"{name}.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{name}.down_proj"] = torch.stack([parts[expert, "down"] for expert in experts])
    return stacked


def test_experts_of_a_layer_may_lie_in_one_tensor(tmp_path: Path) -> None:
    model = save(tmp_path, experts=True)
    file = tmp_path / "model.safetensors"
    tensors = stack_experts(load_file(file))
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file(tensors, file)
    check(tmp_path, model)


def test_the_ends_of_a_sequence_may_be_in_the_text_part(tmp_path: Path) -> None:
    save(tmp_path, experts=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["eos_token_id"], config["eos_token_id"] = [7, 5], 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert read_target(tmp_path).eos_token_ids == (3, 5, 7)

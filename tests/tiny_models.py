"""Small random checkpoints in the published formats, for tests that need real files but not a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 97
MASK_TOKEN_ID = 96
TARGET_LAYERS = 5
TARGET_LAYER_IDS = [1, 3]


# Each family's model, its config, and what that has beyond the fields below.
FAMILIES: dict[str, tuple[type[PreTrainedModel], type[PretrainedConfig], dict[str, Any]]] = {
    "Qwen3ForCausalLM": (Qwen3ForCausalLM, Qwen3Config, {}),
    "Qwen2ForCausalLM": (Qwen2ForCausalLM, Qwen2Config, {}),
    "LlamaForCausalLM": (LlamaForCausalLM, LlamaConfig, {}),
    "MistralForCausalLM": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "Qwen3MoeForCausalLM": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}


def target_config(architecture: str = "Qwen3ForCausalLM", **changes: Any) -> PretrainedConfig:
    """Five layers with grouped-query attention and an odd vocabulary."""
    _, config, own = FAMILIES[architecture]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    return config(**(fields | own | changes))


def make_target(
    directory: Path,
    seed: int = 0,
    architecture: str = "Qwen3ForCausalLM",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """Save a random target and return it. Weights are larger than at initialisation, so that logits differ clearly."""
    torch.manual_seed(seed)
    model = FAMILIES[architecture][0](target_config(architecture, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.25)
    model = model.to(dtype)
    model.save_pretrained(directory)
    return model


def make_pair(directory: Path) -> dict[str, str]:
    """Save a random target and a drafter for it, and return the settings that name them."""
    make_target(directory / "t")
    make_draft(directory / "d")
    return {"target_model": str(directory / "t"), "draft_model": str(directory / "d")}


def make_draft(directory: Path, seed: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a random two-layer z-lab drafter for `make_target`'s model and return its tensors."""
    hidden, intermediate, heads, kv_heads, head_dim, layers = 32, 40, 4, 2, 16, 2
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB_SIZE,
        "block_size": 8,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"target_layer_ids": TARGET_LAYER_IDS, "mask_token_id": MASK_TOKEN_ID},
        "dtype": "float32",
    } | changes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    tensors = {
        "fc.weight": normal(hidden, len(TARGET_LAYER_IDS) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(layers):
        tensors |= {
            f"layers.{i}.input_layernorm.weight": norm(hidden),
            f"layers.{i}.post_attention_layernorm.weight": norm(hidden),
            f"layers.{i}.self_attn.q_proj.weight": normal(heads * head_dim, hidden),
            f"layers.{i}.self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden),
            f"layers.{i}.self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden),
            f"layers.{i}.self_attn.o_proj.weight": normal(hidden, heads * head_dim),
            f"layers.{i}.self_attn.q_norm.weight": norm(head_dim),
            f"layers.{i}.self_attn.k_norm.weight": norm(head_dim),
            f"layers.{i}.mlp.gate_proj.weight": normal(intermediate, hidden),
            f"layers.{i}.mlp.up_proj.weight": normal(intermediate, hidden),
            f"layers.{i}.mlp.down_proj.weight": normal(hidden, intermediate),
        }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors

"""Small random checkpoints in the published formats, for tests that need real files but not a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB_SIZE = 97
MASK_TOKEN_ID = 96
TARGET_LAYERS = 5
TARGET_LAYER_IDS = [1, 3]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, DRAFT_INTERMEDIATE = 32, 4, 2, 16, 40

# Three layers with a gated delta net, one with attention, and another with a gated delta net.
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # A norm of outputs near 0 would make a rounding error large, in `transformers` as here.
    "rms_norm_eps": 1e-3,
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
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
    "Qwen3NextForCausalLM": (Qwen3NextForCausalLM, Qwen3NextConfig, HYBRID | SHARED_EXPERT),
    "Qwen3_5ForCausalLM": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HYBRID),
    "Qwen3_5MoeForCausalLM": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, HYBRID | SHARED_EXPERT),
    "Gemma4ForCausalLM": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 20.0,
            "rms_norm_eps": 1e-3,
        },
    ),
    "GptOssForCausalLM": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "sliding_window": 9,
            # Of weights as large as these, some gates are cut off.
            "swiglu_limit": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}
# Their norms multiply by 1 plus the weight.
ZERO_CENTRED = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def target_config(architecture: str = "Qwen3ForCausalLM", **changes: Any) -> PretrainedConfig:
    """Five layers with grouped-query attention and an odd vocabulary."""
    _, config, own = FAMILIES[architecture]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    if "intermediate_size" not in config.__dataclass_fields__:  # as published files of Qwen3.5 with experts
        del fields["intermediate_size"]
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
            if "norm" in name and (architecture not in ZERO_CENTRED or "linear_attn" in name):
                parameter.uniform_(0.5, 1.5)
            elif "norm" in name:
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(std=0.06 if "linear_attn.out_proj" in name else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model = model.to(dtype)
    model.save_pretrained(directory)
    return model


def make_pair(directory: Path, target: dict[str, Any] | None = None, **draft: Any) -> dict[str, str]:
    """Save a random target `t` and a drafter `d` for it, each with these fields of its config, and return the settings
    that name them."""
    make_target(directory / "t", **(target or {}))
    make_draft(directory / "d", **draft)
    return {"target_model": str(directory / "t"), "draft_model": str(directory / "d")}


def decoder_config(num_layers: int, intermediate: int, vocab_size: int) -> dict[str, Any]:
    """The Qwen3 part of a small checkpoint's config."""
    return {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": vocab_size,
    }


def layer_shapes(prefix: str, intermediate: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one Qwen3 layer, whose names begin with `prefix`."""
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (intermediate, HIDDEN),
        "mlp.up_proj": (intermediate, HIDDEN),
        "mlp.down_proj": (HIDDEN, intermediate),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def drafter_shapes(num_features: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a two-layer drafter, under z-lab's names, that takes the features of `num_features` layers."""
    shapes = {"fc.weight": (HIDDEN, num_features * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    return shapes | layer_shapes("layers.0.", intermediate) | layer_shapes("layers.1.", intermediate)


def eagle3_shapes(
    layer: str,
    intermediate: int,
    num_features: int = 3,
    target_hidden: int = HIDDEN,
    qwen3: bool = True,
    norms: Sequence[str] = (),
) -> dict[str, tuple[int, ...]]:
    """The tensors of an EAGLE-3 drafter, the names of whose layer's begin with `layer`. norms: of its features, as its
    config calls them."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, num_features * target_hidden),
        "norm.weight": (HIDDEN,),
        f"{layer}hidden_norm.weight": (HIDDEN,),
    }
    for name, shape in layer_shapes(layer, intermediate).items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shapes[name] = (shape[0], 2 * HIDDEN)
        elif qwen3 or not name.endswith(("q_norm.weight", "k_norm.weight")):
            shapes[name] = shape
    if "norm_before_fc" in norms:
        shapes["input_norm.weight"] = (num_features * target_hidden,)
    if "fc_norm" in norms:
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(num_features)}
    return shapes


def save_checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_draft(directory: Path, seed: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a random two-layer z-lab drafter for `make_target`'s model and return its tensors."""
    config = decoder_config(2, DRAFT_INTERMEDIATE, VOCAB_SIZE) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"target_layer_ids": TARGET_LAYER_IDS, "mask_token_id": MASK_TOKEN_ID},
        "dtype": "float32",
    }
    generator = torch.Generator().manual_seed(seed)

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) * 0.2

    shapes = drafter_shapes(len(TARGET_LAYER_IDS), DRAFT_INTERMEDIATE)
    tensors = {name: random(name, shape) for name, shape in shapes.items()}
    save_checkpoint(directory, config | changes, tensors)
    return tensors

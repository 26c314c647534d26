"""A small gpt-oss checkpoint whose experts are in MXFP4, as OpenAI publishes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.tiny_models import make_target

GPT_OSS = "GptOssForCausalLM"
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def make_mxfp4_target(directory: Path, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Save a random target with experts in MXFP4 and return its model, whose experts `transformers` has dequantised."""
    fields = {"hidden_size": 64, "intermediate_size": 96} | changes
    model = make_target(directory, seed, GPT_OSS, **fields)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        with torch.no_grad():
            weights = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).copy_(weights)
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    put(directory / "config.json", config | {"quantization_config": QUANTIZATION})
    return model


def put(file: Path, config: dict[str, Any]) -> None:
    """Write a config."""
    file.write_text(json.dumps(config), encoding="utf-8")

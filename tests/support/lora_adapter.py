"""Random LoRA adapters in PEFT's format, and the target that one is merged into: what an adapter must compute."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapter:
    """An adapter in `directory`. halves: by module, `down` `[rank, in]` and `up` `[out, rank]`, and their scale."""

    directory: Path
    halves: dict[str, tuple[torch.Tensor, torch.Tensor, float]]

    def merged(self, model: PreTrainedModel) -> PreTrainedModel:
        """A copy of `model` whose weights have the adapter in them."""
        merged = copy.deepcopy(model)
        with torch.no_grad():
            for name, (down, up, scale) in self.halves.items():
                weight = merged.get_submodule(name).weight
                weight += (scale * up.double() @ down.double()).to(weight.dtype)
        return merged


def modules_of(model: PreTrainedModel, projections: Sequence[str] = PROJECTIONS) -> Iterator[tuple[str, nn.Linear]]:
    """The projections of the layers that adapters may add to, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name and name.rpartition(".")[2] in projections:
            yield name, module


def make_adapter(
    directory: Path,
    model: PreTrainedModel,
    rank: int = 3,
    projections: Sequence[str] = PROJECTIONS,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
    size: float = 0.15,
    **fields: Any,
) -> Adapter:
    """Save an adapter for `model`, large enough that texts differ. fields: of its config, over the usual ones."""
    generator = torch.Generator().manual_seed(seed)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(projections),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        **fields,
    }
    halves = {}
    for name, module in modules_of(model, projections):
        own = int(_of_pattern(config["rank_pattern"], name, rank))
        alpha = _of_pattern(config["alpha_pattern"], name, config["lora_alpha"])
        scale = alpha / (math.sqrt(own) if config["use_rslora"] else own)
        down = torch.randn(own, module.in_features, generator=generator).to(dtype) * size
        up = torch.randn(module.out_features, own, generator=generator).to(dtype) * size
        halves[name] = down, up, scale
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors_of(halves), directory / "adapter_model.safetensors")
    return Adapter(directory, {name: (down.float(), up.float(), scale) for name, (down, up, scale) in halves.items()})


def tensors_of(halves: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]) -> dict[str, torch.Tensor]:
    """As PEFT names them."""
    return {
        f"base_model.model.{name}.lora_{side}.weight": tensor.contiguous()
        for name, (down, up, _) in halves.items()
        for side, tensor in (("A", down), ("B", up))
    }


def _of_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    return next((value for pattern, value in patterns.items() if name.endswith(pattern)), default)

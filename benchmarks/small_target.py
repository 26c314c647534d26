"""Random targets as large as a benchmark wants them, whose text means nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_backend.checkpoints import read_target
from dflash_backend.checkpoints.weights import expected_tensors
from dflash_backend.models.decoder import TargetWeights


def write_small_target(directory: Path, config: Mapping[str, Any]) -> Path:
    """Save a target with the tensors that `config`, a published `config.json`, asks for: float32, small random
    weights. Returns its directory."""
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # What a config means may depend on which layers there are.
    layers = range(config["num_hidden_layers"])
    save_file({f"model.layers.{i}.x": torch.zeros(1) for i in layers}, directory / "model.safetensors")
    spec = read_target(directory)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(each.shape, generator=generator) * 0.05
        for name, each in expected_tensors(lambda source: TargetWeights.read(source, spec)).items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory

"""Copies of the demo drafter that draft worse: from the wrong layers of the target, or with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash_backend.config import asset_path


def shifted_drafter(offset: int, folder: Path) -> Path:
    """A copy in `folder` with `offset` added to every target layer id."""
    directory = _copied(folder / f"shifted{offset:+d}")
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ids = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [i + offset for i in ids]
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def random_drafter(folder: Path) -> Path:
    """A copy in `folder` with random weights."""
    directory = _copied(folder / "random")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(directory / "model.safetensors")
    scaled = {
        name: (0.05 * torch.randn(value.shape, generator=generator)).to(value.dtype) for name, value in weights.items()
    }
    save_file(scaled, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _copied(directory: Path) -> Path:
    return Path(shutil.copytree(asset_path("demo", "pair", "draft"), directory))

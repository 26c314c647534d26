"""A drafter in the speculators format, written from the small z-lab one, and edits of checkpoints, for these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_backend.config import asset_path
from tests.speculators_checkpoint import speculators_config
from tests.tiny_models import HIDDEN, VOCAB_SIZE, make_draft, save_checkpoint

DRAFT_VOCAB_SIZE = 24


def make_speculators(directory: Path, target: str | None = None, **changes: Any) -> None:
    """Save a speculators drafter with a vocabulary of its own: every fourth token of the target's."""
    tensors = make_draft(directory)
    config = json.loads((directory / "config.json").read_text())
    tensors["lm_head.weight"] = torch.randn(DRAFT_VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(2))
    tensors["d2t"] = 3 * torch.arange(DRAFT_VOCAB_SIZE)
    tensors["t2d"] = torch.arange(VOCAB_SIZE) % 4 == 0
    save_checkpoint(directory, speculators_config(config, target, DRAFT_VOCAB_SIZE, k=5) | changes, tensors)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def put(path: Path, **fields: Any) -> None:
    """Set top-level fields of a JSON file."""
    edit(path, lambda data: data.update(fields))


def make_dflash2(
    directory: Path, taps: int = 2, group_size: int = 8, rank: int = 6, top_k: int = 5, **changes: Any
) -> dict[str, torch.Tensor]:
    """Save a random z-lab DFlash2 drafter for `make_target`'s model and return its tensors."""
    tensors = make_draft(directory)
    config = json.loads((directory / "config.json").read_text())
    own = {"conv_kernel_size": taps, "conv_group_size": group_size, "selector_rank": rank, "selector_top_k": top_k}
    config |= {"architectures": ["DFlash2DraftModel"], "dflash_config": config["dflash_config"] | own}
    tensors |= dflash2_tensors(config, seed=3)
    save_checkpoint(directory, config | changes, tensors)
    return tensors


def dflash2_tensors(config: dict[str, Any], seed: int, scale: float = 0.5) -> dict[str, torch.Tensor]:
    """Random convolutions and a random selector for a z-lab drafter with this config. scale: of the convolutions' part
    that is not the identity."""
    own, hidden, vocab = config["dflash_config"], config["hidden_size"], config["vocab_size"]
    taps, rank, groups = own["conv_kernel_size"], own["selector_rank"], hidden // own["conv_group_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    found = {
        "candidate_selector.hidden_projection.weight": random(rank, hidden),
        "candidate_selector.predecessor_codebook": random(vocab, rank),
        "candidate_selector.successor_codebook": random(vocab, rank),
    }
    for layer in range(config["num_hidden_layers"]):
        for name in (f"layers.{layer}.attention_conv", f"layers.{layer}.mlp_conv"):
            base = random(2, taps, hidden)
            base[:, 0] += 1.0
            found[f"{name}.base_kernel"] = base
            found[f"{name}.kernel_projection.weight"] = random(2 * taps * groups, hidden) / hidden**0.5
    return found


def make_demo_dflash2(directory: Path) -> Path:
    """Save the demo drafter as a DFlash2 drafter with small random convolutions and a small random selector beside
    its own weights, most of whose drafts remain, and return its directory."""
    demo = asset_path("demo", "pair", "draft")
    config = json.loads((demo / "config.json").read_text())
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8}
    config |= {"architectures": ["DFlash2DraftModel"], "dflash_config": config["dflash_config"] | own}
    tensors = load_file(demo / "model.safetensors") | dflash2_tensors(config, seed=4, scale=0.15)
    return save_checkpoint(directory, config, tensors)

"""A drafter in the speculators format, written from the small z-lab one, and edits of checkpoints, for these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny_models import MASK_TOKEN_ID, TARGET_LAYER_IDS, VOCAB_SIZE, make_draft

DRAFT_VOCAB_SIZE = 24


def make_speculators(directory: Path, target: str | None = None, **changes: Any) -> None:
    """Save a speculators drafter with a vocabulary of its own: every fourth token of the target's."""
    tensors = make_draft(directory)
    layer = json.loads((directory / "config.json").read_text())
    for field in ("architectures", "block_size", "num_target_layers", "dflash_config", "dtype"):
        del layer[field]
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [i + 1 for i in TARGET_LAYER_IDS],
        "mask_token_id": MASK_TOKEN_ID,
        "block_size": 8,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": ["Qwen3ForCausalLM"]},
        },
        "dtype": "float32",
    } | changes
    tensors["lm_head.weight"] = torch.randn(DRAFT_VOCAB_SIZE, 32, generator=torch.Generator().manual_seed(2))
    tensors["d2t"] = 3 * torch.arange(DRAFT_VOCAB_SIZE)
    tensors["t2d"] = torch.arange(VOCAB_SIZE) % 4 == 0
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def put(path: Path, **fields: Any) -> None:
    """Set top-level fields of a JSON file."""
    edit(path, lambda data: data.update(fields))

"""A drafter in the speculators format, written from the small z-lab one, and edits of checkpoints, for these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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

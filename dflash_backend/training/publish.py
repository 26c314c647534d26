"""Writes a drafter as it is served, and what its training was like: `train.json` and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_backend.training.formats import SPECULATORS, Naming, config_fields
from dflash_backend.training.loop import save_atomically
from dflash_backend.training.network import DrafterConfig, DraftModel


@dataclass(frozen=True)
class Publication:
    """How a drafter is written. fields: the `config.json` of the drafter that training began with; None for a new
    one's. tensors: what goes beside the trained ones."""

    config: DrafterConfig
    form: str
    naming: Naming
    fields: Mapping[str, Any] | None
    tensors: Mapping[str, Tensor]

    def write(self, draft: DraftModel, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` (bf16). Raises `TrainingError`."""
        trained = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in draft.state_dict().items()}
        tensors = {name: tensor.contiguous() for name, tensor in {**self.tensors, **trained}.items()}
        fields = self.fields or config_fields(self.config, self.form, self.naming)
        save_atomically(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        write_json(folder / "config.json", fields)


def vocabulary_tensors(
    draft_tokens: Tensor | None, head: Tensor | None, vocab_size: int, form: str
) -> dict[str, Tensor]:
    """What a smaller vocabulary adds: `d2t`, what to add to a draft id, in the format of speculators `t2d` too, and
    the LM head's rows, which other engines do not take from the target; None leaves them out."""
    if draft_tokens is None:
        return {}
    tokens = draft_tokens.cpu()
    found = {"d2t": tokens - torch.arange(len(tokens))}
    if head is not None:
        found["lm_head.weight"] = head.detach().to("cpu", torch.bfloat16)
    if form == SPECULATORS:
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[tokens] = True
        found["t2d"] = t2d
    return found


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file. Raises `TrainingError`."""
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    save_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def plot(path: Path, losses: Sequence[tuple[int, float]], evaluations: Sequence[Mapping[str, Any]], title: str) -> bool:
    """Loss and held-out acceptance length by step. False where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot([step for step, _ in losses], [loss for _, loss in losses], color="tab:blue", linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color="tab:blue")
    axes.grid(alpha=0.3)
    right = axes.twinx()
    lengths = [each["acceptance_length"] for each in evaluations]
    right.plot([each["step"] for each in evaluations], lengths, color="black", marker="o", markersize=4)
    right.set_ylabel("acceptance length on held-out prompts")
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    save_atomically(path, lambda partial: figure.savefig(partial, dpi=120, format="png"))
    pyplot.close(figure)
    return True

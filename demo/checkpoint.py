"""Write and read the pair, in bf16, in the formats that serving loads: Hugging Face Qwen3, and that of the drafter's
kind."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demo.hybrid import ARCHITECTURE, HybridTarget, hybrid_config
from demo.kinds import SPECIAL, draft_fields, read_config
from demo.model import PairConfig, TargetModel
from dflash_backend.training.formats import decoder_fields, make_drafter
from dflash_backend.training.network import DraftModel

Target = TargetModel | HybridTarget


def save_target(model: Target, folder: Path) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        **decoder_fields(model.config.shape, model.config.target_layers, SPECIAL),
    }
    if isinstance(model, HybridTarget):
        fields = hybrid_config(model.config).to_dict()
    _write_json(folder / "config.json", fields)
    generation = {key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {**generation, "do_sample": False})
    _write_weights(model, folder)


def save_draft(model: DraftModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` in the format of its kind: no embedding and no LM head."""
    folder.mkdir(parents=True, exist_ok=True)
    assert isinstance(model.config, PairConfig)
    _write_json(folder / "config.json", draft_fields(model.config))
    _write_weights(model, folder)


def read_draft_config(folder: Path) -> PairConfig:
    """The sizes of a saved drafter."""
    return read_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def load_target(folder: Path, config: PairConfig) -> Target:
    """The saved target in float32, its weights rounded to bf16 as serving sees them."""
    model: Target = HybridTarget(config) if is_hybrid(folder) else TargetModel(config)
    model.load_state_dict(_read_weights(folder))
    return model


def is_hybrid(folder: Path) -> bool:
    """Whether the saved target has Qwen3.5's layers."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(fields["architectures"] == [ARCHITECTURE])


def make_target(config: PairConfig) -> Target:
    """A target before training."""
    return HybridTarget(config) if config.is_hybrid else TargetModel(config)


def load_extended_target(folder: Path, config: PairConfig, parts: dict[int, tuple[int, int]]) -> Target:
    """As `load_target`, with more ids than were saved; a new id's embedding is the mean of its two parts'. A hybrid
    target begins with what it shares with a saved one that is not."""
    model = make_target(config)
    weights = _read_weights(folder)
    name = "model.embed_tokens.weight"
    rows = list(weights[name])
    rows += [torch.zeros(config.shape.hidden_size)] * (config.shape.vocab_size - len(rows))
    for token, (first, second) in parts.items():
        if token >= len(weights[name]):
            rows[token] = (rows[first] + rows[second]) / 2
    weights[name] = torch.stack(rows)
    if isinstance(model, HybridTarget) and not is_hybrid(folder):
        model.begin_from(weights)
    else:
        model.load_state_dict(weights)
    return model


def load_draft(folder: Path, config: PairConfig) -> DraftModel:
    """The saved drafter in float32, its weights rounded to bf16 as serving sees them."""
    model = make_drafter(config)
    model.load_state_dict(_read_weights(folder))
    return model


def _read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def _write_weights(model: nn.Module, folder: Path) -> None:
    weights = model.state_dict().items()
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights}
    temporary = folder / "model.safetensors.partial"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(folder / "model.safetensors")


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

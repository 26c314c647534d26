"""Which family a target architecture belongs to. A new family is one file and one line here."""

from __future__ import annotations

import torch

from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.models import llama, mistral, qwen2, qwen3, qwen3_moe
from dflash_backend.models.decoder import DecoderTarget, Family
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.ops import LayerOps

TARGETS: dict[str, Family] = {
    "LlamaForCausalLM": llama.layer_config,
    "MistralForCausalLM": mistral.layer_config,
    "Qwen2ForCausalLM": qwen2.layer_config,
    "Qwen3ForCausalLM": qwen3.layer_config,
    "Qwen3MoeForCausalLM": qwen3_moe.layer_config,
}


def load_target(
    spec: TargetSpec,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    ops: LayerOps | None = None,
) -> TargetModel:
    """Load the target that `spec` names, able to run positions below `max_positions`. `ops`: None takes what suits the
    device. Raises `CheckpointError`."""
    return DecoderTarget.load(spec, TARGETS[spec.architecture], max_positions, dtype, device, progress, ops)

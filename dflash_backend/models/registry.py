"""Which class runs which target architecture. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.qwen3 import Qwen3Target

Loader = Callable[[TargetSpec, int, torch.dtype, torch.device, Progress | None], TargetModel]

TARGETS: dict[str, Loader] = {"Qwen3ForCausalLM": Qwen3Target.load}


def load_target(
    spec: TargetSpec, max_positions: int, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> TargetModel:
    """Load the target that `spec` names, able to run positions below `max_positions`."""
    return TARGETS[spec.architecture](spec, max_positions, dtype, device, progress)

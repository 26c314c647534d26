"""How much memory and time a run takes, and whether it fits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dflash_backend.training.errors import TrainingError
from dflash_backend.training.loop import ANCHOR_EVERY, LoopOptions
from dflash_backend.training.loss import MAX_LOGITS
from dflash_backend.training.network import DrafterConfig, Tables

GIB = 1 << 30
# Float32 weights, their gradients, and two moments of each.
BYTES_PER_WEIGHT = 16
# Numbers of hidden size that a layer keeps of a query for its gradient, and of the MLP's size.
KEPT_HIDDEN, KEPT_INNER = 14, 4
FREE_SHARE = 0.95


@dataclass(frozen=True)
class Memory:
    """Bytes of a run beside the target. weights: of the drafter, its gradients and moments. tables: embedding and LM
    head. batch: what a step keeps until its gradients are there."""

    weights: int
    tables: int
    batch: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.tables + self.batch

    def __str__(self) -> str:
        return (
            f"{self.total / GIB:.1f} GiB beside the target ({self.weights / GIB:.1f} weights and their moments, "
            f"{self.tables / GIB:.1f} embedding and head, {self.batch / GIB:.1f} a batch)"
        )


def memory_of(config: DrafterConfig, draft: nn.Module, tables: Tables, options: LoopOptions) -> Memory:
    """What a run takes, estimated."""
    num_weights = sum(parameter.numel() for parameter in draft.parameters())
    held = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in (tables.embedding, tables.head)}
    size, shape = 2 if options.bf16 else 4, config.shape
    queries = options.batch_tokens // ANCHOR_EVERY * (config.num_drafts + 1)
    layers = config.draft_layers
    kept = KEPT_HIDDEN * shape.hidden_size + KEPT_INNER * shape.intermediate_size
    # Scores of each query over its row, at most as long as a batch; half of that is usual.
    scores = 3 * shape.num_attention_heads * (options.batch_tokens // 2 + config.num_drafts)
    batch = queries * layers * (kept + scores) * size
    batch += options.batch_tokens * (len(config.target_layer_ids) + 4 * layers) * shape.hidden_size * size
    return Memory(
        num_weights * BYTES_PER_WEIGHT, sum(held.values()), batch + 3 * 4 * MAX_LOGITS[tables.head.device.type]
    )


def free_bytes(device: torch.device) -> int:
    """Memory that a process of a run on this device can take now: of a CPU each one of `torchrun` has its share."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // processes
    raise TrainingError("/proc/meminfo does not say how much memory is available")


def check_fits(memory: Memory, free: int) -> None:
    """Raise `TrainingError` where a run would not fit."""
    if memory.total > FREE_SHARE * free:
        raise TrainingError(
            f"training takes about {memory}, and {free / GIB:.1f} GiB are free: lower --batch-tokens, --layers or "
            "--draft-vocab, or free memory that other programs hold"
        )

"""The optimiser of a drafter, and its schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Parts of the names of matrices with a row for each token.
TABLES = ("embed", "codebook", "markov")
WARM_UP, DECAY, LAST = 0.02, 0.6, 0.02
"""Shares of a run that warm up and decay, and the share of the learning rate that is left at its end."""


class Optimizer:
    """Muon for the matrices inside layers, AdamW for tables of tokens and norms, gradients clipped to norm 1.

    Muon is by Jordan et al., 2024; its learning rate is matched to AdamW's update size, so both share one number.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.parameters = list(model.parameters())
        is_matrix = {n: p.dim() == 2 and not any(table in n for table in TABLES) for n, p in model.named_parameters()}
        matrices = [p for n, p in model.named_parameters() if is_matrix[n]]
        others = [p for n, p in model.named_parameters() if not is_matrix[n]]
        self.learning_rate = learning_rate
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def step(self, progress: float) -> None:
        """One update at `progress` of the run, 0 to 1: linear warm-up, flat, linear decay."""
        scale = min(1.0, progress / WARM_UP, max(LAST, (1.0 - progress) / DECAY))
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * max(scale, LAST)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """What `restore` takes."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from where another one was."""
        for optimizer, one in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(one)

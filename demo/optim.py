"""Optimiser, schedule and progress lines that both training runs share."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from demo.parallel import average_gradients, rank

# Parts of the names of matrices with a row for each token.
TABLES = ("embed", "codebook")


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
        """One update at `progress` of the run, 0 to 1: linear warm-up, flat, linear decay to 2 %."""
        scale = min(1.0, progress / 0.02, max(0.02, (1.0 - progress) / 0.6))
        average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * max(scale, 0.02)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def bf16_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters cast to bf16 for `torch.func.functional_call`; gradients reach the float32 masters."""
    return {name: parameter.to(torch.bfloat16) for name, parameter in model.named_parameters()}


@dataclass
class Progress:
    """How far a run of `total` steps is; nothing in it depends on the time that the steps take."""

    total: int
    steps: int = 0
    tokens: int = 0
    loss: float = math.nan
    started: float = field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        """0 at the start, 1 at the end."""
        return self.steps / self.total

    def tick(self, tokens: int, loss: float) -> None:
        """Count one step of this worker with its tokens and its loss."""
        self.steps += 1
        self.tokens += tokens
        self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss

    def report(self, label: str) -> None:
        """Print one plain progress line, with worker 0's average loss and its tokens a second."""
        if rank() != 0:
            return
        elapsed = time.monotonic() - self.started
        remaining = elapsed * (self.total - self.steps) / self.steps
        print(
            f"{label} step {self.steps} of {self.total} loss {self.loss:.4f} {self.tokens / elapsed:,.0f} tokens/s "
            f"ETA {remaining / 60:.1f} min",
            flush=True,
        )

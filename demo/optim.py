"""What both training runs share beside the optimiser: rounded parameters and progress lines."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from demo.parallel import rank


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

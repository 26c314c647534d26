"""Train the demo's target on packed rows: short rows first, then rows of 2,048 and 4,096 tokens among them."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.checkpoint import load_target, save_target
from demo.data import training_documents
from demo.model import PairConfig, TargetModel
from demo.optim import Clock, Optimizer, bf16_parameters
from demo.packing import PROMPT_WEIGHT, PackedRows
from demo.parallel import rank
from demo.tokenizer import load_tokenizer

LEARNING_RATE = 4e-3
LONG_ROWS_FROM = 0.7
LONG_ROWS_EVERY = 3
LONGEST_ROWS_EVERY = 8
"""From LONG_ROWS_FROM on one batch in three is long, and one long batch in eight has the full context."""
SHORT, LONG, LONGEST = (16, 256), (2, 2048), (1, 4096)
"""Rows and their length in tokens, by kind of batch."""

P = ParamSpec("P")
R = TypeVar("R")
LossFunction = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


def target_loss(model: TargetModel) -> LossFunction:
    """Next-token cross-entropy of tokens [batch, length] with one weight for each predicted token."""

    def loss(parameters: dict[str, Tensor], tokens: Tensor, weights: Tensor) -> Tensor:
        hidden, _ = torch.func.functional_call(model, parameters, (tokens,))
        logits = F.linear(hidden[:, :-1], parameters["model.embed_tokens.weight"]).float()
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (each * weights).sum() / weights.sum()

    return loss


def compiled(loss: Callable[P, R]) -> Callable[P, R]:
    """The loss compiled for its shapes where a C++ compiler exists, else as it is."""
    return torch.compile(loss, dynamic=False) if shutil.which("g++") else loss


def train_target(
    config: PairConfig, out: Path, minutes: float, max_steps: int | None, seed: int, resume: Path | None = None
) -> None:
    """Train and save the target under `out`, which holds its tokenizer; `resume` continues from a saved one."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(out)
    clock = Clock(minutes, max_steps)
    model = TargetModel(config)
    if resume is not None:
        model.load_state_dict(load_target(resume, config).state_dict())
    optimizer = Optimizer(model, LEARNING_RATE)
    eager = target_loss(model)
    fast = compiled(eager) if clock.max_steps is None else eager
    short = PackedRows(tokenizer, training_documents(f"{seed}/target/short/{rank()}", drill_share=0.3))
    long = PackedRows(tokenizer, training_documents(f"{seed}/target/long/{rank()}", long_share=0.08))
    average = math.nan
    while (progress := clock.progress()) < 1:
        rows, shape, loss = short, SHORT, fast
        if progress >= LONG_ROWS_FROM and clock.steps % LONG_ROWS_EVERY == 0:
            rows, shape = long, LONG
            if clock.steps // LONG_ROWS_EVERY % LONGEST_ROWS_EVERY == 0:
                shape, loss = LONGEST, eager
        tokens, is_answer = rows.batch(*shape)
        weights = torch.where(is_answer[:, 1:], 1.0, PROMPT_WEIGHT).flatten()
        value = loss(bf16_parameters(model), tokens, weights)
        torch.autograd.backward(value)
        optimizer.step(progress)
        clock.tick(tokens.numel())
        average = value.item() if math.isnan(average) else 0.95 * average + 0.05 * value.item()
        if clock.steps % 25 == 0:
            clock.report("target", average)
    if rank() == 0:
        save_target(model, out)

"""Train the demo's target on packed rows: short rows first, then rows of 2,048 and 4,096 tokens among them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.checkpoint import Target, load_extended_target, make_target, save_target
from demo.data import training_documents
from demo.model import PairConfig
from demo.optim import Progress, bf16_parameters
from demo.packing import PROMPT_WEIGHT, PackedRows
from demo.parallel import average_gradients, rank
from demo.tokenizer import load_tokenizer, merged_ids
from dflash_backend.training.optim import Optimizer

LEARNING_RATE = 4e-3
RESUMED_LEARNING_RATE = 2.5e-3
SUM_SHARE = 0.1
COPY_SHARE = 0.2
"""Of the documents in short rows: short sums, and texts written twice or edited."""
SAVE_EVERY = 100
FEWEST_STEPS_TO_COMPILE = 100
LONG_ROWS_FROM = 0.7
LONG_ROWS_EVERY = 3
LONGEST_ROWS_EVERY = 8
"""From LONG_ROWS_FROM on one batch in three is long, and one long batch in eight has the full context."""
SHORT, LONG, LONGEST = (4, 512), (1, 2048), (1, 4096)
"""Rows and their length in tokens, by kind of batch."""

P = ParamSpec("P")
R = TypeVar("R")
LossFunction = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


def target_loss(model: Target) -> LossFunction:
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


def train_target(config: PairConfig, out: Path, steps: int, seed: int, resume: Path | None = None) -> None:
    """Train and save the target under `out`, which holds its tokenizer; `resume` continues from a saved one.

    It is also saved every `SAVE_EVERY` steps, so that a run that is stopped loses little.
    """
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(out)
    progress = Progress(steps)
    model = make_target(config)
    if resume is not None:
        model = load_extended_target(resume, config, merged_ids(out))
    optimizer = Optimizer(model, LEARNING_RATE if resume is None else RESUMED_LEARNING_RATE)
    eager = target_loss(model)
    fast = compiled(eager) if steps >= FEWEST_STEPS_TO_COMPILE and not config.is_hybrid else eager
    short = PackedRows(
        tokenizer, training_documents(f"{seed}/target/short/{rank()}", sum_share=SUM_SHARE, copy_share=COPY_SHARE)
    )
    long = PackedRows(tokenizer, training_documents(f"{seed}/target/long/{rank()}", long_share=0.08))
    while progress.share < 1:
        rows, shape, loss = short, SHORT, fast
        if progress.share >= LONG_ROWS_FROM and progress.steps % LONG_ROWS_EVERY == 0:
            rows, shape = long, LONG
            if progress.steps // LONG_ROWS_EVERY % LONGEST_ROWS_EVERY == 0:
                shape, loss = LONGEST, eager
        tokens, is_answer = rows.batch(*shape)
        weights = torch.where(is_answer[:, 1:], 1.0, PROMPT_WEIGHT).flatten()
        value = loss(bf16_parameters(model), tokens, weights)
        torch.autograd.backward(value)
        average_gradients(optimizer.parameters)
        optimizer.step(progress.share)
        progress.tick(tokens.numel(), value.item())
        if progress.steps % 25 == 0:
            progress.report("target")
        if rank() == 0 and (progress.steps % SAVE_EVERY == 0 or progress.steps == steps):
            save_target(model, out)

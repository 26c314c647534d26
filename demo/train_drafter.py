"""Train the demo's drafter on the frozen target's hidden states: random anchors, masked blocks, decayed loss."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from demo.checkpoint import Target, load_draft, load_target, save_draft
from demo.data import training_documents
from demo.hybrid import HybridTarget
from demo.model import PairConfig
from demo.optim import Progress, bf16_parameters
from demo.packing import PackedRows
from demo.parallel import average_gradients, rank
from demo.tokenizer import load_tokenizer
from demo.train_target import FEWEST_STEPS_TO_COMPILE, RESUMED_LEARNING_RATE, SAVE_EVERY, compiled
from dflash_backend.training.formats import make_drafter
from dflash_backend.training.loss import DraftBatch, draw_blocks, weighted_mean
from dflash_backend.training.network import DraftModel, Tables
from dflash_backend.training.optim import Optimizer

LEARNING_RATE = 4e-3
LONG_ROWS_FROM = 0.5
LONG_ROWS_EVERY = 3
LONGEST_ROWS_EVERY = 8
"""From LONG_ROWS_FROM on one batch in three is long, and one long batch in eight has the full context."""


@dataclass(frozen=True)
class BatchShape:
    """Rows of packed tokens and the number of anchors drawn in each."""

    rows: int
    length: int
    anchors: int


SHORT, LONG, LONGEST = BatchShape(4, 512, 44), BatchShape(1, 2048, 128), BatchShape(1, 4096, 160)


class DraftLoss(nn.Module):
    """The weighted mean of a drafter's losses over a batch of blocks."""

    def __init__(self, draft: DraftModel) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, embedding: Tensor, features: Tensor, batch: DraftBatch) -> Tensor:
        return weighted_mean(self.draft.losses(Tables(embedding, embedding), features, batch), batch.weights)


def draft_loss(whole: DraftLoss) -> Callable[[dict[str, Tensor], Tensor, Tensor, DraftBatch], Tensor]:
    """`whole` as a function of its parameters, the target's embedding [vocab, hidden], features [rows, length,
    layers * hidden] and a batch."""

    def loss(parameters: dict[str, Tensor], embedding: Tensor, features: Tensor, batch: DraftBatch) -> Tensor:
        found: Tensor = torch.func.functional_call(whole, parameters, (embedding, features, batch))
        return found

    return loss


@torch.no_grad()
def target_features(target: Target, tokens: Tensor) -> Tensor:
    """What serving computes: float32 features of the bf16-rounded target, [rows, length, layers * hidden]."""
    features: Tensor = target(tokens)[1]
    return features


def train_drafter(
    config: PairConfig, target_folder: Path, out: Path, steps: int, seed: int, resume: Path | None = None
) -> None:
    """Train a drafter for a saved target and save it under `out`; `resume` continues from a saved one.

    Answers come from the generator: the target gives them back word for word at nearly every prompt. The drafter is
    also saved every `SAVE_EVERY` steps.
    """
    torch.manual_seed(seed)
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed * 1000 + rank())
    tokenizer, target = load_tokenizer(target_folder), load_target(target_folder, config)
    progress = Progress(steps)
    draft = make_drafter(config)
    if resume is not None:
        draft.load_state_dict(load_draft(resume, config).state_dict())
    optimizer = Optimizer(draft, LEARNING_RATE if resume is None else RESUMED_LEARNING_RATE)
    whole = DraftLoss(draft)
    fast_loss = eager_loss = draft_loss(whole)
    fast_features = target_features
    if steps >= FEWEST_STEPS_TO_COMPILE:
        fast_loss = compiled(eager_loss)
        fast_features = target_features if isinstance(target, HybridTarget) else compiled(target_features)
    embedding = target.model.embed_tokens.weight.detach().to(torch.bfloat16)
    short = PackedRows(tokenizer, training_documents(f"{seed}/draft/short/{rank()}"))
    long = PackedRows(tokenizer, training_documents(f"{seed}/draft/long/{rank()}", long_share=0.08))
    while progress.share < 1:
        rows, shape, loss, features_of = short, SHORT, fast_loss, fast_features
        if progress.share >= LONG_ROWS_FROM and progress.steps % LONG_ROWS_EVERY == 0:
            rows, shape = long, LONG
            if progress.steps // LONG_ROWS_EVERY % LONGEST_ROWS_EVERY == 0:
                shape, loss, features_of = LONGEST, eager_loss, target_features
        tokens, is_answer = rows.batch(shape.rows, shape.length)
        batch = draw_blocks(tokens, is_answer, shape.anchors * draft.anchor_factor, config.num_drafts + 1, generator)
        features = features_of(target, batch.tokens).to(torch.bfloat16)
        value = loss(bf16_parameters(whole), embedding, features, batch)
        torch.autograd.backward(value)
        average_gradients(optimizer.parameters)
        optimizer.step(progress.share)
        progress.tick(batch.labels.numel(), value.item())
        if progress.steps % 25 == 0:
            progress.report("drafter")
        if rank() == 0 and (progress.steps % SAVE_EVERY == 0 or progress.steps == steps):
            save_draft(draft, out)

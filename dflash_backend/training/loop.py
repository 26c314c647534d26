"""The training loop: fixed batches in an order that follows from the seed, a checkpoint from which a run goes on bit by
bit, and as many processes as `torchrun` starts.

What a step does follows from its number alone: its batches and its anchors are drawn by the seed and that number. So a
run that was stopped and goes on gives the weights of one that was not, on the same machine with as many threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from dflash_backend.engine.llm import HeldInterrupt
from dflash_backend.training.data import Sample
from dflash_backend.training.errors import TrainingError, cannot_write
from dflash_backend.training.features import Teacher
from dflash_backend.training.loss import Distillation, DraftBatch, TargetStates, decay_of, draw_blocks, weighted_mean
from dflash_backend.training.network import DraftModel, Tables
from dflash_backend.training.optim import Optimizer

ANCHOR_EVERY = 3
"""Answer tokens for each block that is drawn in a step."""
MOST_ANCHORS = 256
SAVE_EVERY_S = 120.0
SMOOTH = 0.95
TIMED_STEPS = 4


@dataclass(frozen=True)
class LoopOptions:
    """How a drafter is trained. steps: of the whole run. batch_tokens: of the rows of a batch, padding included.
    accumulate: batches of a step. decay: how slowly the weights of drafts fall; None: by the block. feature_bytes:
    features that are kept in memory, so that they are computed once. bf16: arithmetic in bfloat16 over float32 weights.
    distillation: what is learnt from the target's final hidden states; None: nothing."""

    steps: int
    learning_rate: float
    batch_tokens: int = 2048
    accumulate: int = 1
    seed: int = 0
    bf16: bool = False
    feature_bytes: int = 1 << 30
    decay: float | None = None
    distillation: Distillation | None = None


@dataclass
class Progress:
    """How far a run is. evaluated: the step of the last evaluation. loss: smoothed. losses: step and loss of each
    report. seconds: spent on steps."""

    step: int = 0
    evaluated: int = 0
    tokens: int = 0
    loss: float = math.nan
    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    def tick(self, tokens: int, loss: float, seconds: float) -> None:
        """Count one step."""
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds
        self.loss = loss if math.isnan(self.loss) else SMOOTH * self.loss + (1 - SMOOTH) * loss


class BlockLoss(nn.Module):
    """A drafter's mean loss over blocks, as one module: what DDP wraps. tables are no parameters. With `distillation`
    the last `hidden_size` numbers of features are the target's final hidden states."""

    def __init__(self, draft: DraftModel, tables: Tables, distillation: Distillation | None = None) -> None:
        super().__init__()
        self.draft = draft
        self._tables, self._distillation = tables, distillation

    def forward(self, features: Tensor, batch: DraftBatch) -> Tensor:
        target, tables = None, self._tables
        if self._distillation is not None:
            size = self.draft.config.shape.hidden_size
            features, states = features[..., :-size], features[..., -size:]
            # The token of draft i is the one that the target chose behind the token before it.
            anchors, device = batch.anchors, batch.anchors.device
            behind = anchors[..., None] + torch.arange(self.draft.config.num_drafts, device=device)
            row = torch.arange(len(anchors), device=device)[:, None, None]
            states = states[row, behind.clamp(max=states.shape[1] - 1)]
            head = tables.head if tables.target_head is None else tables.target_head
            target = TargetStates(states, head, self._distillation, tables.softcap)
        return weighted_mean(self.draft.losses(tables, features, batch, target), batch.weights)


def make_batches(samples: Sequence[Sample], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices of samples in batches of rows of like length, the same for a seed. Padding counts."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    order.sort(key=lambda index: len(samples[index].token_ids))
    batches: list[list[int]] = []
    for index in order:  # the longest row of a batch is its last
        if batches and (len(batches[-1]) + 1) * len(samples[index].token_ids) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class Trainer:
    """A drafter in training. `capture`: the target's layers that it reads, as `Teacher.features` takes them."""

    def __init__(
        self,
        draft: DraftModel,
        teacher: Teacher,
        tables: Tables,
        samples: Sequence[Sample],
        capture: tuple[int, ...],
        options: LoopOptions,
        can_draft: Tensor | None = None,
    ) -> None:
        self.draft, self.options, self.progress = draft.to(teacher.device), options, Progress()
        self._teacher, self.samples, self._capture = teacher, samples, capture
        if options.distillation is not None:
            self._capture = (*capture, teacher.target.spec.decoder.num_layers)
        self._can_draft = can_draft
        self._device = teacher.device
        self.optimizer = Optimizer(self.draft, options.learning_rate)
        loss = BlockLoss(self.draft, tables, options.distillation)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # EAGLE-3 and DFlash2 use every parameter in each pass, as all kinds do.
        self._loss: Any = nn.parallel.DistributedDataParallel(loss) if self.world > 1 else loss
        self._batches = make_batches(samples, options.batch_tokens, options.seed)
        self._kept: dict[int, Tensor] = {}
        self._kept_bytes = 0
        self._orders: dict[int, list[int]] = {}

    def step(self) -> None:
        """One update."""
        began, tokens, total = time.monotonic(), 0, 0.0
        for part in range(self.options.accumulate):
            last = part + 1 == self.options.accumulate
            index = (self.progress.step * self.options.accumulate + part) * self.world + self.rank
            with contextlib.nullcontext() if last or self.world == 1 else self._loss.no_sync():
                loss, count = self._run(index)
                torch.autograd.backward(loss / self.options.accumulate)
            total += float(loss.detach()) / self.options.accumulate
            tokens += count
        if not math.isfinite(total):
            raise TrainingError(
                f"the loss of step {self.progress.step + 1} is {total}: lower --learning-rate; the "
                "last checkpoint is kept"
            )
        self.optimizer.step(self.progress.step / self.options.steps)
        self.progress.tick(tokens, total, time.monotonic() - began)

    def _run(self, index: int) -> tuple[Tensor, int]:
        """The loss of batch `index` of the whole run, and the drafts that it has."""
        epoch, place = divmod(index, len(self._batches))
        number = self._order(epoch)[place]
        rows = [self.samples[sample] for sample in self._batches[number]]
        features = self._features(number, rows)
        tokens = torch.zeros(features.shape[:2], dtype=torch.int64)
        is_answer = torch.zeros(features.shape[:2], dtype=torch.bool)
        for row, sample in enumerate(rows):
            ids = sample.token_ids
            tokens[row, : len(ids)] = torch.tensor(ids)
            is_answer[row, len(sample.prompt) : len(ids)] = True
        config = self.draft.config
        mean_answer = float(is_answer.sum()) / len(rows)
        anchors = min(MOST_ANCHORS, max(2, round(mean_answer / ANCHOR_EVERY))) * self.draft.anchor_factor
        block = config.num_drafts + 1
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + index)
        decay = self.options.decay or decay_of(block)
        batch = draw_blocks(tokens, is_answer, anchors, block, generator, decay, self._can_draft)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.options.bf16):
            loss: Tensor = self._loss(features, batch.to(self._device))
        return loss, int((batch.weights > 0).sum())

    def _features(self, number: int, rows: Sequence[Sample]) -> Tensor:
        """A batch is always computed whole, so that its features are the same bits whether they are kept or not."""
        found = self._kept.get(number)
        if found is None:
            dtype = torch.bfloat16 if self.options.bf16 else torch.float32
            found = self._teacher.features([row.token_ids for row in rows], self._capture).to(dtype)
            if self._kept_bytes + found.nbytes <= self.options.feature_bytes:
                self._kept[number] = found
                self._kept_bytes += found.nbytes
        return found

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.options.seed + 7919 * (epoch + 1))
            self._orders = {epoch: torch.randperm(len(self._batches), generator=generator).tolist()}
        return self._orders[epoch]

    def seconds_of_a_step(self) -> float:
        """How long a step takes, by a few whose gradients are thrown away."""
        times = []
        for index in range(TIMED_STEPS):
            began = time.monotonic()
            torch.autograd.backward(self._run(index * self.world + self.rank)[0])
            self.draft.zero_grad(set_to_none=True)
            times.append(time.monotonic() - began)
        return max(1e-4, sum(times[1:]) / (len(times) - 1)) * self.options.accumulate

    def state(self) -> dict[str, Any]:
        """All that `restore` needs."""
        return {
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state(),
            "progress": asdict(self.progress),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.draft.load_state_dict(state["draft"])
        self.optimizer.restore(state["optimizer"])
        self.progress = Progress(**state["progress"])


def save_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a file beside `path`, and put it in its place once it is on the disk: a run that ends meanwhile
    leaves the old one whole. Raises `TrainingError`."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        # so torch's archive writer and safetensors say of a disk that takes no more
        raise TrainingError(
            f"{path} cannot be written: {str(error).splitlines()[0]}; make room and run the same command again"
        ) from None


@dataclass
class Schedule:
    """What happens beside steps: a checkpoint now and then, a report every `report_every` steps, an evaluation every
    `evaluate_every` steps, a number that changes with that of all steps. `evaluate` notes what it has done in
    `Progress.evaluated`, and says whether the run is to end."""

    save: Callable[[], None]
    report: Callable[[], None]
    evaluate: Callable[[], bool]
    evaluate_every: Callable[[], int]
    report_every: int = 20


def run_steps(trainer: Trainer, schedule: Schedule, deadline: float | None = None) -> str:
    """Run the steps that are left. Returns why they ended: `steps`, `deadline` or `plateau`, which is what `evaluate`
    says by True. After Ctrl-C the state of whole steps is saved, and `KeyboardInterrupt` raised.

    With a `deadline` (`time.monotonic`) there are as many steps as fit the time up to it, by those of the last
    report: the learning rate falls to its end in any case, and features that are kept make later steps quicker."""
    saved, progress, whole = time.monotonic(), trainer.progress, HeldInterrupt()
    seconds, step = progress.seconds, progress.step
    try:
        while progress.step < trainer.options.steps:
            # Looked at before a step: an evaluation that was interrupted is done when the run goes on.
            if progress.step - progress.evaluated >= schedule.evaluate_every():
                if schedule.evaluate():
                    return "plateau"
                saved = time.monotonic()
            if deadline is not None and time.monotonic() > deadline:
                return "deadline"
            with whole:
                trainer.step()
            if progress.step % schedule.report_every == 0:
                progress.losses.append((progress.step, progress.loss))
                if deadline is not None:
                    left = (deadline - time.monotonic()) * (progress.step - step) / (progress.seconds - seconds)
                    trainer.options = replace(trainer.options, steps=progress.step + max(1, int(left)))
                    seconds, step = progress.seconds, progress.step
                schedule.report()
            if time.monotonic() - saved > SAVE_EVERY_S:
                schedule.save()
                saved = time.monotonic()
        return "steps"
    except KeyboardInterrupt:
        schedule.save()
        raise

"""What a drafter's blocks cost: blocks cut from rows, and cross-entropy by an LM head, some rows at a time.

A drafter learns the tokens that the target chose, and from the hidden states that it chose them by (`Distillation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Float32 logits that exist at a time: 4 MiB, about what a core's own cache holds, or 64 MiB."""


@dataclass(frozen=True)
class DraftBatch:
    """Blocks cut from rows.

    tokens: int64 `[rows, length]`; anchors: int64 `[rows, anchors]`; labels: int64 `[rows, anchors, block]`, the true
    tokens from the anchor on; weights: float32 `[rows, anchors, block - 1]`, 0 past the end of the answer.
    """

    tokens: Tensor
    anchors: Tensor
    labels: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> DraftBatch:
        """The same on a device."""
        return DraftBatch(*(each.to(device) for each in (self.tokens, self.anchors, self.labels, self.weights)))


def decay_of(block: int) -> float:
    """How slowly the weights of drafts fall in blocks of this size: 7 for 16, 4 for 8 (arXiv 2602.06036, appendix)."""
    return {16: 7.0, 8: 4.0}.get(block, max(1.0, 0.44 * block))


def draw_blocks(
    tokens: Tensor,
    is_answer: Tensor,
    anchors: int,
    block: int,
    generator: torch.Generator,
    decay: float = 7.0,
    can_draft: Tensor | None = None,
) -> DraftBatch:
    """Draw anchors evenly from the answer tokens that are followed by another token of their answer.

    Draft i weighs `exp(-(i - 1) / decay)`: a step only gets there when all earlier ones were right. can_draft: bool
    `[vocab]`, the tokens that the drafter can propose; a draft that is none of them ends a block.
    """
    rows, device = tokens.shape[0], tokens.device
    followed = is_answer.clone()
    followed[:, :-1] &= is_answer[:, 1:]
    followed[:, -1] = False
    chances = followed.float() + 1e-9
    anchor_positions = torch.multinomial(chances, anchors, replacement=True, generator=generator)
    padded = F.pad(tokens, (0, block))
    padded_answer = F.pad(is_answer, (0, block))
    positions = anchor_positions[..., None] + torch.arange(block, device=device)
    row = torch.arange(rows, device=device)[:, None, None]
    labels = padded[row, positions]
    counts = padded_answer[row, positions]
    if can_draft is not None:
        # The anchor itself need not be one of them.
        counts = torch.cat((counts[..., :1], counts[..., 1:] & can_draft[labels[..., 1:]]), dim=-1)
    inside = counts.float().cumprod(-1)[..., 1:]
    falling = torch.exp(-torch.arange(block - 1, device=device) / decay)
    return DraftBatch(tokens, anchor_positions, labels, inside * falling)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The mean of losses `[rows, anchors, drafts]` by weights `[rows, anchors, >= drafts]`; 0 where all weights are."""
    weights = weights[..., : losses.shape[-1]]
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)


def head_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """`[..., hidden]` by `[vocab, hidden]`: `[..., vocab]` in float32, or wider where they are."""
    logits = F.linear(hidden.to(head.dtype), head)
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class Distillation:
    """What a drafter learns from the target's final hidden states, beside the tokens that the target chose.

    soft_labels: the share of a draft's loss, 0 to 1, that is by the target's distribution over what can be drafted, at
    `temperature`, in place of the token. hidden: how much the squared distance of the drafter's final hidden state from
    the target's weighs, as a share of the target's square.
    """

    soft_labels: float = 0.0
    temperature: float = 1.0
    hidden: float = 0.0


@dataclass(frozen=True)
class TargetStates:
    """Where the target chose the tokens of drafts: its final hidden states, after the norm, `[..., hidden]`, and the
    rows of its LM head that can be drafted, `[draft vocab, hidden]`. softcap: of its logits; None for none."""

    hidden: Tensor
    head: Tensor
    distillation: Distillation
    softcap: float | None = None

    def of(self, drafts: slice) -> TargetStates:
        """Of states `[n, hidden]` those of some drafts."""
        return replace(self, hidden=self.hidden[drafts])

    def probabilities(self) -> Tensor:
        """`[..., draft vocab]`, float32 or wider."""
        logits = head_logits(self.hidden, self.head)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return torch.softmax(logits / self.distillation.temperature, dim=-1)

    def distance(self, hidden: Tensor) -> Tensor:
        """The squared distance of a drafter's hidden states from these: `[..., hidden]` -> `[...]`."""
        own = hidden if hidden.dtype == torch.float64 else hidden.float()
        aim = self.hidden.to(own.dtype)
        return (own - aim).square().sum(dim=-1) / aim.square().sum(dim=-1).clamp(min=1e-9)


def draft_loss(
    right: Tensor,
    *products: tuple[Tensor, Tensor],
    target: TargetStates | None = None,
    count: int = 0,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The cost of right tokens, int64 `[...]`, by logits that are a sum of products, and of what is to be learnt from
    `target`.

    Each product is of inputs `[..., size]` and a table `[vocab, size]`; gradients reach inputs and those tables that
    want some. The first one's inputs are the drafter's hidden states. The logits of no more than `rows` tokens exist at
    a time, by default of as many as `MAX_LOGITS` allows: they are made once, for losses and gradients, and again where
    a table wants gradients. Returns the cost of each token, float32 `[...]`, and the `count` tokens with the largest
    logits, in their order, int64 `[..., count]`.
    """
    flat = [(inputs.flatten(0, -2).to(table.dtype), table) for inputs, table in products]
    vocab, device = products[0][1].shape[0], right.device
    tensors = [tensor for product in flat for tensor in product]
    rows = rows or max(1, MAX_LOGITS[device.type] // vocab)
    has_soft = target is not None and target.distillation.soft_labels > 0
    states = replace(target, hidden=target.hidden.flatten(0, -2)) if target is not None and has_soft else None
    losses, likeliest = _Rows.apply(right.flatten(), states, rows, min(count, vocab), *tensors)
    losses = losses.view(right.shape)
    if target is not None and target.distillation.hidden > 0:
        losses = losses + target.distillation.hidden * target.distance(products[0][0])
    return losses, likeliest.view(*right.shape, -1)


class _Rows(torch.autograd.Function):
    """Cross-entropy of right tokens `[n]`, and of the target's distribution where there are states, some at a time."""

    @staticmethod
    def forward(
        ctx: Any, right: Tensor, states: TargetStates | None, rows: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[4::2]
        losses, likeliest = [], right.new_empty((len(right), count))
        # Of each row's own loss: what a row's loss weighs is known in `backward` alone.
        slopes = [torch.empty_like(tensor) if want else None for tensor, want in zip(tensors[::2], wanted, strict=True)]
        for first in range(0, len(right), rows):
            part = slice(first, first + rows)
            logits = _logits(tensors, part)
            if count:
                likeliest[part] = logits.topk(count, dim=-1).indices
            cost, change = _cost(logits, right[part], None if states is None else states.of(part), any(wanted))
            losses.append(cost)
            for of_inputs, table in zip(slopes, tensors[1::2], strict=True):
                if of_inputs is not None and change is not None:
                    of_inputs[part] = change.to(table.dtype) @ table
        ctx.rows, ctx.states, ctx.slopes = rows, states, slopes
        ctx.save_for_backward(right, *tensors)
        ctx.mark_non_differentiable(likeliest)
        return torch.cat(losses), likeliest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        right, *tensors = ctx.saved_tensors
        weights, rows = gradients[0][:, None], ctx.rows
        found: list[Tensor | None] = [None] * len(tensors)
        for index, slope in enumerate(ctx.slopes):
            found[2 * index] = None if slope is None else (slope * weights).to(slope.dtype)
        tables = [index for index in range(1, len(tensors), 2) if ctx.needs_input_grad[4 + index]]
        for index in tables:
            found[index] = torch.zeros_like(tensors[index])
        for first in range(0, len(right), rows) if tables else ():
            part = slice(first, first + rows)
            states = None if ctx.states is None else ctx.states.of(part)
            _, change = _cost(_logits(tensors, part), right[part], states, True)
            assert change is not None
            for index in tables:
                inputs = tensors[index - 1][part]
                found[index] += (change * weights[part]).to(inputs.dtype).T @ inputs
        return None, None, None, None, *found


def _cost(
    logits: Tensor, right: Tensor, states: TargetStates | None, wants_change: bool
) -> tuple[Tensor, Tensor | None]:
    """What rows cost, `[n]`, and its slope in each of their logits, `[n, vocab]`, which takes the place of `logits`."""
    own, of_right, likely = logits.gather(-1, right[:, None])[:, 0], 1.0, None
    if states is not None:
        share, likely = states.distillation.soft_labels, states.probabilities()
        of_right = 1 - share
        own = of_right * own + share * (likely * logits).sum(dim=-1)
    losses = torch.logsumexp(logits, dim=-1) - own
    if not wants_change:
        return losses, None
    change = torch.softmax(logits, dim=-1, out=logits)
    if likely is not None:
        change.sub_(likely, alpha=1 - of_right)
    return losses, change.scatter_add_(-1, right[:, None], change.new_full((len(change), 1), -of_right))


def _logits(tensors: Sequence[Tensor], part: slice) -> Tensor:
    """The logits of some rows: `[rows, vocab]`, float32 or wider."""
    total: Tensor | None = None
    for inputs, table in zip(tensors[::2], tensors[1::2], strict=True):
        own = head_logits(inputs[part], table)
        total = own if total is None else total.add_(own)
    assert total is not None
    return total

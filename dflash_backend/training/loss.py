"""What a drafter's blocks cost: blocks cut from rows, and cross-entropy by an LM head in pieces of the vocabulary.

A label is the token that the target chose, or in part the distribution that it chose from (`SoftLabels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOGITS = 1 << 24
"""Float32 logits that exist at a time: 64 MiB."""
FEWEST_COLUMNS = 256


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
class SoftLabels:
    """The part of labels that is a distribution.

    token_ids: int64 `[..., m]`, tokens of the draft vocabulary, by their draft ids. shares: float32 `[..., m]`; what
    their sum leaves to 1 is the share of the token that the target chose.
    """

    token_ids: Tensor
    shares: Tensor

    def at(self, positions: Tensor) -> SoftLabels:
        """Of labels `[rows, length, m]` those at `positions`, int64 `[rows, ...]`: `[rows, ..., m]`. What lies past the
        last one gets the last one's."""
        row = torch.arange(len(positions), device=positions.device).view(-1, *[1] * (positions.dim() - 1))
        index = row, positions.clamp(max=self.token_ids.shape[1] - 1)
        return SoftLabels(self.token_ids[index].long(), self.shares[index])


@dataclass(frozen=True)
class HeadLoss:
    """losses: float32 `[...]`, the cross-entropy of each right token. likeliest: int64 `[..., count]`, the tokens with
    the largest logits, in their order."""

    losses: Tensor
    likeliest: Tensor


def draft_loss(
    right: Tensor,
    *products: tuple[Tensor, Tensor],
    soft: SoftLabels | None = None,
    count: int = 1,
    columns: int | None = None,
) -> HeadLoss:
    """The cost of right tokens, int64 `[...]`, by logits that are a sum of products; with `soft` in part that of its
    tokens.

    Each product is of inputs `[..., size]` and a table `[vocab, size]`; gradients reach inputs and those tables that
    want some. No more than `MAX_LOGITS` logits exist at a time: the vocabulary is walked in pieces of `columns`, forth
    for the sum of exponentials and again for the gradients. count: how many of the likeliest tokens to name.
    """
    flat = [(inputs.flatten(0, -2).to(table.dtype), table) for inputs, table in products]
    vocab = products[0][1].shape[0]
    columns = columns or max(FEWEST_COLUMNS, MAX_LOGITS // max(1, right.numel()))
    tensors = [tensor for product in flat for tensor in product]
    labels, shares = right[..., None], torch.ones_like(right[..., None], dtype=torch.float32)
    if soft is not None:
        labels = torch.cat((labels, soft.token_ids), dim=-1)
        shares = torch.cat((1 - soft.shares.sum(dim=-1, keepdim=True), soft.shares), dim=-1)
    losses, likeliest = _Pieces.apply(
        labels.flatten(0, -2), shares.flatten(0, -2), min(columns, vocab), min(count, vocab), *tensors
    )
    return HeadLoss(losses.view(right.shape), likeliest.view(*right.shape, -1))


class _Pieces(torch.autograd.Function):
    """Cross-entropy over pieces of the vocabulary, of labels `[n, m]` with shares `[n, m]` that add up to 1."""

    @staticmethod
    def forward(
        ctx: Any, labels: Tensor, shares: Tensor, columns: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        vocab, total, own = tensors[1].shape[0], None, None
        values, likeliest = None, None
        for first in range(0, vocab, columns):
            logits = _logits(tensors, first, columns)
            part = torch.logsumexp(logits, dim=-1)
            total = part if total is None else torch.logaddexp(total, part)
            place, inside = _columns_of(labels, first, logits.shape[-1])
            found = (logits.gather(-1, place) * shares * inside).sum(dim=-1)
            own = found if own is None else own + found
            if count:
                likely, where = logits.topk(min(count, logits.shape[-1]), dim=-1)
                where = where + first
                if values is not None and likeliest is not None:
                    likely, where = torch.cat((values, likely), -1), torch.cat((likeliest, where), -1)
                values, order = likely.topk(min(count, likely.shape[-1]), dim=-1)
                likeliest = where.gather(-1, order)
        assert total is not None
        assert own is not None
        ctx.columns = columns
        ctx.save_for_backward(labels, shares, total, *tensors)
        chosen = likeliest if likeliest is not None else labels.new_empty((len(labels), 0))
        ctx.mark_non_differentiable(chosen)
        return total - own, chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        labels, shares, total, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        found: list[Tensor | None] = [torch.zeros_like(t) if w else None for t, w in zip(tensors, wanted, strict=True)]
        vocab, columns, scale = tensors[1].shape[0], ctx.columns, gradients[0][:, None]
        for first in range(0, vocab, columns):
            change = (_logits(tensors, first, columns) - total[:, None]).exp()
            place, inside = _columns_of(labels, first, change.shape[-1])
            change.scatter_add_(-1, place, -(shares * inside).to(change.dtype))
            change = (change * scale).to(tensors[0].dtype)
            for index in range(0, len(tensors), 2):
                inputs, table = tensors[index], tensors[index + 1]
                if (of_inputs := found[index]) is not None:
                    of_inputs += change @ table[first : first + columns]
                if (of_table := found[index + 1]) is not None:
                    of_table[first : first + columns] = change.T @ inputs
        return None, None, None, None, *found


def _columns_of(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Where labels are among the columns from `first` on, and whether they are there: int64 and bool `[n, m]`."""
    place = labels - first
    return place.clamp(0, columns - 1), (place >= 0) & (place < columns)


def _logits(tensors: Any, first: int, columns: int) -> Tensor:
    """The logits of a piece of the vocabulary: `[n, columns]`, float32 or wider."""
    total = None
    for inputs, table in zip(tensors[::2], tensors[1::2], strict=True):
        part = inputs @ table[first : first + columns].T
        part = part if part.dtype == torch.float64 else part.float()
        total = part if total is None else total + part
    assert total is not None
    return total

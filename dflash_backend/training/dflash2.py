"""The DFlash2 drafter as a torch module: the DFlash drafter with a two-tap convolution along each block around every
sublayer, and a selector that chooses drafts one after the other among the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_backend.training.loss import DraftBatch, TargetStates, draft_loss
from dflash_backend.training.network import DrafterConfig, DraftModel, Tables, layers_of

TAPS = 2
CODEBOOK_STD = 0.02


class BlockConv(nn.Module):
    """The convolutions of a sublayer's input and of its output, which begin as the identity."""

    def __init__(self, hidden_size: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * TAPS * (hidden_size // group_size), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def forward(self, normed: Tensor, block: int, run: Callable[[Tensor], Tensor]) -> Tensor:
        """The sublayer `run` between its convolutions; normed: `[batch, blocks * block, hidden]`."""
        dynamic = self.kernel_projection(normed).unflatten(-1, (2, TAPS, -1))
        before = self._convolve(normed, self.base_kernel[0], dynamic[..., 0, :, :], block)
        return self._convolve(run(before), self.base_kernel[1], dynamic[..., 1, :, :], block)

    def _convolve(self, x: Tensor, base: Tensor, dynamic: Tensor, block: int) -> Tensor:
        groups = dynamic.shape[-1]
        kernel = base.to(x.dtype).unflatten(-1, (groups, -1)) + dynamic.to(x.dtype)[..., None]
        grouped = x.unflatten(-1, (groups, -1))
        # Zeros stand for what would be before a block's anchor.
        previous = F.pad(grouped.unflatten(1, (-1, block))[:, :, :-1], (0, 0, 0, 0, 1, 0)).flatten(1, 2)
        return (kernel[..., 0, :, :] * grouped + kernel[..., 1, :, :] * previous).flatten(-2)


class CandidateSelector(nn.Module):
    """The edges between a token and the candidates that may follow it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        shape, rank = config.shape, config.selector_rank
        self.hidden_projection = nn.Linear(shape.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(shape.vocab_size, rank) * CODEBOOK_STD)
        self.successor_codebook = nn.Parameter(torch.randn(shape.vocab_size, rank) * CODEBOOK_STD)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Edges `[..., candidates]` of drafts with final hidden states `[..., hidden]`, from `previous` `[...]`."""
        context = self.hidden_projection(hidden) * self.predecessor_codebook[previous].to(hidden.dtype)
        return (self.successor_codebook[candidates].to(context.dtype) @ context[..., None])[..., 0]


class DFlash2DraftModel(DraftModel):
    """A DFlash2 drafter."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        size, group = config.shape.hidden_size, config.conv_group_size
        for layer in layers_of(self.layers):
            layer.attention_conv = BlockConv(size, group)
            layer.mlp_conv = BlockConv(size, group)
        self.candidate_selector = CandidateSelector(config)

    def sublayer(self, index: int, name: str, normed: Tensor, run: Callable[[Tensor], Tensor], block: int) -> Tensor:
        out: Tensor = getattr(self.layers[index], f"{name}_conv")(normed, block, run)
        return out

    def losses(self, tables: Tables, features: Tensor, batch: DraftBatch, target: TargetStates | None = None) -> Tensor:
        """The drafter's own loss, and that of the selector: cross-entropy of each draft's right token among its
        candidates, behind the right token before it. Where the right token is no candidate it takes the last one's
        place."""
        labels, count = batch.labels, self.config.selector_top_k
        hidden = self.outputs(tables, features, batch.anchors, labels[..., 0])[:, :, 1:]
        losses, likeliest = draft_loss(labels[..., 1:], (hidden, tables.head), target=target, count=count)
        return losses + selector_loss(self.candidate_selector, tables.head, hidden, labels, likeliest)


def selector_loss(
    edges: Callable[[Tensor, Tensor, Tensor], Tensor], head: Tensor, hidden: Tensor, labels: Tensor, likeliest: Tensor
) -> Tensor:
    """Cross-entropy of each draft's right token among its candidates, behind the right token before it.

    edges: `CandidateSelector.forward`. head: `[vocab, hidden]`. hidden: `[..., block - 1, hidden]`. labels: int64
    `[..., block]`, the anchor first. likeliest: int64 `[..., block - 1, k]`, candidates, of which the right token takes
    the last one's place where it is none of them. Returns `[..., block - 1]`.
    """
    right = labels[..., 1:, None]
    missing = (likeliest != right).all(dim=-1, keepdim=True)
    candidates = torch.cat((likeliest[..., :-1], torch.where(missing, right, likeliest[..., -1:])), dim=-1)
    place = (candidates == right).int().argmax(dim=-1)
    logits = (head[candidates] @ hidden.to(head.dtype)[..., None])[..., 0]
    scores = logits + edges(hidden, labels[..., :-1], candidates).to(logits.dtype)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return F.cross_entropy(scores.flatten(0, -2), place.flatten(), reduction="none").view(place.shape)

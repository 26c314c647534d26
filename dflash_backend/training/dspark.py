"""The DSpark drafter as a torch module: a DFlash drafter whose anchor gives the first draft, with a bias on each
draft's logits that follows from the token before it, and a head that says how sure it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_backend.training.loss import DraftBatch, TargetStates, draft_loss
from dflash_backend.training.network import DrafterConfig, DraftModel, Tables

TABLE_STD = 0.02


class MarkovHead(nn.Module):
    """The bias that a token gives the logits of the next."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_tokens, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=TABLE_STD)
        nn.init.normal_(self.markov_w2.weight, std=TABLE_STD)


class ConfidenceHead(nn.Module):
    """The log-odds that a draft behind right ones is right."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.shape.hidden_size + config.markov_rank, 1)


class DSparkDraftModel(DraftModel):
    """A DSpark drafter with a vanilla Markov head. A block has a place for each draft, the anchor's the first."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)

    def losses(self, tables: Tables, features: Tensor, batch: DraftBatch, target: TargetStates | None = None) -> Tensor:
        """Cross-entropy of each draft behind the right token before it, and that of the confidence head, which changes
        no other parameter."""
        labels = batch.labels
        hidden = self.outputs(tables, features, batch.anchors, labels[..., 0], self.config.num_drafts - 1)
        before, right = self.markov_head.markov_w1(labels[..., :-1]), tables.labels(labels[..., 1:])
        bias = self.markov_head.markov_w2.weight.to(tables.head.dtype)
        losses, likeliest = draft_loss(right, (hidden, tables.head), (before, bias), target=target, count=1)
        read = torch.cat((hidden, before.to(hidden.dtype)), dim=-1).detach()
        sure = self.confidence_head.proj(read)[..., 0].to(losses.dtype)
        is_right = (likeliest[..., 0] == right).to(sure.dtype)
        return losses + F.binary_cross_entropy_with_logits(sure, is_right, reduction="none")

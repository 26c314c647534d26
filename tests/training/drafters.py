"""Small random drafters of every kind, and blocks to train them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_backend.training.formats import make_drafter
from dflash_backend.training.loss import DraftBatch, TargetStates
from dflash_backend.training.network import DrafterConfig, DraftModel, Shape, Tables

SHAPE = Shape(
    vocab_size=60, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
LENGTH = 14
ANCHORS = (5, 9)


@dataclass(frozen=True)
class Blocks:
    """A row with two blocks, in float64."""

    draft: DraftModel
    tables: Tables
    features: Tensor
    tokens: Tensor
    anchors: Tensor
    labels: Tensor

    def losses(self, dtype: torch.dtype = torch.float64, target: TargetStates | None = None) -> Tensor:
        """The drafter's losses with everything in this dtype."""
        tables = Tables(self.tables.embedding.to(dtype), self.tables.head.to(dtype), self.tables.draft_ids)
        batch = DraftBatch(self.tokens, self.anchors, self.labels, torch.ones(1))
        return self.draft.to(dtype).losses(tables, self.features.to(dtype), batch, target)


def blocks_of(kind: str, draft_vocab_size: int | None = None) -> Blocks:
    """A drafter whose every parameter is noise, with blocks of four."""
    torch.manual_seed(5)
    config = DrafterConfig(
        SHAPE,
        target_layers=6,
        draft_layers=2,
        block_size=4,
        target_layer_ids=(1, 3),
        mask_token_id=3,
        drafter=kind,
        draft_vocab_size=draft_vocab_size,
        conv_group_size=4,
        selector_rank=4,
        selector_top_k=5,
        markov_rank=4,
        eagle_drafts=3,
    )
    draft = make_drafter(config).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, dtype=torch.float64)
    head = torch.randn(config.num_draft_tokens, SHAPE.hidden_size, dtype=torch.float64)
    ids = None
    if draft_vocab_size is not None:
        ids = torch.arange(SHAPE.vocab_size) % draft_vocab_size
    features = torch.randn(1, LENGTH, 2 * SHAPE.hidden_size, dtype=torch.float64)
    tokens = torch.randint(SHAPE.vocab_size, (1, LENGTH + 4))
    anchors = torch.tensor([ANCHORS])
    labels = tokens[0][anchors[..., None] + torch.arange(4)]
    return Blocks(draft, Tables(embedding, head, ids), features, tokens[:, :LENGTH], anchors, labels)

"""The EAGLE-3 drafter (arXiv 2503.01840) as a torch module: one decoder layer that reads a token's embedding beside a
hidden state, and drafts one token in a pass."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_backend.training.loss import DraftBatch, TargetStates, draft_loss
from dflash_backend.training.network import (
    Attention,
    DrafterConfig,
    DraftModel,
    Layer,
    RMSNorm,
    Tables,
    initialise,
    softmax,
)


class EagleLayer(Layer):
    """The layer, whose attention reads the normed embedding and the normed hidden state side by side."""

    self_attn: Attention

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config.shape, 2 * config.shape.hidden_size)
        self.hidden_norm = RMSNorm(config.shape.hidden_size, config.shape.rms_norm_eps)

    def inputs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Both `[..., hidden]` -> `[..., 2 * hidden]`."""
        normed = self.hidden_norm(hidden)
        return torch.cat((self.input_layernorm(embeddings).to(normed.dtype), normed), dim=-1)


class Eagle3DraftModel(DraftModel):
    """An EAGLE-3 drafter.

    The layer's keys and values of position p belong to the target's features at p and the token at p + 1. The first
    pass of a block runs at the position before its anchor, with the anchor; each later one a position further, with the
    draft before and the layer's output of the pass before in place of features. Training runs these passes too, with
    the right tokens for drafts. A pass has one query where a block of DFlash has 16, so it learns from more blocks.
    """

    anchor_factor = 3

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        del self.hidden_norm
        self.layers = nn.ModuleList([EagleLayer(config)])
        initialise(self, 1)

    @property
    def layer(self) -> EagleLayer:
        """Its only layer."""
        return cast(EagleLayer, self.layers[0])

    def losses(self, tables: Tables, features: Tensor, batch: DraftBatch, target: TargetStates | None = None) -> Tensor:
        passes = Passes(self, tables, features, F.pad(batch.tokens[:, 1:], (0, 1)), batch.anchors)
        outputs = torch.stack([passes.run(batch.labels[..., i]) for i in range(self.config.num_drafts)], dim=2)
        right = tables.labels(batch.labels[..., 1 : self.config.num_drafts + 1])
        return draft_loss(right, (outputs, tables.head), target=target)[0]


class Passes:
    """The passes of blocks, one after the other.

    features: `[batch, length, layers * hidden]`. next_tokens: int64 `[batch, length]`, those at each position plus one.
    anchors: int64 `[batch, blocks]`.
    """

    def __init__(
        self, model: Eagle3DraftModel, tables: Tables, features: Tensor, next_tokens: Tensor, anchors: Tensor
    ) -> None:
        self.model = model
        self.tables = tables
        self.position = anchors - 1
        length, size = features.shape[1], model.config.shape.hidden_size
        context = model.fc(features)
        normed = model.layer.inputs(model.embed(tables, next_tokens), context)
        every = torch.arange(length, device=features.device)
        self.context_k, self.context_v = model.layer.self_attn.keys_values(normed, *model.rotary(every))
        # Of the anchor's pass the keys and values are the context's: its own position is not hidden.
        self.is_hidden = (every > self.position[..., None])[:, None]
        self.hidden = context.gather(1, self.position[..., None].expand(-1, -1, size))
        self.is_first = True
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def run(self, tokens: Tensor) -> Tensor:
        """The pass of these tokens, int64 `[batch, blocks]`: the final-normed output, `[batch, blocks, hidden]`."""
        layer, attention = self.model.layer, self.model.layer.self_attn
        normed = layer.inputs(self.model.embed(self.tables, tokens), self.hidden)
        cos, sin = self.model.rotary(self.position)
        q = attention.queries(normed, cos, sin)
        if self.is_first:
            self.is_first = False
        else:
            k, v = attention.keys_values(normed, cos, sin)
            self.keys.append(k)
            self.values.append(v)
        self.position = self.position + 1
        self.hidden = layer.feed_forward(self.hidden + attention.output(self._attend(q)))
        out: Tensor = self.model.norm(self.hidden)
        return out

    def _attend(self, q: Tensor) -> Tensor:
        """Softmax over the visible context and the block's own passes; q: `[batch, heads, blocks, head_dim]`."""
        q = q * q.shape[-1] ** -0.5
        to_context = (q @ self.context_k.transpose(2, 3)).masked_fill(self.is_hidden, float("-inf"))
        own = [(q * k).sum(dim=-1, keepdim=True) for k in self.keys]
        weights = softmax(torch.cat((to_context, *own), dim=-1))
        length = to_context.shape[-1]
        out = weights[..., :length] @ self.context_v
        for i, v in enumerate(self.values):
            out = out + weights[..., length + i, None] * v
        return out

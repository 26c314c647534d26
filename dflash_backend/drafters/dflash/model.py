"""The DFlash draft model (arXiv 2602.06036): a Qwen3-style stack that reads the context from the target's features.

It has no token input for the context. `inject` writes what captured target features become as keys and values of every
drafter layer; `forward` runs the queries of a draft block, `[anchor, mask, mask, ...]`, over them. Built by `build`,
run by `drafters.dflash.drafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.files import MASK_EMBEDDING
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.mask_embedding import load_mask_embedding
from dflash_backend.drafters.draft_model import DraftModel, DraftWeights, read_shared
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import LayerOps


@dataclass(frozen=True)
class DFlashWeights(DraftWeights):
    """The parameters of a drafter."""

    layers: list[LayerWeights]

    @classmethod
    def read(cls, source: WeightSource, spec: DFlashSpec) -> Self:
        decoder = spec.decoder
        layers = [LayerWeights.read(source, f"layers.{i}.", decoder, i) for i in range(decoder.num_layers)]
        return cls(**read_shared(source, spec), layers=layers)


class DFlashModel(DraftModel):
    """The drafter's parameters and arithmetic. mask_embedding: `[hidden]`, where it was trained apart."""

    weights_class: ClassVar[type[DFlashWeights]] = DFlashWeights
    spec: DFlashSpec

    def __init__(
        self, spec: DFlashSpec, weights: DFlashWeights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        super().__init__(spec, weights, max_positions, ops)
        self.mask_embedding: torch.Tensor | None = None
        if spec.has_mask_embedding:
            vector = load_mask_embedding(spec.path / MASK_EMBEDDING, spec.mask_token_id, spec.decoder.hidden_size)
            self.mask_embedding = vector.to(self.device, self.dtype)
        self.layers = [self._layer(weights, index, pattern) for index, pattern in enumerate(self.patterns)]
        # The KV rows of every layer's projection as one product: context KV of all layers.
        query = spec.decoder.query_size
        self.context_kv = Linear.stacked([layer.qkv.rows(slice(query, None)) for layer in weights.layers])
        norms = [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
        self.context_k_norm = torch.stack([norm[spec.decoder.num_heads :] for norm in norms])

    def _layer(self, weights: DFlashWeights, index: int, pattern: AttentionPattern) -> DecoderLayer:
        """Layer `index` of the stack."""
        layer = weights.layers[index].with_product(self.ops.product_of)
        return DecoderLayer(self.spec.decoder, layer, pattern, self.ops)

    def inject(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: list[KVLayer],
        padded: bool = False,
    ) -> None:
        """Write the context KV of every drafter layer to `slots` of its cache.

        features: `[n, L * target_hidden]`; positions: int64 `[n]`, the tokens' own; slots: int64 `[n]`, with `padded`
        some of them below 0, for tokens that write nothing. No input norm here: `fc`, `hidden_norm`, then each layer's
        k and v projection, k norm and rotation.
        """
        context = self.ops.rms_norm(self.fc(features), self.hidden_norm, self.eps)
        projected = self.context_kv(context)
        rotation = self.ops.rotation(self.rotary, positions)
        self.ops.context_write(projected, self.context_k_norm, self.eps, rotation, slots, caches, padded)

    def forward(self, embeddings: torch.Tensor, context: PagedContext, caches: list[KVLayer]) -> torch.Tensor:
        """Run draft blocks: `[num_queries, hidden]` embeddings -> final-normed outputs of the same shape.

        The queries' KV goes to positions that RESERVE holds for them, and the next injection there overwrites it.
        """
        rotation = self.ops.rotation(self.rotary, context.positions)
        hidden = embeddings
        normed = self.ops.rms_norm(hidden, self.layers[0].weights.input_norm, self.eps)
        next_norms = [layer.weights.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, cache, next_norm in zip(self.layers, caches, next_norms, strict=True):
            added, hidden = layer.forward(normed, hidden, context, cache, rotation)
            normed, hidden = self.ops.add_rms_norm(added, hidden, next_norm, self.eps)
        return normed

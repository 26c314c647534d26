"""The DFlash draft model (arXiv 2602.06036): a Qwen3-style stack that reads the context from the target's features.

It has no token input for the context. `inject` writes what captured target features become as keys and values of every
drafter layer; `forward` runs the queries of a draft block, `[anchor, mask, mask, ...]`, over them. Built by `build`,
run by `drafters.dflash.drafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.files import MASK_EMBEDDING
from dflash_backend.checkpoints.weights import Progress, WeightSource, load_weights
from dflash_backend.drafters.base import draft_patterns
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.mask_embedding import load_mask_embedding
from dflash_backend.drafters.vocabulary import is_unused, vocabulary_map
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.rope import Rotary


@dataclass(frozen=True)
class DFlashWeights:
    """The parameters of a drafter. The target's stand in for what its checkpoint does not ship, which is None here.

    fc: the captured features -> hidden. embedding: `[vocab_size, hidden]`. lm_head: hidden -> draft_vocab_size.
    d2t: int64 `[draft_vocab_size]`, what to add to a draft id; None where draft ids are the target's.
    """

    fc: Linear
    hidden_norm: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    embedding: torch.Tensor | None
    lm_head: Linear | None
    d2t: torch.Tensor | None

    @classmethod
    def read(cls, source: WeightSource, spec: DFlashSpec) -> DFlashWeights:
        """Read every tensor of a drafter."""
        decoder = spec.decoder
        hidden, draft_vocab = decoder.hidden_size, spec.draft_vocab_size
        return cls(
            Linear.read(source, "", {"fc": hidden}, len(spec.target_layer_ids) * spec.target_hidden_size),
            source.tensor("hidden_norm.weight", hidden),
            [LayerWeights.read(source, f"layers.{i}.", decoder, i) for i in range(decoder.num_layers)],
            source.tensor("norm.weight", hidden),
            source.tensor("embed_tokens.weight", spec.vocab_size, hidden) if spec.has_embedding else None,
            Linear.read(source, "", {"lm_head": draft_vocab}, hidden) if spec.has_lm_head else None,
            source.integers("d2t", draft_vocab) if spec.maps_vocabulary else None,
        )


class DFlashModel:
    """The drafter's parameters and arithmetic.

    embedding, lm_head: as in `DFlashWeights`. mask_embedding: `[hidden]`, where it was trained apart. id_map: int64
    `[draft_vocab_size]`, the target's id of each draft id; None where they are the same.
    """

    weights_class: ClassVar[type[DFlashWeights]] = DFlashWeights
    spec: DFlashSpec

    def __init__(
        self, spec: DFlashSpec, weights: DFlashWeights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        """Able to run positions below `max_positions`. `ops`: by default those for the weights' device."""
        self.spec = spec
        self.eps = spec.decoder.rms_norm_eps
        self.fc = weights.fc
        self.hidden_norm = weights.hidden_norm
        self.final_norm = weights.final_norm
        self.embedding = weights.embedding
        self.lm_head = weights.lm_head
        device, dtype = weights.final_norm.device, weights.final_norm.dtype
        self.mask_embedding: torch.Tensor | None = None
        if spec.has_mask_embedding:
            vector = load_mask_embedding(spec.path / MASK_EMBEDDING, spec.mask_token_id, spec.decoder.hidden_size)
            self.mask_embedding = vector.to(device, dtype)
        self.id_map = None if weights.d2t is None else vocabulary_map(spec, weights.d2t)
        self.ops = ops or select_ops(device)
        self.rotary = Rotary(spec.decoder, max_positions, device, dtype)
        self.patterns = draft_patterns(spec)
        self.layers = [self._layer(weights, index, pattern) for index, pattern in enumerate(self.patterns)]
        # The KV rows of every layer's projection as one product: context KV of all layers.
        query = spec.decoder.query_size
        self.context_kv = Linear.stacked([layer.qkv.rows(slice(query, None)) for layer in weights.layers])
        norms = [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
        self.context_k_norm = torch.stack([norm[spec.decoder.num_heads :] for norm in norms])

    @classmethod
    def load(
        cls,
        spec: DFlashSpec,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        ops: LayerOps | None = None,
    ) -> DFlashModel:
        """Load the drafter in `spec.path`. Raises `CheckpointError`."""
        weights = load_weights(
            spec.path,
            lambda source: cls.weights_class.read(source, spec),
            dtype,
            device,
            ignored=lambda name: is_unused(spec, name),
            progress=progress,
            keep_quantised=(ops or select_ops(device)).keeps_quantised,
        )
        return cls(spec, weights, max_positions, ops)

    def _layer(self, weights: DFlashWeights, index: int, pattern: AttentionPattern) -> DecoderLayer:
        """Layer `index` of the stack."""
        return DecoderLayer(self.spec.decoder, weights.layers[index], pattern, self.ops)

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

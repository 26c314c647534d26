"""The DFlash drafter (arXiv 2602.06036): one forward over `[anchor, mask x k]` proposes k tokens for every row.

Its model is a Qwen3-style stack that reads the context from the target's features. It has no token input for the
context: `inject` writes what captured target features become as keys and values of every drafter layer, and the model's
`forward` runs the queries of a draft block over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from dflash_backend.attention import AttentionBackend, AttentionPattern, KVLayer
from dflash_backend.checkpoints.files import MASK_EMBEDDING, TensorHeader
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    DraftModel,
    DraftQueries,
    Drafts,
    DraftSampler,
    DraftWeights,
    ModelDrafter,
    read_shared,
)
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.mask_embedding import load_mask_embedding
from dflash_backend.models.interface import PagedContext, TargetModel
from dflash_backend.models.layer_stack import LayerStack
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
    """The drafter's parameters, and a pass of its layers. mask_embedding: `[hidden]`, where it was trained apart."""

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
        self.stack = LayerStack.of(self.layers, self.ops, self.final_norm)
        # The KV rows of every layer's projection as one product: context KV of all layers.
        query = spec.decoder.query_size
        parts = [layer.qkv.rows(slice(query, None)) for layer in weights.layers]
        self.context_kv = self.ops.laid_out(Linear.stacked(parts))
        norms = [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
        self.context_k_norm = torch.stack([norm[spec.decoder.num_heads :] for norm in norms])

    def _layer(self, weights: DFlashWeights, index: int, pattern: AttentionPattern) -> DecoderLayer:
        """Layer `index` of the stack."""
        layer = weights.layers[index].with_product(self.ops.product_of)
        return DecoderLayer(self.spec.decoder, layer, pattern, self.ops)

    def forward(self, embeddings: torch.Tensor, context: PagedContext, caches: list[KVLayer]) -> torch.Tensor:
        """Run draft blocks: `[num_queries, hidden]` embeddings -> final-normed outputs of the same shape.

        The queries' KV goes to positions that RESERVE holds for them, and the next injection there overwrites it.
        """
        if self.stack is not None and (rows := self.stack.rows(context, embeddings.dtype)) is not None:
            hidden = embeddings.clone(memory_format=torch.contiguous_format)
            return self.stack.forward(rows, hidden, caches, self.rotary, context.positions, self.final_norm)[0]
        rotation = self.ops.rotation(self.rotary, context.positions)
        hidden = embeddings
        normed = self.ops.rms_norm(hidden, self.layers[0].weights.input_norm, self.eps)
        next_norms = [layer.weights.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, cache, next_norm in zip(self.layers, caches, next_norms, strict=True):
            added, hidden = layer.forward(normed, hidden, context, cache, rotation)
            normed, hidden = self.ops.add_rms_norm(added, hidden, next_norm, self.eps)
        return normed


class DFlashDrafter(ModelDrafter[DFlashSpec]):
    """Runs a `DFlashModel` for the worker."""

    lookahead_base = 1
    autoregressive = False
    reads_block_index: ClassVar[bool] = False
    """Whether the model asks for the place of each query in its row."""
    reads_next_tokens = False
    placeholder_id: int
    model_class: ClassVar[type[DFlashModel]] = DFlashModel
    model: DFlashModel

    def __init__(
        self, model: DFlashModel, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        super().__init__(model, target, caches, backend)
        self.capture = captured_layers(model.spec, target.spec.decoder.num_layers)
        self.placeholder_id = model.spec.mask_token_id

    @classmethod
    def check_weights(cls, spec: DFlashSpec) -> dict[str, TensorHeader]:
        headers = super().check_weights(spec)
        if spec.has_mask_embedding:
            load_mask_embedding(spec.path / MASK_EMBEDDING, spec.mask_token_id, spec.decoder.hidden_size)
        return headers

    def inject(self, batch: ContextBatch) -> None:
        """Write the context KV of every layer. No input norm here: `fc`, `hidden_norm`, then each layer's k and v
        projection, k norm and rotation."""
        model, ops = self.model, self.model.ops
        projected = model.context_kv(ops.rms_norm(model.fc(batch.features), model.hidden_norm, model.eps))
        rotation = ops.rotation(model.rotary, batch.positions)
        ops.context_write(projected, model.context_k_norm, model.eps, rotation, batch.slots, self.caches, batch.padded)

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        """One forward over all blocks. A mask query gives the logits of the token at its own position; the anchor's
        output is not used."""
        queries, model = batch.queries, self.model
        assert queries is not None
        embeddings = self._embed(queries.token_ids)
        if model.mask_embedding is not None:
            # One that was trained apart stands in for the mask token's row, which is no other token's.
            is_mask = queries.token_ids == model.spec.mask_token_id
            embeddings = torch.where(is_mask[:, None], model.mask_embedding, embeddings)
        if model.spec.input_embedding_scale != 1:
            embeddings = embeddings * model.spec.input_embedding_scale
        block_index = queries.block_index() if self.reads_block_index else None
        context = PagedContext(
            queries.layout, queries.positions, queries.slots, self.backend, embeddings.dtype, queries.padded,
            row_index=block_index,
        )  # fmt: skip
        outputs = model.forward(embeddings, context, self.caches)
        logits, form = self.lm_head(queries.of_drafts(outputs)), model.spec.logits
        if form.multiplier != 1:
            logits = logits * form.multiplier
        if form.softcap is not None:
            logits = torch.tanh(logits / form.softcap) * form.softcap
        if form.scale != 1:
            logits = logits * form.scale
        return self._choose(outputs, logits, queries, sampler)

    def _choose(
        self, outputs: torch.Tensor, logits: torch.Tensor, queries: DraftQueries, sampler: DraftSampler
    ) -> Drafts:
        """The drafts. outputs: `[num_queries, hidden]`, final-normed, of all queries; logits: `[num_drafts, draft
        vocab]`."""
        positions = None if sampler.temperature is None else queries.draft_positions()
        return sampler.choose(logits, positions, self.model.id_map)


def captured_layers(spec: DFlashSpec, num_target_layers: int) -> tuple[int, ...]:
    """What a drafter wants captured, as `TargetModel.forward` counts: layer ids, and the number of layers for the last
    layer's output after the final norm."""
    last = num_target_layers - 1
    return tuple(i + 1 if i == last and spec.normed_last_layer else i for i in spec.target_layer_ids)

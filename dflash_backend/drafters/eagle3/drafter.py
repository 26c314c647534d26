"""The EAGLE-3 drafter (arXiv 2503.01840): k passes propose k tokens, each from the last token and its hidden state.

The model is a decoder layer over a token's embedding beside a hidden state. For a position of the context the hidden
state is made of the target's features there (`combine`), and the token is the one after it. `inject` writes the layer's
keys and values, which depend on these two alone. The model's `forward` runs the layer: its output gives the token after
next, and is the hidden state of the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    DraftModel,
    Drafts,
    DraftSampler,
    DraftWeights,
    ModelDrafter,
    read_shared,
)
from dflash_backend.drafters.eagle3.config import Eagle3Spec
from dflash_backend.models.interface import PagedContext, TargetModel
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.ops import LayerOps


@dataclass(frozen=True)
class Eagle3Weights(DraftWeights):
    """The parameters of a drafter.

    feature_norms: `[1, all features]` for one norm of all, `[L, target_hidden]` for one of each layer's; None for none.
    hidden_norm: of the hidden state that the layer reads; its input norm is of the embedding.
    """

    feature_norms: torch.Tensor | None
    layer: LayerWeights

    @classmethod
    def read(cls, source: WeightSource, spec: Eagle3Spec) -> Self:
        prefix = spec.layer_prefix
        return cls(
            **read_shared(source, spec, prefix),
            feature_norms=cls._read_feature_norms(source, spec),
            layer=LayerWeights.read(source, prefix, spec.decoder, 0, input_size=2 * spec.decoder.hidden_size),
        )

    @staticmethod
    def _read_feature_norms(source: WeightSource, spec: Eagle3Spec) -> torch.Tensor | None:
        count, size = spec.num_features, spec.target_hidden_size
        if spec.norm_before_fc:
            return source.tensor("input_norm.weight", count * size)[None]
        if not spec.fc_norm:
            return None
        norms = source.empty(count, size)
        for i in range(count):
            norms[i] = source.tensor(f"fc_norm.{i}.weight", size)
        return norms


class Eagle3Model(DraftModel):
    """The drafter's parameters, and a pass of its layer."""

    weights_class: ClassVar[type[Eagle3Weights]] = Eagle3Weights
    spec: Eagle3Spec

    def __init__(
        self, spec: Eagle3Spec, weights: Eagle3Weights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        super().__init__(spec, weights, max_positions, ops)
        self.feature_norms = weights.feature_norms
        self.layer = DecoderLayer(spec.decoder, self.ops.laid_out(weights.layer), self.patterns[0], self.ops)
        # The KV rows of the projection, and the norm of the keys where the layer has one.
        self.context_kv = self.ops.laid_out(weights.layer.qkv.rows(slice(spec.decoder.query_size, None)))
        qk_norm = weights.layer.qk_norm
        self.context_k_norm = None if qk_norm is None else qk_norm[None, spec.decoder.num_heads :].contiguous()

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """The hidden states of context positions: features `[n, L * target_hidden]` -> `[n, hidden]`."""
        if self.feature_norms is not None:
            parts = features.chunk(len(self.feature_norms), dim=1)
            normed = [
                self.ops.rms_norm(part.contiguous(), weight, self.eps)
                for part, weight in zip(parts, self.feature_norms, strict=True)
            ]
            features = torch.cat(normed, dim=1)
        return self.fc(features)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, context: PagedContext, caches: list[KVLayer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over a token of each row, and the hidden state before it: both `[n, hidden]`.

        Returns the final-normed output, of which the logits are made, and the hidden state for the next pass.
        """
        rotation = self.ops.rotation(self.rotary, context.positions)
        normed, residual = self.layer_input(embeddings, hidden)
        added, residual = self.layer.forward(normed, residual, context, caches[0], rotation)
        output, hidden = self.ops.add_rms_norm(added, residual, self.final_norm, self.eps)
        return output, output if self.spec.norm_output else hidden

    def layer_input(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, `[n, 2 * hidden]`, and what its output is added to, `[n, hidden]`."""
        token = self.ops.rms_norm(embeddings, self.layer.weights.input_norm, self.eps)
        normed = self.ops.rms_norm(hidden, self.hidden_norm, self.eps)
        return torch.cat([token, normed], dim=1), normed if self.spec.norm_before_residual else hidden


class Eagle3Drafter(ModelDrafter[Eagle3Spec]):
    """Runs an `Eagle3Model` for the worker.

    The KV of position p belongs to the target's features at p and the token at p + 1. So the first pass runs at the
    position before the anchor, with the features there and the anchor, and writes nothing: its KV is context KV. The
    others write the KV of the anchor's position and of all drafts' but the last two: k - 1 positions of the k that are
    reserved.
    """

    lookahead_base = 0
    autoregressive = True
    reads_next_tokens = True
    # The tokens of the queries behind the anchor are those that the passes before choose.
    placeholder_id = 0

    model_class: ClassVar[type[Eagle3Model]] = Eagle3Model
    model: Eagle3Model

    def __init__(
        self, model: Eagle3Model, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        super().__init__(model, target, caches, backend)
        self.capture = model.spec.target_layer_ids

    def inject(self, batch: ContextBatch) -> None:
        """Write the context KV of the layer: of the features at each position, and of the token behind it."""
        assert batch.next_token_ids is not None
        model, ops = self.model, self.model.ops
        normed, _ = model.layer_input(self._embed(batch.next_token_ids), model.combine(batch.features))
        rotation = ops.rotation(model.rotary, batch.positions)
        ops.context_write(
            model.context_kv(normed), model.context_k_norm, model.eps, rotation, batch.slots, self.caches, batch.padded
        )

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        """A pass for each draft of the longest row, over the rows that still draft."""
        queries = batch.queries
        assert queries is not None
        assert batch.features is not None
        hidden, tokens = self.model.combine(batch.features), queries.token_ids[queries.row_starts()[:-1]]
        of_drafts = queries.draft_positions()
        found = torch.empty_like(of_drafts)
        sure = torch.empty(len(found), dtype=torch.float32, device=found.device) if sampler.wants_confidence else None
        for number, step in enumerate(queries.passes()):
            if step.rows is not None:
                hidden, tokens = hidden[step.rows], tokens[step.rows]
            context = PagedContext(
                step.layout,
                step.positions,
                step.slots,
                self.backend,
                hidden.dtype,
                padded=number == 0 or queries.padded,
            )
            output, hidden = self.model.forward(self._embed(tokens), hidden, context, self.caches)
            chosen = sampler.at(step.drafts).choose(self._head(output), of_drafts[step.drafts], self.model.id_map)
            found[step.drafts] = tokens = chosen.token_ids
            if sure is not None and chosen.confidence is not None:
                sure[step.drafts] = chosen.confidence
        return Drafts(found, sure)

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary: `[n, hidden]` -> `[n, draft_vocab]`."""
        logits, scale = self.lm_head(normed), self.model.spec.logit_scale
        return logits if scale == 1 else logits * scale

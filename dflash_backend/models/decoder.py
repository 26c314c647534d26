"""The target decoder over paged attention, with capture of hidden states for the drafter: one class for every family of
`checkpoints.families`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.quantization.at_load import Fp8Source
from dflash_backend.checkpoints.spec import DecoderSpec, TargetSpec
from dflash_backend.checkpoints.weights import Progress, WeightSource, load_weights
from dflash_backend.models.gemma4 import Gemma4Target, Gemma4Weights
from dflash_backend.models.hybrid_layers import (
    DeltaNetLayer,
    DeltaNetLayerWeights,
    GatedAttentionLayer,
    read_hybrid_layer,
    read_norm,
)
from dflash_backend.models.interface import PagedContext, TargetModel, TargetOutput, target_patterns
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.linear import Linear, embedded
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.rope import Rotary


@dataclass(frozen=True)
class TargetWeights:
    """The parameters of a target. embedding: `[vocab_size, hidden_size]`, which is the head's weight where the two are
    tied. share: what gives all ranks of a shared target the embeddings of tokens; None where there are no others.
    first_id: the first token of a rank's slice of embedding and head; None where there is one slice."""

    embedding: torch.Tensor
    layers: list[LayerWeights | DeltaNetLayerWeights]
    final_norm: torch.Tensor
    lm_head: Linear
    share: Callable[[torch.Tensor], torch.Tensor] | None = None
    first_id: int | None = None

    @classmethod
    def read(cls, source: WeightSource, spec: TargetSpec) -> TargetWeights:
        """Read every tensor of a target."""
        decoder = spec.decoder
        hidden, vocab = decoder.hidden_size, spec.vocab_size
        embedding = source.tensor(f"{spec.prefix}embed_tokens.weight", vocab, hidden)
        read_layer = LayerWeights.read if decoder.delta_net is None else read_hybrid_layer
        return cls(
            embedding,
            [read_layer(source, f"{spec.prefix}layers.{i}.", decoder, i) for i in range(decoder.num_layers)],
            read_norm(source, f"{spec.prefix}norm.weight", decoder, hidden),
            Linear(embedding) if spec.tie_word_embeddings else Linear.read(source, "", {"lm_head": vocab}, hidden),
        )


class DecoderTarget(TargetModel):
    """A target of any family."""

    def __init__(
        self, spec: TargetSpec, weights: TargetWeights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        """Able to run positions below `max_positions`. `ops`: by default those for the weights' device."""
        self.spec = spec
        self.eps = spec.decoder.rms_norm_eps
        self.embedding = weights.embedding
        self.final_norm = weights.final_norm
        self._share, self._first_id = weights.share, weights.first_id
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.ops = ops or select_ops(device)
        # Drafters multiply by the head as well, in their own way.
        self.lm_head = weights.lm_head
        self._head = weights.lm_head.with_product(self.ops.product_of)
        self.rotary = Rotary(spec.decoder, max_positions, device, dtype)
        self.patterns = target_patterns(spec)
        self.layers = _layers(spec.decoder, weights.layers, self.patterns, self.ops)

    def embed(self, token_ids: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        return embedded(token_ids, self.embedding, self._first_id)

    def forward(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput:
        hidden = self.embed(token_ids)
        if self._share is not None:
            hidden = self._share(hidden)
        rotation = self.ops.rotation(self.rotary, context.positions)
        normed = self.ops.rms_norm(hidden, self.layers[0].weights.input_norm, self.eps)
        captured: dict[int, torch.Tensor] = {}
        own_cache = iter(caches)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DeltaNetLayer):
                added, hidden = layer.forward(normed, hidden, context)
            else:
                added, hidden = layer.forward(normed, hidden, context, next(own_cache), rotation)
            if index + 1 < len(self.layers):
                next_norm = self.layers[index + 1].weights.input_norm
                normed, hidden = self.ops.add_rms_norm(added, hidden, next_norm, self.eps)
            else:
                hidden = hidden + added
            if index in capture:
                captured[index] = hidden
        if len(self.layers) in capture:
            captured[len(self.layers)] = self.ops.rms_norm(hidden, self.final_norm, self.eps)
        features = torch.cat([captured[index] for index in capture], dim=-1) if capture else None
        return TargetOutput(hidden, features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self.ops.rms_norm(hidden, self.final_norm, self.eps))


def _layers(
    decoder: DecoderSpec,
    weights: list[LayerWeights | DeltaNetLayerWeights],
    patterns: tuple[AttentionPattern, ...],
    ops: LayerOps,
) -> list[DecoderLayer | DeltaNetLayer]:
    """The layers with these weights; patterns: of those that have attention, in their order."""
    attention = GatedAttentionLayer if decoder.attention_gate else DecoderLayer
    own_pattern = iter(patterns)
    layers: list[DecoderLayer | DeltaNetLayer] = []
    for each in weights:
        layer = each.with_product(ops.product_of)
        if isinstance(layer, LayerWeights):
            layers.append(attention(decoder, layer, next(own_pattern), ops))
        else:
            number = sum(isinstance(before, DeltaNetLayer) for before in layers)
            layers.append(DeltaNetLayer(decoder, layer, number, ops))
    return layers


def load_target(
    spec: TargetSpec,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    ops: LayerOps | None = None,
    *,
    fp8: bool = False,
) -> TargetModel:
    """Load the target in `spec.path`, able to run positions below `max_positions`. `ops`: by default those for the
    device. fp8: with the weights that FP8 would hold in place of its own. Raises `CheckpointError`."""
    weights = load_weights(
        spec.path,
        lambda source: read_weights(Fp8Source(source) if fp8 else source, spec),
        dtype,
        device,
        ignored=lambda name: is_unused(spec, name),
        progress=progress,
        keep_quantised=(ops or select_ops(device)).keeps_quantised,
    )
    return target_of(spec, weights, max_positions, ops)


def target_of(
    spec: TargetSpec, weights: TargetWeights | Gemma4Weights, max_positions: int, ops: LayerOps | None = None
) -> TargetModel:
    """The target with these weights, of any family."""
    if isinstance(weights, Gemma4Weights):
        return Gemma4Target(spec, weights, max_positions, ops)
    return DecoderTarget(spec, weights, max_positions, ops)


def read_weights(source: WeightSource, spec: TargetSpec) -> TargetWeights | Gemma4Weights:
    """Read every tensor of a target of any family."""
    return (TargetWeights if spec.decoder.gemma4 is None else Gemma4Weights).read(source, spec)


def is_unused(spec: TargetSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint is left out: frequencies, which follow from config.json and which some older
    exports store, a tied head, which repeats the embedding, a hybrid's own layers for drafting (MTP), and parts that
    are not served."""
    if name.startswith(spec.left_out):
        return True
    if spec.decoder.delta_net is not None and name.startswith("mtp."):
        return True
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == "lm_head.weight")

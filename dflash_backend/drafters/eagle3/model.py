"""The EAGLE-3 draft model (arXiv 2503.01840): a decoder layer over a token's embedding beside a hidden state.

For a position of the context the hidden state is made of the target's features there (`combine`), and the token is the
one behind it. `inject` writes the layer's keys and values, which depend on these two alone. `forward` runs the layer:
its output gives the token after next, and is the hidden state of the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.attention import KVLayer
from dflash_backend.checkpoints.weights import Progress, WeightSource, load_weights
from dflash_backend.drafters.base import draft_patterns
from dflash_backend.drafters.eagle3.config import Eagle3Spec
from dflash_backend.drafters.vocabulary import is_unused, vocabulary_map
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.rope import Rotary


@dataclass(frozen=True)
class Eagle3Weights:
    """The parameters of a drafter. The target's stand in for what its checkpoint does not ship, which is None here.

    fc: the captured features -> hidden. feature_norms: `[1, all features]` for one norm of all, `[L, target_hidden]`
    for one of each layer's; None for none. hidden_norm: of the hidden state that the layer reads; its input norm is of
    the embedding. embedding: `[vocab_size, hidden]`. lm_head: hidden -> draft_vocab_size. d2t: int64
    `[draft_vocab_size]`, what to add to a draft id; None where draft ids are the target's.
    """

    fc: Linear
    feature_norms: torch.Tensor | None
    hidden_norm: torch.Tensor
    layer: LayerWeights
    final_norm: torch.Tensor
    embedding: torch.Tensor | None
    lm_head: Linear | None
    d2t: torch.Tensor | None

    @classmethod
    def read(cls, source: WeightSource, spec: Eagle3Spec) -> Eagle3Weights:
        """Read every tensor of a drafter."""
        decoder, prefix = spec.decoder, spec.layer_prefix
        hidden, draft_vocab = decoder.hidden_size, spec.draft_vocab_size
        return cls(
            Linear.read(source, "", {"fc": hidden}, spec.num_features * spec.target_hidden_size),
            cls._read_feature_norms(source, spec),
            source.tensor(f"{prefix}hidden_norm.weight", hidden),
            LayerWeights.read(source, prefix, decoder, 0, input_size=2 * hidden),
            source.tensor("norm.weight", hidden),
            source.tensor("embed_tokens.weight", spec.vocab_size, hidden) if spec.has_embedding else None,
            Linear.read(source, "", {"lm_head": draft_vocab}, hidden) if spec.has_lm_head else None,
            source.integers("d2t", draft_vocab) if spec.maps_vocabulary else None,
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


class Eagle3Model:
    """The drafter's parameters and arithmetic.

    embedding, lm_head: as in `Eagle3Weights`. id_map: int64 `[draft_vocab_size]`, the target's id of each draft id;
    None where they are the same.
    """

    def __init__(
        self, spec: Eagle3Spec, weights: Eagle3Weights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        """Able to run positions below `max_positions`. `ops`: by default those for the weights' device."""
        self.spec = spec
        self.eps = spec.decoder.rms_norm_eps
        self.fc, self.feature_norms = weights.fc, weights.feature_norms
        self.hidden_norm, self.final_norm = weights.hidden_norm, weights.final_norm
        self.embedding, self.lm_head = weights.embedding, weights.lm_head
        device, dtype = weights.final_norm.device, weights.final_norm.dtype
        self.id_map = None if weights.d2t is None else vocabulary_map(spec, weights.d2t)
        self.ops = ops or select_ops(device)
        self.rotary = Rotary(spec.decoder, max_positions, device, dtype)
        self.patterns = draft_patterns(spec)
        self.layer = DecoderLayer(spec.decoder, weights.layer, self.patterns[0], self.ops)
        # The KV rows of the projection, and the norm of the keys where the layer has one.
        self.context_kv = weights.layer.qkv.rows(slice(spec.decoder.query_size, None))
        qk_norm = weights.layer.qk_norm
        self.context_k_norm = None if qk_norm is None else qk_norm[None, spec.decoder.num_heads :].contiguous()

    @classmethod
    def load(
        cls,
        spec: Eagle3Spec,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        ops: LayerOps | None = None,
    ) -> Eagle3Model:
        """Load the drafter in `spec.path`. Raises `CheckpointError`."""
        weights = load_weights(
            spec.path,
            lambda source: Eagle3Weights.read(source, spec),
            dtype,
            device,
            ignored=lambda name: is_unused(spec, name),
            progress=progress,
            keep_quantised=(ops or select_ops(device)).keeps_quantised,
        )
        return cls(spec, weights, max_positions, ops)

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

    def inject(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: list[KVLayer],
        padded: bool = False,
    ) -> None:
        """Write the context KV to `slots` of the layer's cache.

        embeddings: `[n, hidden]`, of the token behind each position. features: `[n, L * target_hidden]`. positions,
        slots: int64 `[n]`, with `padded` some slots below 0, for which nothing is written.
        """
        normed, _ = self._layer_input(embeddings, self.combine(features))
        projected = self.context_kv(normed)
        rotation = self.ops.rotation(self.rotary, positions)
        self.ops.context_write(projected, self.context_k_norm, self.eps, rotation, slots, caches, padded)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, context: PagedContext, caches: list[KVLayer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over a token of each row, and the hidden state before it: both `[n, hidden]`.

        Returns the final-normed output, of which the logits are made, and the hidden state for the next pass.
        """
        rotation = self.ops.rotation(self.rotary, context.positions)
        normed, residual = self._layer_input(embeddings, hidden)
        added, residual = self.layer.forward(normed, residual, context, caches[0], rotation)
        output, hidden = self.ops.add_rms_norm(added, residual, self.final_norm, self.eps)
        return output, output if self.spec.norm_output else hidden

    def _layer_input(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, `[n, 2 * hidden]`, and what its output is added to, `[n, hidden]`."""
        token = self.ops.rms_norm(embeddings, self.layer.weights.input_norm, self.eps)
        normed = self.ops.rms_norm(hidden, self.hidden_norm, self.eps)
        return torch.cat([token, normed], dim=1), normed if self.spec.norm_before_residual else hidden

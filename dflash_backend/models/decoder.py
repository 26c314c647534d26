"""The target decoder over paged attention, with capture of hidden states for the drafter.

One class runs every family: `registry.py` gives it the family's layer configs. The worker knows it as `TargetModel`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec, TargetSpec
from dflash_backend.checkpoints.weights import Progress, load_weights
from dflash_backend.models.interface import PagedContext, TargetOutput
from dflash_backend.models.layers import DecoderLayer, LayerConfig, LayerWeights
from dflash_backend.models.mlp import Shapes, Tensors
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.rope import Rotary

Family = Callable[[DecoderSpec, int], LayerConfig]
"""The config of the layer with this index in a decoder of this shape."""


class DecoderTarget:
    """See `TargetModel` for the interface."""

    def __init__(
        self,
        spec: TargetSpec,
        family: Family,
        tensors: Tensors,
        max_positions: int,
        dtype: torch.dtype,
        ops: LayerOps | None = None,
    ) -> None:
        """Empties `tensors`: layer by layer, what is fused is freed. `ops`: None takes what suits their device."""
        self.spec = spec
        self.eps = spec.decoder.rms_norm_eps
        self.embedding = tensors.pop("model.embed_tokens.weight")
        self.lm_head = self.embedding if spec.tie_word_embeddings else tensors.pop("lm_head.weight")
        self.final_norm = tensors.pop("model.norm.weight")
        self.ops = ops or select_ops(self.embedding.device)
        self.rotary = Rotary(spec.decoder, max_positions, self.embedding.device, dtype)
        self.patterns = target_patterns(spec)
        self.layers = []
        for index, pattern in enumerate(self.patterns):
            config = family(spec.decoder, index)
            weights = LayerWeights.take(tensors, spec.decoder, config, layer_prefix(index))
            self.layers.append(DecoderLayer(spec.decoder, weights, pattern, self.ops))

    @classmethod
    def load(
        cls,
        spec: TargetSpec,
        family: Family,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        ops: LayerOps | None = None,
    ) -> DecoderTarget:
        """Load the weights of `spec.path`. Raises `CheckpointError`."""
        tensors = load_weights(
            spec.path,
            tensor_shapes(spec, family),
            dtype,
            device,
            ignored=lambda name: is_unused(spec, name),
            progress=progress,
        )
        return cls(spec, family, tensors, max_positions, dtype, ops)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `TargetModel.embed`."""
        return F.embedding(token_ids, self.embedding)

    def forward(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput:
        """See `TargetModel.forward`."""
        hidden = self.embed(token_ids)
        rotation = self.ops.rotation(self.rotary, context.positions)
        normed = self.ops.rms_norm(hidden, self.layers[0].weights.input_norm, self.eps)
        captured: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            added, hidden = layer.forward(normed, hidden, context, caches[index], rotation)
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
        """See `TargetModel.logits`."""
        return self.head(self.ops.rms_norm(hidden, self.final_norm, self.eps))

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """See `TargetModel.head`."""
        return F.linear(normed, self.lm_head)


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def target_patterns(spec: TargetSpec) -> tuple[AttentionPattern, ...]:
    """What the queries of each layer see."""
    return tuple(AttentionPattern(True, window) for window in spec.decoder.sliding_windows)


def tensor_shapes(spec: TargetSpec, family: Family) -> Shapes:
    """The tensors of a checkpoint and their shapes."""
    hidden = spec.decoder.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.decoder.num_layers):
        shapes |= LayerWeights.shapes(spec.decoder, family(spec.decoder, index), layer_prefix(index))
    return shapes


def is_unused(spec: TargetSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint is left out: frequencies, which follow from config.json and which some older
    exports store, and a tied head, which repeats the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == "lm_head.weight")

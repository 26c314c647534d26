"""Qwen3 target decoder (`Qwen3ForCausalLM`), over paged attention, with capture of hidden states for the drafter."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress, load_weights
from dflash_backend.models.interface import PagedContext, TargetOutput
from dflash_backend.models.layers import DecoderLayer, LayerWeights, Rotary


class Qwen3Target:
    """See `TargetModel` for the interface."""

    def __init__(
        self, spec: TargetSpec, tensors: dict[str, torch.Tensor], max_positions: int, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.embedding = tensors.pop("model.embed_tokens.weight")
        self.lm_head = self.embedding if spec.tie_word_embeddings else tensors.pop("lm_head.weight")
        self.final_norm = tensors.pop("model.norm.weight")
        rotary = Rotary(spec.decoder, max_positions, self.embedding.device, dtype)
        self.rotary = rotary
        self.patterns = tuple(AttentionPattern(True, window) for window in spec.decoder.sliding_windows)
        self.layers = [
            DecoderLayer(spec.decoder, LayerWeights.take(tensors, spec.decoder, f"model.layers.{i}."), rotary, pattern)
            for i, pattern in enumerate(self.patterns)
        ]

    @classmethod
    def load(
        cls,
        spec: TargetSpec,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> Qwen3Target:
        """Load the weights of `spec.path`. Raises `CheckpointError`."""
        ignored = frozenset({"lm_head.weight"}) if spec.tie_word_embeddings else frozenset()
        tensors = load_weights(spec.path, tensor_shapes(spec), dtype, device, ignored, progress)
        return cls(spec, tensors, max_positions, dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `TargetModel.embed`."""
        return F.embedding(token_ids, self.embedding)

    def forward(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput:
        """See `TargetModel.forward`."""
        hidden = self.embed(token_ids)
        tables = self.rotary.tables(context.positions)
        captured: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, context, caches[index], tables)
            if index in capture:
                captured[index] = hidden
        features = torch.cat([captured[index] for index in capture], dim=-1) if capture else None
        return TargetOutput(hidden, features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `TargetModel.logits`."""
        normed = F.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.spec.decoder.rms_norm_eps)
        return self.head(normed)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """See `TargetModel.head`."""
        return F.linear(normed, self.lm_head)


def tensor_shapes(spec: TargetSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen3 checkpoint and their shapes."""
    hidden = spec.decoder.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for i in range(spec.decoder.num_layers):
        shapes |= LayerWeights.shapes(spec.decoder, f"model.layers.{i}.")
    return shapes

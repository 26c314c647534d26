"""The DFlash draft model (arXiv 2602.06036): a Qwen3-style stack that reads the context from the target's features.

It has no token input for the context. `context_kv` turns captured target features into keys and values of every
drafter layer; `forward` runs the queries of a draft block, `[anchor, mask, mask, ...]`, over them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import DraftSpec
from dflash_backend.checkpoints.weights import Progress, load_weights
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer, LayerWeights, Rotary, head_norm


class DFlashModel:
    """The drafter's weights and arithmetic. Embedding and LM head are the target's, so they are not here."""

    def __init__(
        self, spec: DraftSpec, tensors: dict[str, torch.Tensor], max_positions: int, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.fc = tensors.pop("fc.weight")
        self.hidden_norm = tensors.pop("hidden_norm.weight")
        self.final_norm = tensors.pop("norm.weight")
        self.rotary = Rotary(spec.decoder, max_positions, self.fc.device, dtype)
        self.patterns = draft_patterns(spec)
        self.layers = [
            DecoderLayer(spec.decoder, LayerWeights.take(tensors, spec.decoder, f"layers.{i}."), self.rotary, pattern)
            for i, pattern in enumerate(self.patterns)
        ]
        query = spec.decoder.query_size
        # The K/V rows of every layer's fused projection as one matrix: context K/V of all layers is one product.
        self.context_weight = torch.cat([layer.weights.qkv[query:] for layer in self.layers])
        biases = [layer.weights.qkv_bias for layer in self.layers]
        self.context_bias = torch.cat([b[query:] for b in biases if b is not None]) if biases[0] is not None else None
        heads = spec.decoder.num_heads
        self.context_k_norm = torch.stack([layer.weights.qk_norm[heads:] for layer in self.layers])

    @classmethod
    def load(
        cls,
        spec: DraftSpec,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> DFlashModel:
        """Load the weights of `spec.path`. Raises `CheckpointError`."""
        tensors = load_weights(spec.path, tensor_shapes(spec), dtype, device, progress=progress)
        return cls(spec, tensors, max_positions, dtype)

    def context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Context K/V of every drafter layer.

        features: `[n, L * target_hidden]`; positions: int64 `[n]`, the tokens' own. Returns
        `[num_layers, n, 2, num_kv_heads, head_dim]`. No input norm here: `fc`, `hidden_norm`, then each layer's
        k and v projection, k norm and rotation.
        """
        decoder = self.spec.decoder
        eps = decoder.rms_norm_eps
        context = F.rms_norm(F.linear(features, self.fc), self.hidden_norm.shape, self.hidden_norm, eps)
        projected = F.linear(context, self.context_weight, self.context_bias)
        kv = projected.view(len(features), len(self.layers), 2, decoder.num_kv_heads, decoder.head_dim)
        kv = kv.transpose(0, 1).contiguous()
        cos, sin = self.rotary.tables(positions)
        key = head_norm(kv[:, :, 0], self.context_k_norm[:, None], eps)
        kv[:, :, 0] = self.rotary.rotate(key, (cos, sin))
        return kv

    def forward(self, embeddings: torch.Tensor, context: PagedContext, caches: list[KVLayer]) -> torch.Tensor:
        """Run draft blocks: `[num_queries, hidden]` embeddings -> final-normed outputs of the same shape.

        The queries' K/V goes to positions that RESERVE holds for them, and the next injection there overwrites it.
        """
        hidden = embeddings
        tables = self.rotary.tables(context.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer.forward(hidden, context, cache, tables)
        return F.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.spec.decoder.rms_norm_eps)


def draft_patterns(spec: DraftSpec) -> tuple[AttentionPattern, ...]:
    """What the queries of each drafter layer see."""
    layers = zip(spec.causal, spec.decoder.sliding_windows, strict=True)
    return tuple(AttentionPattern(causal, window) for causal, window in layers)


def tensor_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a DFlash checkpoint and their shapes. The drafter reads `len(target_layer_ids)` features of the
    target's hidden size, which is the drafter's own here."""
    hidden = spec.decoder.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(spec.decoder.num_layers):
        shapes |= LayerWeights.shapes(spec.decoder, f"layers.{i}.")
    return shapes

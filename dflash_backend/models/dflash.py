"""The DFlash draft model (arXiv 2602.06036): a Qwen3-style stack that reads the context from the target's features.

It has no token input for the context. `inject` writes what captured target features become as keys and values of every
drafter layer; `forward` runs the queries of a draft block, `[anchor, mask, mask, ...]`, over them. Built by `build`,
run by `speculative.DFlashDrafter`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.files import MASK_EMBEDDING, weight_files
from dflash_backend.checkpoints.headers import read_headers
from dflash_backend.checkpoints.mask_embedding import load_mask_embedding
from dflash_backend.checkpoints.spec import DraftSpec
from dflash_backend.checkpoints.weights import Progress, load_weights
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.qwen3 import layer_config
from dflash_backend.models.rope import Rotary


class DFlashModel:
    """The drafter's weights and arithmetic.

    What the checkpoint does not ship is None, and the target's serves: embedding `[vocab_size, hidden]`, lm_head
    `[draft_vocab_size, hidden]`. mask_embedding: `[hidden]`, where it was trained apart. id_map: int64
    `[draft_vocab_size]`, the target's id of each draft id; None where they are the same.
    """

    def __init__(
        self,
        spec: DraftSpec,
        tensors: dict[str, torch.Tensor],
        max_positions: int,
        dtype: torch.dtype,
        ops: LayerOps | None = None,
    ) -> None:
        """Empties `tensors`. `ops`: None takes what suits their device."""
        self.spec = spec
        self.eps = spec.decoder.rms_norm_eps
        self.fc = tensors.pop("fc.weight")
        self.hidden_norm = tensors.pop("hidden_norm.weight")
        self.final_norm = tensors.pop("norm.weight")
        self.embedding = tensors.pop("embed_tokens.weight", None)
        self.lm_head = tensors.pop("lm_head.weight", None)
        self.mask_embedding: torch.Tensor | None = None
        if spec.has_mask_embedding:
            vector = load_mask_embedding(spec.path / MASK_EMBEDDING, spec.mask_token_id, spec.decoder.hidden_size)
            self.mask_embedding = vector.to(self.fc.device, dtype)
        self.id_map = vocabulary_map(spec, tensors.pop("d2t")) if spec.maps_vocabulary else None
        self.ops = ops or select_ops(self.fc.device)
        self.rotary = Rotary(spec.decoder, max_positions, self.fc.device, dtype)
        self.patterns = draft_patterns(spec)
        self.layers = []
        for i, pattern in enumerate(self.patterns):
            weights = LayerWeights.take(tensors, spec.decoder, layer_config(spec.decoder, i), f"layers.{i}.")
            self.layers.append(DecoderLayer(spec.decoder, weights, pattern, self.ops))
        query = spec.decoder.query_size
        # The K/V rows of every layer's fused projection as one matrix: context K/V of all layers is one product.
        self.context_weight = torch.cat([layer.weights.qkv[query:] for layer in self.layers])
        biases = [layer.weights.qkv_bias for layer in self.layers]
        self.context_bias = torch.cat([b[query:] for b in biases if b is not None]) if biases[0] is not None else None
        heads = spec.decoder.num_heads
        norms = [layer.weights.qk_norm for layer in self.layers]
        self.context_k_norm = torch.stack([norm[heads:] for norm in norms if norm is not None])

    @classmethod
    def load(
        cls,
        spec: DraftSpec,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        ops: LayerOps | None = None,
    ) -> DFlashModel:
        """Load the weights of `spec.path`. Raises `CheckpointError`."""
        tensors = load_weights(
            spec.path,
            tensor_shapes(spec),
            dtype,
            device,
            integers=frozenset({"d2t"}),
            ignored=lambda name: is_unused(spec, name),
            progress=progress,
        )
        return cls(spec, tensors, max_positions, dtype, ops)

    def inject(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: list[KVLayer],
        padded: bool = False,
    ) -> None:
        """Write the context K/V of every drafter layer to `slots` of its cache.

        features: `[n, L * target_hidden]`; positions: int64 `[n]`, the tokens' own; slots: int64 `[n]`, with `padded`
        some of them below 0, for tokens that write nothing. No input norm here: `fc`, `hidden_norm`, then each layer's
        k and v projection, k norm and rotation.
        """
        context = self.ops.rms_norm(F.linear(features, self.fc), self.hidden_norm, self.eps)
        projected = F.linear(context, self.context_weight, self.context_bias)
        rotation = self.ops.rotation(self.rotary, positions)
        self.ops.context_write(projected, self.context_k_norm, self.eps, rotation, slots, caches, padded)

    def forward(self, embeddings: torch.Tensor, context: PagedContext, caches: list[KVLayer]) -> torch.Tensor:
        """Run draft blocks: `[num_queries, hidden]` embeddings -> final-normed outputs of the same shape.

        The queries' K/V goes to positions that RESERVE holds for them, and the next injection there overwrites it.
        """
        rotation = self.ops.rotation(self.rotary, context.positions)
        hidden = embeddings
        normed = self.ops.rms_norm(hidden, self.layers[0].weights.input_norm, self.eps)
        next_norms = [layer.weights.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for layer, cache, next_norm in zip(self.layers, caches, next_norms, strict=True):
            added, hidden = layer.forward(normed, hidden, context, cache, rotation)
            normed, hidden = self.ops.add_rms_norm(added, hidden, next_norm, self.eps)
        return normed


def draft_patterns(spec: DraftSpec) -> tuple[AttentionPattern, ...]:
    """What the queries of each drafter layer see."""
    layers = zip(spec.causal, spec.decoder.sliding_windows, strict=True)
    return tuple(AttentionPattern(causal, window) for causal, window in layers)


def tensor_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a DFlash checkpoint and their shapes."""
    hidden = spec.decoder.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.target_layer_ids) * spec.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if spec.has_embedding:
        shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
    if spec.has_lm_head:
        shapes["lm_head.weight"] = (spec.draft_vocab_size, hidden)
    if spec.maps_vocabulary:
        shapes["d2t"] = (spec.draft_vocab_size,)
    for i in range(spec.decoder.num_layers):
        shapes |= LayerWeights.shapes(spec.decoder, layer_config(spec.decoder, i), f"layers.{i}.")
    return shapes


def is_unused(spec: DraftSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint has no part in serving: what only training needs, and maps from a vocabulary
    to itself."""
    return name == "t2d" or name.startswith("verifier_") or (name == "d2t" and not spec.maps_vocabulary)


def vocabulary_map(spec: DraftSpec, offsets: torch.Tensor) -> torch.Tensor:
    """The target's id of each draft id, from `d2t` (int64 `[draft_vocab_size]`, what to add to a draft id).

    Raises `CheckpointError` when an id is outside the target's vocabulary or two draft ids share one: the draft's
    distribution would not be what it was drawn from (LOSSLESS).
    """
    draft_ids = torch.arange(len(offsets), device=offsets.device)
    # Compared before the sum, which could overflow.
    outside = ((offsets < -draft_ids) | (offsets >= spec.vocab_size - draft_ids)).nonzero().flatten()
    if len(outside):
        draft_id = int(outside[0])
        raise CheckpointError(
            f"{_file_of_map(spec)}: tensor 'd2t' is {int(offsets[draft_id])} at draft id {draft_id}; expected a target "
            f"id (draft id + d2t) from 0 to {spec.vocab_size - 1}"
        )
    ids = draft_ids + offsets
    ordered, order = ids.sort(stable=True)
    repeats = (ordered[1:] == ordered[:-1]).nonzero().flatten()
    if len(repeats):
        first, second = order[repeats[0] : repeats[0] + 2].tolist()
        raise CheckpointError(
            f"{_file_of_map(spec)}: tensor 'd2t' maps the draft ids {first} (d2t {int(offsets[first])}) and {second} "
            f"(d2t {int(offsets[second])}) both to the target id {int(ids[first])}; expected one draft id for each"
        )
    return ids


def _file_of_map(spec: DraftSpec) -> Path:
    return read_headers(weight_files(spec.path))["d2t"].file

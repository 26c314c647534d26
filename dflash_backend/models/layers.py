"""The decoder layer of most targets and of all drafters that are models: `DecoderSpec` says in what layers differ.
Gemma 4's is in `gemma4.py`, those of hybrids in `hybrid_layers.py`.

Projections that read the same input are one matrix product (q, k and v; gate and up), and what lies between products
and attention is an operation of `ops.py`: few calls, since at small batches a call costs more than its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec, MoeSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.gpt_oss import read_gpt_oss_experts
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.linear import Linear, Parts
from dflash_backend.models.mlp import DenseMlp, Mlp, SparseMlp
from dflash_backend.models.ops import LayerOps, Rotation


@dataclass(frozen=True)
class LayerWeights(Parts):
    """The parameters of one decoder layer.

    qkv: hidden -> query_size + 2 * kv_size; output: query_size -> hidden. qk_norm:
    `[num_heads + num_kv_heads, head_dim]`, the q norm's weight for the query heads, then the k norm's; None where the
    layer has no such norm. sinks: `[num_heads]`, a learned logit of each head in its softmax; None where it has none.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp: Mlp
    sinks: torch.Tensor | None = None

    @classmethod
    def read(
        cls, source: WeightSource, prefix: str, spec: DecoderSpec, index: int, input_size: int | None = None
    ) -> LayerWeights:
        """Layer `index` of a decoder, whose tensors' names begin with `prefix`. input_size: of what attention reads,
        where that is not the normed hidden state."""
        hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return cls(
            input_norm=source.tensor(f"{prefix}input_layernorm.weight", hidden),
            post_norm=source.tensor(f"{prefix}post_attention_layernorm.weight", hidden),
            qkv=Linear.read(
                source,
                attention,
                {"q_proj": query, "k_proj": kv, "v_proj": kv},
                input_size or hidden,
                spec.qkv_bias,
            ),
            qk_norm=cls._read_qk_norm(source, attention, spec) if spec.qk_norm else None,
            output=Linear.read(source, attention, {"o_proj": hidden}, query, spec.output_bias),
            mlp=cls._read_mlp(source, mlp, spec, spec.experts_of(index)),
            sinks=source.tensor(f"{attention}sinks", spec.num_heads) if spec.sinks else None,
        )

    @staticmethod
    def _read_mlp(source: WeightSource, prefix: str, spec: DecoderSpec, moe: MoeSpec | None) -> DenseMlp | SparseMlp:
        if moe is None:
            return DenseMlp.read(source, prefix, spec.hidden_size, spec.intermediate_size, spec.mlp_bias)
        read = SparseMlp.read if moe.swiglu is None else read_gpt_oss_experts
        return read(source, prefix, spec.hidden_size, moe)

    @staticmethod
    def _read_qk_norm(source: WeightSource, prefix: str, spec: DecoderSpec) -> torch.Tensor:
        norms = source.empty(spec.num_heads + spec.num_kv_heads, spec.head_dim)
        norms[: spec.num_heads] = source.tensor(f"{prefix}q_norm.weight", spec.head_dim)
        norms[spec.num_heads :] = source.tensor(f"{prefix}k_norm.weight", spec.head_dim)
        return norms


class DecoderLayer:
    """One pre-norm decoder layer: paged attention, then the MLP."""

    def __init__(self, spec: DecoderSpec, weights: LayerWeights, pattern: AttentionPattern, ops: LayerOps) -> None:
        self.eps = spec.rms_norm_eps
        self.pattern = pattern
        self.weights = weights
        self.ops = ops

    def forward(
        self, normed: torch.Tensor, hidden: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over its input `hidden` and the norm of it by this layer's `input_norm`.

        Returns the MLP's output and what it is added to: the caller adds them together with the norm that follows. All
        are `[num_tokens, hidden_size]`. Writes the tokens' KV to its slots first, so that queries see the new
        tokens of their own request as the metadata allows.
        """
        w = self.weights
        attended = self._attend(normed, context, cache, rotation)
        normed, hidden = self.ops.linear_norm(w.output, attended, hidden, w.post_norm, self.eps)
        return self.weights.mlp.forward(normed, self.ops), hidden

    def _attend(self, normed: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation) -> torch.Tensor:
        """Attention: `[num_tokens, hidden_size]` -> `[num_tokens, query_size]`. Apart from `forward`, so that the
        projections are freed before the MLP takes memory for its own."""
        w = self.weights
        query = self.ops.linear_rope_write(
            w.qkv, normed, w.qk_norm, self.eps, rotation, context.slots_of(self.pattern), cache, context.padded
        )
        return context.backend.attend(query, cache, context.metadata(self.pattern), w.sinks)

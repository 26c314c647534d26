"""The decoder layer that the targets and the DFlash drafter share, on plain tensors.

Families differ in a few places, which `LayerConfig` names; everything else is here once. Projections that read the same
input are one matrix product (q, k and v; gate and up), and what lies between products and attention is an operation of
`ops.py`: few calls, since at small batches a call costs more than its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec, MoeSpec
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.mlp import DenseMlp, Shapes, Tensors, take_fused
from dflash_backend.models.moe import SparseMlp
from dflash_backend.models.ops import LayerOps, Rotation

QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class LayerConfig:
    """What distinguishes a family's decoder layer.

    qk_norm: an RMSNorm on every query and key head before the rotation. qkv_bias, output_bias, mlp_bias: the
    projections into attention, the one out of it and those of the MLP have biases. moe: experts in place of the MLP.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    moe: MoeSpec | None = None


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one decoder layer; None where its config has no such tensor.

    qkv: `[query_size + 2 * kv_size, hidden]`; output: `[hidden, query_size]`. qk_norm:
    `[num_heads + num_kv_heads, head_dim]`, the q norm's weight for the query heads, then the k norm's.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp: DenseMlp | SparseMlp

    @staticmethod
    def shapes(spec: DecoderSpec, config: LayerConfig, prefix: str) -> Shapes:
        """The checkpoint tensors of a layer of this config whose names begin with `prefix`, with their shapes."""
        hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
        shapes: Shapes = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, query),
        }
        if config.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
        if config.qkv_bias:
            shapes |= {f"self_attn.{name}.bias": (size,) for name, size in zip(QKV, (query, kv, kv), strict=True)}
        if config.output_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        mlp = SparseMlp.shapes(spec, config.moe) if config.moe else DenseMlp.shapes(spec, config.mlp_bias)
        shapes |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        return {prefix + name: shape for name, shape in shapes.items()}

    @classmethod
    def take(cls, tensors: Tensors, spec: DecoderSpec, config: LayerConfig, prefix: str) -> LayerWeights:
        """Fuse the layer's tensors, removing them from `tensors`: a model in the making takes one layer's memory more
        than the model."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return cls(
            input_norm=tensors.pop(f"{prefix}input_layernorm.weight"),
            post_norm=tensors.pop(f"{prefix}post_attention_layernorm.weight"),
            qkv=take_fused(tensors, attention, *(f"{name}.weight" for name in QKV)),
            qkv_bias=take_fused(tensors, attention, *(f"{name}.bias" for name in QKV)) if config.qkv_bias else None,
            qk_norm=cls._take_qk_norm(tensors, spec, attention) if config.qk_norm else None,
            output=tensors.pop(f"{attention}o_proj.weight"),
            output_bias=tensors.pop(f"{attention}o_proj.bias") if config.output_bias else None,
            mlp=SparseMlp.take(tensors, mlp, config.moe)
            if config.moe
            else DenseMlp.take(tensors, mlp, config.mlp_bias),
        )

    @staticmethod
    def _take_qk_norm(tensors: Tensors, spec: DecoderSpec, prefix: str) -> torch.Tensor:
        query = tensors.pop(f"{prefix}q_norm.weight").expand(spec.num_heads, -1)
        key = tensors.pop(f"{prefix}k_norm.weight").expand(spec.num_kv_heads, -1)
        return torch.cat([query, key])


class DecoderLayer:
    """One pre-norm decoder layer: paged attention, then the MLP. `ops` are those of the model."""

    def __init__(self, spec: DecoderSpec, weights: LayerWeights, pattern: AttentionPattern, ops: LayerOps) -> None:
        self.eps = spec.rms_norm_eps
        self.pattern = pattern
        self.weights = weights
        self.ops = ops

    def forward(
        self, normed: torch.Tensor, hidden: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over its input `hidden` and the norm of it by this layer's `input_norm`.

        Returns what the MLP adds, and what it is added to: their sum is the layer's output. It is the caller's to add
        them, together with the norm that follows. All are `[num_tokens, hidden_size]`. Writes the tokens' K/V to
        `context.slots` first, so that queries see their own row's new tokens as the metadata allows.
        """
        w = self.weights
        attended = self._attend(normed, context, cache, rotation)
        normed, hidden = self.ops.add_rms_norm(attended, hidden, w.post_norm, self.eps)
        return w.mlp.forward(normed, self.ops), hidden

    def _attend(self, normed: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation) -> torch.Tensor:
        """Attention and its projection: `[num_tokens, hidden_size]` -> the same shape. Apart from `forward`, so that
        the projections are freed before the MLP takes memory for its own."""
        w = self.weights
        query = self.ops.qk_norm_rope_write(
            F.linear(normed, w.qkv, w.qkv_bias), w.qk_norm, self.eps, rotation, context.slots, cache, context.padded
        )
        attended = context.backend.attend(query, cache, context.metadata[self.pattern])
        return F.linear(attended, w.output, w.output_bias)

"""Gemma 4's decoder, the text part: norms on both sides of each sublayer, and layers of two kinds, those with a window
and those that see everything, which have heads of their own and values that may be their keys.

Scores are not divided by the root of the head size, as backends do it: the query norm's weight makes up for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec, MoeSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.experts import ExpertWeight, read_experts, run_experts
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.linear import Linear, Parts
from dflash_backend.models.mlp import DenseMlp, Mlp
from dflash_backend.models.ops import LayerOps, Rotation


@dataclass(frozen=True)
class Gemma4Experts(Parts):
    """The experts of a layer, which run beside its MLP over the same hidden states.

    router: hidden -> num_experts. router_norm: what the normed hidden state is multiplied by before it, its learned
    scale over the root of the hidden size, float32. expert_scale: `[num_experts]`, times an expert's weight. gate_up:
    `[num_experts, 2 * intermediate, hidden]`; down: `[num_experts, hidden, intermediate]`; or both quantised. norm: of
    what experts read; mlp_norm and own_norm: of what the MLP and the experts give.
    """

    moe: MoeSpec
    router: Linear
    router_norm: torch.Tensor
    expert_scale: torch.Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    norm: torch.Tensor
    mlp_norm: torch.Tensor
    own_norm: torch.Tensor

    @classmethod
    def read(cls, source: WeightSource, prefix: str, hidden: int, moe: MoeSpec) -> Gemma4Experts:
        """The experts of the layer whose tensors' names begin with `prefix`."""
        gate_up, down = read_experts(source, prefix, hidden, moe)
        scale = source.tensor(f"{prefix}router.scale", hidden)
        return cls(
            moe,
            Linear.read(source, f"{prefix}router.", {"proj": moe.num_experts}, hidden),
            scale.float() * hidden**-0.5,
            source.tensor(f"{prefix}router.per_expert_scale", moe.num_experts),
            gate_up,
            down,
            norm=source.tensor(f"{prefix}pre_feedforward_layernorm_2.weight", hidden),
            mlp_norm=source.tensor(f"{prefix}post_feedforward_layernorm_1.weight", hidden),
            own_norm=source.tensor(f"{prefix}post_feedforward_layernorm_2.weight", hidden),
        )

    def forward(self, hidden: torch.Tensor, ops: LayerOps, eps: float) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`, before `own_norm`."""
        logits = self.router(ops.rms_norm(hidden, self.router_norm, eps))
        weights, experts = ops.route(logits, self.moe.experts_per_token, self.moe.norm_topk_prob)
        weights = weights * self.expert_scale[experts.long()]
        x = ops.rms_norm(hidden, self.norm, eps)
        return run_experts(ops, x, (self.gate_up, self.down), weights, experts, is_gelu=True)


@dataclass(frozen=True)
class Gemma4LayerWeights(Parts):
    """The parameters of one layer.

    input_norm and post_norm: before and after attention; mlp_norm and post_mlp_norm: before and after the MLP. qkv:
    hidden -> query_size + 2 * kv_size. qk_norm: `[num_heads + num_kv_heads, head_dim]`, float32. value_norm:
    `[head_dim]`, ones. scalar: `[1]`, what the layer's output is multiplied by. experts: None where there are none.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    mlp_norm: torch.Tensor
    post_mlp_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor
    value_norm: torch.Tensor
    output: Linear
    mlp: Mlp
    scalar: torch.Tensor
    experts: Gemma4Experts | None

    @classmethod
    def read(cls, source: WeightSource, prefix: str, spec: DecoderSpec, index: int) -> Gemma4LayerWeights:
        """Layer `index` of a decoder, whose tensors' names begin with `prefix`."""
        heads, hidden, attention = spec.of_layer(index), spec.hidden_size, f"{prefix}self_attn."
        moe = spec.experts_of(index)

        def norm(name: str) -> torch.Tensor:
            return source.tensor(f"{prefix}{name}_layernorm.weight", hidden)

        return cls(
            input_norm=norm("input"),
            post_norm=norm("post_attention"),
            mlp_norm=norm("pre_feedforward"),
            post_mlp_norm=norm("post_feedforward"),
            qkv=_read_qkv(source, attention, heads, index, spec.qkv_bias),
            qk_norm=_read_qk_norm(source, attention, heads),
            value_norm=source.empty(heads.head_dim).fill_(1.0),
            output=Linear.read(source, attention, {"o_proj": hidden}, heads.query_size, spec.output_bias),
            mlp=DenseMlp.read(source, f"{prefix}mlp.", hidden, spec.intermediate_size, bias=False, is_gelu=True),
            scalar=source.tensor(f"{prefix}layer_scalar", 1),
            experts=Gemma4Experts.read(source, prefix, hidden, moe) if moe is not None else None,
        )


def _read_qkv(source: WeightSource, prefix: str, heads: DecoderSpec, index: int, bias: bool) -> Linear:
    """hidden -> queries, keys and values. Where keys are values too, their rows are there twice."""
    assert heads.gemma4 is not None
    sizes = {"q_proj": heads.query_size, "k_proj": heads.kv_size}
    if not (heads.gemma4.keys_are_values and heads.gemma4.global_layers[index]):
        return Linear.read(source, prefix, sizes | {"v_proj": heads.kv_size}, heads.hidden_size, bias)
    joint = Linear.read(source, prefix, sizes, heads.hidden_size, bias)
    return Linear.stacked([joint, joint.rows(slice(heads.query_size, None))])


def _read_qk_norm(source: WeightSource, prefix: str, heads: DecoderSpec) -> torch.Tensor:
    query, key = (source.tensor(f"{prefix}{kind}_norm.weight", heads.head_dim).float() for kind in "qk")
    query = query * heads.head_dim**0.5
    return torch.cat([query.expand(heads.num_heads, -1), key.expand(heads.num_kv_heads, -1)])


class Gemma4Layer:
    """One decoder layer. heads: the decoder with this layer's heads."""

    def __init__(
        self, heads: DecoderSpec, weights: Gemma4LayerWeights, pattern: AttentionPattern, ops: LayerOps
    ) -> None:
        self.eps = heads.rms_norm_eps
        self.kv_size, self.head_dim = heads.kv_size, heads.head_dim
        self.pattern = pattern
        self.weights = weights
        self.ops = ops

    def forward(self, hidden: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation) -> torch.Tensor:
        """`[num_tokens, hidden_size]` -> the same shape. Writes the tokens' KV to its slots first."""
        w, ops = self.weights, self.ops
        attended = self._attend(ops.rms_norm(hidden, w.input_norm, self.eps), context, cache, rotation)
        attended = ops.rms_norm(attended, w.post_norm, self.eps)
        normed, hidden = ops.add_rms_norm(attended, hidden, w.mlp_norm, self.eps)
        added = w.mlp.forward(normed, ops)
        if w.experts is not None:
            own = ops.rms_norm(w.experts.forward(hidden, ops, self.eps), w.experts.own_norm, self.eps)
            added = ops.rms_norm(added, w.experts.mlp_norm, self.eps) + own
        return (hidden + ops.rms_norm(added, w.post_mlp_norm, self.eps)) * w.scalar

    def _attend(self, normed: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation) -> torch.Tensor:
        """Attention over normed values, and its projection."""
        w = self.weights
        qkv = w.qkv(normed)
        values = qkv[:, -self.kv_size :]
        heads = values.reshape(-1, self.head_dim)
        values.copy_(self.ops.rms_norm(heads, w.value_norm, self.eps).view(values.shape))
        query = self.ops.qk_norm_rope_write(
            qkv, w.qk_norm, self.eps, rotation, context.slots_of(self.pattern), cache, context.padded
        )
        return w.output(context.backend.attend(query, cache, context.metadata(self.pattern)))

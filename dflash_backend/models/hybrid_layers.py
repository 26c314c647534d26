"""The decoder layers of hybrids: those of gated attention, and those with a gated delta net in its place.

Gated attention, as Qwen3-Next has it, is one more projection whose sigmoid multiplies what attention gives, and a
rotation of only a part of each head. The kernels rotate number i of a head with number i + head_dim / 2. So that they
need not know of the part, the numbers of query and key heads change places at load: the rotated ones come first in each
half. Scores stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.attention import KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.delta_net import DeltaNet, DeltaNetWeights
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.linear import Linear, Parts
from dflash_backend.models.mlp import DenseMlp, Mlp, SharedExpertMlp
from dflash_backend.models.ops import LayerOps, Rotation


@dataclass(frozen=True)
class DeltaNetLayerWeights(Parts):
    """The parameters of a layer with a gated delta net."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    net: DeltaNetWeights
    mlp: Mlp


class DeltaNetLayer:
    """One pre-norm decoder layer: a gated delta net, then the MLP. number: which of the layers with a state it is."""

    def __init__(self, spec: DecoderSpec, weights: DeltaNetLayerWeights, number: int, ops: LayerOps) -> None:
        assert spec.delta_net is not None
        self.eps = spec.rms_norm_eps
        self.weights = weights
        self.ops = ops
        self.net = DeltaNet(spec.delta_net, weights.net, spec.rms_norm_eps, number, ops)

    def forward(
        self, normed: torch.Tensor, hidden: torch.Tensor, context: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`, without KV. Raises `RuntimeError` when `context` has no states."""
        if context.states is None:
            raise RuntimeError("a pass through a layer with a recurrent state needs PagedContext.states")
        mixed = self.net.forward(normed, context.states)
        normed, hidden = self.ops.add_rms_norm(mixed, hidden, self.weights.post_norm, self.eps)
        return self.weights.mlp.forward(normed, self.ops), hidden


class GatedAttentionLayer(DecoderLayer):
    """A decoder layer whose `qkv` has the gates behind the values."""

    def _attend(self, normed: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation) -> torch.Tensor:
        w = self.weights
        projected, query_size = w.qkv(normed), w.output.in_features
        qkv, gate = projected[:, :-query_size], projected[:, -query_size:]
        query = self.ops.qk_norm_rope_write(
            qkv, w.qk_norm, self.eps, rotation, context.slots_of(self.pattern), cache, context.padded
        )
        attended = context.backend.attend(query, cache, context.metadata(self.pattern), w.sinks)
        return attended * gate.sigmoid().view(attended.shape)


def read_hybrid_layer(
    source: WeightSource, prefix: str, spec: DecoderSpec, index: int
) -> LayerWeights | DeltaNetLayerWeights:
    """Layer `index` of a hybrid, whose tensors' names begin with `prefix`."""
    hidden = spec.hidden_size
    norms = [
        read_norm(source, f"{prefix}{name}_layernorm.weight", spec, hidden) for name in ("input", "post_attention")
    ]
    mlp = _read_mlp(source, f"{prefix}mlp.", spec, index)
    if not spec.has_attention(index):
        assert spec.delta_net is not None
        net = DeltaNetWeights.read(source, f"{prefix}linear_attn.", spec, spec.delta_net)
        return DeltaNetLayerWeights(norms[0], norms[1], net, mlp)
    attention = f"{prefix}self_attn."
    qkv = read_gated_qkv(source, attention, spec, spec.qkv_bias)
    output = Linear.read(source, attention, {"o_proj": hidden}, spec.query_size, spec.output_bias)
    return LayerWeights(norms[0], norms[1], qkv, _read_qk_norm(source, attention, spec), output, mlp)


def read_norm(source: WeightSource, name: str, spec: DecoderSpec, size: int) -> torch.Tensor:
    """What an RMSNorm multiplies by: `[size]`, the tensor `name`, and where norms are zero-centred 1 more, in float32:
    in 16 bits the sum would lose what the weight has behind its first digits."""
    weight = source.tensor(name, size)
    return 1.0 + weight.float() if spec.centred_norms else weight


def _read_qk_norm(source: WeightSource, prefix: str, spec: DecoderSpec) -> torch.Tensor:
    order = head_order(spec).to(source.device)
    query, key = (read_norm(source, f"{prefix}{kind}_norm.weight", spec, spec.head_dim)[order] for kind in "qk")
    return torch.cat([query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)])


def _read_mlp(source: WeightSource, prefix: str, spec: DecoderSpec, index: int) -> Mlp:
    moe = spec.experts_of(index)
    if moe is None:
        return DenseMlp.read(source, prefix, spec.hidden_size, spec.intermediate_size, bias=False)
    return SharedExpertMlp.read(source, prefix, spec.hidden_size, moe)


def read_gated_qkv(source: WeightSource, prefix: str, spec: DecoderSpec, bias: bool) -> Linear:
    """hidden -> queries, keys, values and gates, from tensors whose names begin with `prefix`. They are stored with
    each query head before its gate."""
    rows = {"q_proj": 2 * spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    stored = Linear.read(source, prefix, rows, spec.hidden_size, bias)
    return stored.rows(_row_order(spec).to(source.device))


def head_order(spec: DecoderSpec) -> torch.Tensor:
    """Which number of a stored head comes to each place: int64 `[head_dim]`."""
    half, unrotated = (spec.rotary_dim or spec.head_dim) // 2, torch.arange(spec.rotary_dim, spec.head_dim)
    if not spec.rotary_dim:
        return torch.arange(spec.head_dim)
    low, high = unrotated.chunk(2)
    return torch.cat([torch.arange(half), low, torch.arange(half, 2 * half), high])


def _row_order(spec: DecoderSpec) -> torch.Tensor:
    """Which stored row comes to each place, int64 `[2 * query_size + 2 * kv_size]`."""
    order, queries = head_order(spec), 2 * spec.query_size
    rows = torch.arange(queries + 2 * spec.kv_size)
    heads, gates = rows[:queries].unflatten(0, (spec.num_heads, 2, spec.head_dim)).unbind(1)
    keys, values = rows[queries:].unflatten(0, (2, spec.num_kv_heads, spec.head_dim))
    return torch.cat([heads[:, order].flatten(), keys[:, order].flatten(), values.flatten(), gates.flatten()])

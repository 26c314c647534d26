"""The pieces of a Qwen3-style decoder layer, on plain tensors: used by the targets and by the DFlash drafter.

Projections that read the same input are one matrix product (q, k and v; gate and up), and q and k are normalised and
rotated together as the heads of one tensor: few calls, since at small batches a call costs more than its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.interface import PagedContext


class Rotary:
    """Rotary position embedding with precomputed tables (Su et al., arXiv 2104.09864; half-split pairing).

    Tables are float32 `[max_positions, head_dim]`; the sine's first half is negated, so that a rotation is
    `x * cos + swap_halves(x) * sin`.
    """

    def __init__(self, spec: DecoderSpec, max_positions: int, device: torch.device, dtype: torch.dtype) -> None:
        half = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] / spec.rope.theta**half
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat([cos, cos], dim=1).to(device=device, dtype=dtype)
        self.sin = torch.cat([-sin, sin], dim=1).to(device=device, dtype=dtype)
        self.half = spec.head_dim // 2

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for `positions` (int64 `[n]`): each `[n, 1, head_dim]`, to be shared by all layers."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def rotate(self, heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate `heads` `[n, num_heads, head_dim]`."""
        cos, sin = tables
        return torch.addcmul(heads * cos, heads.roll(self.half, -1), sin)


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one decoder layer.

    qkv: `[query_size + 2 * kv_size, hidden]`; output: `[hidden, query_size]`; gate_up: `[2 * intermediate, hidden]`;
    down: `[hidden, intermediate]`. qk_norm: `[num_heads + num_kv_heads, head_dim]`, the q norm's weight for the query
    heads, then the k norm's. Biases are None without `attention_bias`.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor
    output: torch.Tensor
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def shapes(spec: DecoderSpec, prefix: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint tensors of a Qwen3 layer whose names begin with `prefix`, with their shapes."""
        hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "self_attn.q_norm.weight": (spec.head_dim,),
            "self_attn.k_norm.weight": (spec.head_dim,),
            "mlp.gate_proj.weight": (spec.intermediate_size, hidden),
            "mlp.up_proj.weight": (spec.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, spec.intermediate_size),
        }
        if spec.attention_bias:
            sizes = {"q": query, "k": kv, "v": kv, "o": hidden}
            shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        return {prefix + name: shape for name, shape in shapes.items()}

    @classmethod
    def take(cls, tensors: dict[str, torch.Tensor], spec: DecoderSpec, prefix: str) -> LayerWeights:
        """Fuse the layer's tensors, removing them from `tensors` so that no second copy stays in memory."""

        def pop(*names: str) -> torch.Tensor:
            parts = [tensors.pop(prefix + name) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        bias = spec.attention_bias
        q_norm, k_norm = pop("self_attn.q_norm.weight"), pop("self_attn.k_norm.weight")
        heads = [q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)]
        return cls(
            input_norm=pop("input_layernorm.weight"),
            post_norm=pop("post_attention_layernorm.weight"),
            qkv=pop("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            qkv_bias=pop("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias") if bias else None,
            qk_norm=torch.cat(heads),
            output=pop("self_attn.o_proj.weight"),
            output_bias=pop("self_attn.o_proj.bias") if bias else None,
            gate_up=pop("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=pop("mlp.down_proj.weight"),
        )


class DecoderLayer:
    """One pre-norm decoder layer: paged attention with q/k norm, then a SiLU-gated MLP."""

    def __init__(self, spec: DecoderSpec, weights: LayerWeights, rotary: Rotary, pattern: AttentionPattern) -> None:
        self.spec = spec
        self.pattern = pattern
        self.weights = weights
        self.rotary = rotary

    def forward(
        self,
        hidden: torch.Tensor,
        context: PagedContext,
        cache: KVLayer,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """`[num_tokens, hidden_size]` -> the same shape. Writes the tokens' K/V to `context.slots` first, so that
        queries see their own row's new tokens as the metadata allows."""
        w = self.weights
        query, kv = self.project(self.norm(hidden, w.input_norm), tables)
        context.backend.write_kv(kv, context.slots, cache)
        attended = context.backend.attend(query, cache, context.metadata[self.pattern])
        hidden = hidden + F.linear(attended, w.output, w.output_bias)
        gate, up = F.linear(self.norm(hidden, w.post_norm), w.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, w.down)

    def project(
        self, normed: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[n, num_heads, head_dim]` and K/V `[n, 2, num_kv_heads, head_dim]` of `normed` `[n, hidden]`."""
        s, w = self.spec, self.weights
        heads = F.linear(normed, w.qkv, w.qkv_bias).view(len(normed), -1, s.head_dim)
        num_rotated = s.num_heads + s.num_kv_heads
        rotated = self.rotary.rotate(head_norm(heads[:, :num_rotated], w.qk_norm, s.rms_norm_eps), tables)
        kv = torch.stack([rotated[:, s.num_heads :], heads[:, num_rotated:]], dim=1)
        return rotated[:, : s.num_heads], kv

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        return F.rms_norm(hidden, weight.shape, weight, self.spec.rms_norm_eps)


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over each head: `[n, heads, head_dim]` with a weight for each head `[heads, head_dim]`."""
    return F.rms_norm(heads, heads.shape[-1:], None, eps) * weight

"""The same cycle in plain torch, without our kernels, graphs, paging or scheduler: what the engine is compared with.

Written from the models' papers on checkpoint tensors, one dense KV tensor a layer, one call after the other, as a
careful user would write it: fused q/k/v and gate/up, attention as two batched products that read the KV of a group of
heads once. Dense models only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu.shapes import RandomTensors, Shape
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.rope import inverse_frequencies


@dataclass(frozen=True)
class PlainLayer:
    """The tensors of one layer; q_norm and k_norm only where the family has them."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def make(cls, tensors: RandomTensors, prefix: str, qk_norm: bool) -> PlainLayer:
        """Those whose names begin with `prefix`."""
        attention = f"{prefix}self_attn."
        return cls(
            input_norm=tensors.make(f"{prefix}input_layernorm.weight"),
            post_norm=tensors.make(f"{prefix}post_attention_layernorm.weight"),
            qkv=torch.cat([tensors.make(f"{attention}{name}_proj.weight") for name in "qkv"]),
            output=tensors.make(f"{attention}o_proj.weight"),
            q_norm=tensors.make(f"{attention}q_norm.weight") if qk_norm else None,
            k_norm=tensors.make(f"{attention}k_norm.weight") if qk_norm else None,
            gate_up=torch.cat([tensors.make(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]),
            down=tensors.make(f"{prefix}mlp.down_proj.weight"),
        )


class PlainStack:
    """Decoder layers over dense KV `[batch, num_kv_heads, length, head_dim]`, of checkpoint tensors below `prefix`."""

    def __init__(
        self, spec: DecoderSpec, tensors: RandomTensors, prefix: str, causal: bool, batch: int, length: int
    ) -> None:
        self.spec, self.causal = spec, causal
        self.layers = [PlainLayer.make(tensors, f"{prefix}layers.{i}.", spec.qk_norm) for i in range(spec.num_layers)]
        shape = (batch, spec.num_kv_heads, length, spec.head_dim)
        # Random, since hardware is faster on zeros.
        self.cache = [
            tuple(torch.randn(shape, dtype=tensors.dtype, device=tensors.device) for _ in "kv") for _ in self.layers
        ]
        angles = torch.arange(length)[:, None] * inverse_frequencies(spec.rope, spec.head_dim)
        self.cos = angles.cos().repeat(1, 2).to(tensors.device, tensors.dtype)
        self.sin = angles.sin().repeat(1, 2).to(tensors.device, tensors.dtype)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, capture: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`[batch, queries, hidden]` at `positions` `[batch, queries]`; also the outputs of the layers `capture`."""
        seen = positions.max(dim=1, keepdim=True).values.expand_as(positions) if not self.causal else positions
        length = self.cache[0][0].shape[2]
        # [batch, 1, 1, queries, length]: what a query may not see.
        hides = (torch.arange(length, device=hidden.device) > seen[..., None])[:, None, None]
        captured = []
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attend(index, layer, self.norm(hidden, layer.input_norm), positions, hides)
            gate, up = F.linear(self.norm(hidden, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
            if index in capture:
                captured.append(hidden)
        return hidden, captured

    def write(self, index: int, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> None:
        """K and V `[batch, queries, num_kv_heads, head_dim]` of a layer to `positions`."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for cache, new in zip(self.cache[index], (key, value), strict=True):
            cache.transpose(1, 2)[rows, positions] = new

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[batch, queries, heads, head_dim]`."""
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return heads * self.cos[positions][:, :, None] + turned * self.sin[positions][:, :, None]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        return F.rms_norm(x, x.shape[-1:], weight, self.spec.rms_norm_eps)

    def _attend(
        self,
        index: int,
        layer: PlainLayer,
        normed: torch.Tensor,
        positions: torch.Tensor,
        hides: torch.Tensor,
    ) -> torch.Tensor:
        spec = self.spec
        batch, queries, _ = normed.shape
        heads = F.linear(normed, layer.qkv).view(batch, queries, -1, spec.head_dim)
        query, key, value = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self.norm(query, layer.q_norm), self.norm(key, layer.k_norm)
        self.write(index, self.rotate(key, positions), value, positions)
        keys, values = self.cache[index]
        grouped = self.rotate(query, positions).transpose(1, 2).reshape(batch, spec.num_kv_heads, -1, spec.head_dim)
        scores = (grouped @ keys.transpose(2, 3)).view(batch, spec.num_kv_heads, -1, queries, keys.shape[2])
        weights = (scores * spec.head_dim**-0.5).masked_fill(hides, float("-inf")).softmax(dim=-1)
        attended = (weights.flatten(2, 3) @ values).view(batch, spec.num_heads, queries, spec.head_dim)
        return F.linear(attended.transpose(1, 2).flatten(2), layer.output)


class PlainPair:
    """A target and its drafter in plain torch, at a fixed batch; `decode` and `cycle` run the same work as the engine's
    k = 0 step and DFlash cycle."""

    def __init__(self, shape: Shape, target: RandomTensors, draft: RandomTensors, batch: int, length: int) -> None:
        self.shape, self.batch = shape, batch
        self.embedding = target.make("model.embed_tokens.weight")
        self.head = target.make("lm_head.weight")
        self.final_norm = target.make("model.norm.weight")
        self.target = PlainStack(shape.target.decoder, target, "model.", True, batch, length)
        self.fc = draft.make("fc.weight")
        self.hidden_norm = draft.make("hidden_norm.weight")
        self.draft_norm = draft.make("norm.weight")
        self.draft = PlainStack(shape.draft.decoder, draft, "", False, batch, length)
        mask = torch.full((batch, shape.num_speculative_tokens), shape.draft.mask_token_id, device=self.fc.device)
        self.masks = mask

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """One greedy step without drafts: the next token `[batch, 1]` after `tokens` `[batch, 1]` at `lengths`
        `[batch]`."""
        hidden, _ = self.target.forward(F.embedding(tokens, self.embedding), lengths[:, None])
        return self.logits(hidden, self.final_norm).argmax(dim=-1)

    @torch.inference_mode()
    def cycle(
        self, tokens: torch.Tensor, lengths: torch.Tensor, accepted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Verify, accept, inject, draft. `tokens` `[batch, 1 + k]`: each row's last token and its drafts, the first at
        position `lengths` `[batch]`; `accepted` `[batch]`: how many drafts are accepted, as drawn. Returns the next
        cycle's tokens and lengths."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = lengths[:, None] + steps
        capture = self.shape.draft.target_layer_ids
        hidden, features = self.target.forward(F.embedding(tokens, self.embedding), positions, capture)
        choices = self.logits(hidden, self.final_norm).argmax(dim=-1)
        anchors = choices.gather(1, accepted[:, None])
        self._inject(torch.cat(features, dim=-1), positions)
        lengths = lengths + 1 + accepted
        blocks = torch.cat([anchors, self.masks], dim=1)
        hidden, _ = self.draft.forward(F.embedding(blocks, self.embedding), lengths[:, None] + steps)
        drafts = self.logits(hidden[:, 1:], self.draft_norm).argmax(dim=-1)
        return torch.cat([anchors, drafts], dim=1), lengths

    def _inject(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Context KV of every position; those of rejected drafts are overwritten before they are seen."""
        spec, draft = self.shape.draft.decoder, self.draft
        context = F.rms_norm(F.linear(features, self.fc), self.hidden_norm.shape, self.hidden_norm, spec.rms_norm_eps)
        for index, layer in enumerate(draft.layers):
            assert layer.k_norm is not None
            heads = F.linear(context, layer.qkv[spec.query_size :])
            key, value = heads.view(*context.shape[:2], -1, spec.head_dim).chunk(2, dim=2)
            draft.write(index, draft.rotate(draft.norm(key, layer.k_norm), positions), value, positions)

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The final norm and the head, which target and drafter share."""
        eps = self.shape.target.decoder.rms_norm_eps
        return F.linear(F.rms_norm(hidden, norm.shape, norm, eps), self.head)

"""DFlash drafting a second time, straight from the equations: dense, without a cache, one row at a time, in float64.

Shares no code with `dflash_backend.models`; of the checkpoint it takes the raw tensors and the normalised spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_backend.checkpoints.spec import RopeSpec
from dflash_backend.drafters.dflash.config import DFlashSpec


@dataclass(frozen=True)
class DenseDrafter:
    """A drafter and what it takes from elsewhere.

    tensors: those of its checkpoint. embedding: `[vocab, hidden]` and head: `[draft_vocab, hidden]`, from whichever
    checkpoint. mask: `[hidden]`, the embedding of the mask queries. target_ids: the target's id of each draft id.
    """

    spec: DFlashSpec
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    head: torch.Tensor
    mask: torch.Tensor
    target_ids: list[int]

    def drafts(self, features: torch.Tensor, anchor: int, k: int) -> tuple[torch.Tensor, list[int]]:
        """Logits of k draft tokens, float64 `[k, draft_vocab]`, and the tokens, in the target's ids.

        features: `[n, L * target_hidden]` of all accepted tokens, which are the positions below the anchor's.
        """
        logits = self.logits(self.outputs(features, anchor, k))
        return logits, [self.target_ids[i] for i in logits.argmax(dim=-1).tolist()]

    def outputs(self, features: torch.Tensor, anchor: int, k: int) -> torch.Tensor:
        """Final-normed outputs of the mask queries, float64 `[k, hidden]`."""
        return self.block_outputs(features, anchor, k)[1:]

    def block_outputs(self, features: torch.Tensor, anchor: int, k: int) -> torch.Tensor:
        """Those of the anchor and of k masks, float64 `[1 + k, hidden]`."""
        features = features.double()
        eps = self.spec.decoder.rms_norm_eps
        context = rms_norm(features @ self._weight("fc").T, self._weight("hidden_norm"), eps)
        x = torch.stack([self.embedding[anchor].double()] + [self.mask.double()] * k) * self.spec.input_embedding_scale
        for layer in range(self.spec.decoder.num_layers):
            name = f"layers.{layer}."
            normed = rms_norm(x, self._weight(name + "input_layernorm"), eps)
            x = x + self._sublayer(
                name + "attention", normed, lambda query, layer=layer: self._attention(layer, context, query)
            )
            normed = rms_norm(x, self._weight(name + "post_attention_layernorm"), eps)
            x = x + self._sublayer(name + "mlp", normed, lambda query, layer=layer: self._mlp(layer, query))
        return rms_norm(x, self._weight("norm"), eps)

    def _sublayer(self, name: str, normed: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What a sublayer adds, `[1 + k, hidden]`, from its normed input."""
        return run(normed)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits of final-normed outputs."""
        form = self.spec.logits
        logits = outputs @ self.head.double().T * form.multiplier
        if form.softcap is not None:
            logits = (logits / form.softcap).tanh() * form.softcap
        return logits * form.scale

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"].double()

    def _attention(self, layer: int, context: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        d = self.spec.decoder
        name = f"layers.{layer}.self_attn."
        n, q = len(context), len(normed)
        # The block's own keys come from the normed queries, the context's from the features without an input norm.
        sources = torch.cat([context, normed])

        def heads(projection: str, rows: torch.Tensor, count: int) -> torch.Tensor:
            projected = rows @ self._weight(name + projection + "_proj").T
            bias = self.tensors.get(f"{name}{projection}_proj.bias")
            return (projected if bias is None else projected + bias.double()).view(len(rows), count, d.head_dim)

        query = rms_norm(heads("q", normed, d.num_heads), self._weight(name + "q_norm"), d.rms_norm_eps)
        key = rms_norm(heads("k", sources, d.num_kv_heads), self._weight(name + "k_norm"), d.rms_norm_eps)
        value = heads("v", sources, d.num_kv_heads)
        positions = torch.cat([torch.arange(n), self.query_positions(n, q)])
        query, key = rotate(query, positions[n:], d.rope), rotate(key, positions, d.rope)
        seen = visible(positions[n:], positions, self.spec.causal[layer], d.sliding_windows[layer])
        outputs = []
        for head in range(d.num_heads):
            shared = head // (d.num_heads // d.num_kv_heads)
            scores = query[:, head] @ key[:, shared].T / math.sqrt(d.head_dim)
            outputs.append(scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ value[:, shared])
        return torch.cat(outputs, dim=-1) @ self._weight(name + "o_proj").T

    def query_positions(self, n: int, q: int) -> torch.Tensor:
        """Positions of the anchor and the masks, after n tokens of context."""
        return n + torch.arange(q)

    def _mlp(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}."
        gate, up = (normed @ self._weight(f"{name}mlp.{part}_proj").T for part in ("gate", "up"))
        return (gate * gate.sigmoid() * up) @ self._weight(name + "mlp.down_proj").T


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def visible(queries: torch.Tensor, keys: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """Which keys a query sees, bool `[num_queries, num_keys]`, from their positions."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance < window) & (distance > -window)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """`[n, heads, dim]`: the pair (i, i + dim / 2) turned as a complex number by position * frequency i."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * torch.tensor(frequencies(rope, half), dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1) * rope.attention_factor


def frequencies(rope: RopeSpec, half: int) -> list[float]:
    """Radians per position of each of the `half` pairs."""
    plain = [rope.theta ** (-i / half) for i in range(half)]
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return [f / rope.factor for f in plain]
    if rope.kind == "llama3":
        return [_llama3(f, rope) for f in plain]
    assert rope.kind == "yarn", rope.kind
    return [_yarn(i, f, half, rope) for i, f in enumerate(plain)]


def _llama3(frequency: float, rope: RopeSpec) -> float:
    """Llama 3.1: fast turns stay, slow ones are stretched by the factor, and between the two they are blended."""
    turns = rope.original_max_positions * frequency / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = min(1.0, max(0.0, share))
    return share * frequency + (1 - share) * frequency / rope.factor


def _yarn(index: int, frequency: float, half: int, rope: RopeSpec) -> float:
    """YaRN (arXiv 2309.00071): the same, but blended over the index of the pair."""

    def pair_that_turns(times: float) -> float:
        return half * math.log(rope.original_max_positions / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    share = min(1.0, max(0.0, (index - low) / max(high - low, 0.001)))
    return share * frequency / rope.factor + (1 - share) * frequency

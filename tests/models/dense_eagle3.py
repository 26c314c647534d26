"""EAGLE-3 drafting a second time, straight from the equations: dense, without a cache, one row at a time, in float64.

Shares no code with `dflash_backend.models`; of the checkpoint it takes the raw tensors and the normalised spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_backend.drafters.eagle3.config import Eagle3Spec
from tests.models.dense_drafter import rms_norm, rotate


@dataclass(frozen=True)
class DenseEagle3:
    """A drafter and what it takes from elsewhere.

    tensors: those of its checkpoint, its layer's under `layers.0.`. embedding: `[vocab, hidden]` and head:
    `[draft_vocab, hidden]`, from whichever checkpoint. target_ids: the target's id of each draft id.
    """

    spec: Eagle3Spec
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    head: torch.Tensor
    target_ids: list[int]

    def drafts(self, features: torch.Tensor, tokens: Sequence[int], k: int) -> tuple[torch.Tensor, list[int]]:
        """Logits of k draft tokens, float64 `[k, draft_vocab]`, and the tokens, in the target's ids.

        features: `[n, L * target_hidden]` of all positions below the anchor's. tokens: n + 1 of them, the anchor last.
        """
        logits, found = [], []
        hidden = self.hidden_states(features)
        inputs = [self.layer_input(*each) for each in zip(self.behind(tokens), hidden, strict=True)]
        last, position = hidden[-1], len(features) - 1
        while True:
            output, last = self.run_layer(torch.stack(inputs), last, position)
            logits.append(output @ self.head.double().T * self.spec.logit_scale)
            found.append(self.choose(logits[-1], len(found)))
            if len(found) == k:
                return torch.stack(logits), found
            inputs.append(self.layer_input(found[-1], last))
            position += 1

    def choose(self, logits: torch.Tensor, place: int) -> int:
        """The draft at a place, in the target's ids, from its logits `[draft_vocab]`."""
        return self.target_ids[int(logits.argmax())]

    def behind(self, tokens: Sequence[int]) -> Sequence[int]:
        """The token that goes with each position of the context."""
        return tokens[1:]

    def hidden_states(self, features: torch.Tensor) -> torch.Tensor:
        """Of the context, `[n, hidden]`."""
        features, eps = features.double(), self.spec.decoder.rms_norm_eps
        if self.spec.norm_before_fc:
            features = rms_norm(features, self._weight("input_norm"), eps)
        if self.spec.fc_norm:
            parts = features.chunk(self.spec.num_features, dim=1)
            features = torch.cat([rms_norm(p, self._weight(f"fc_norm.{i}"), eps) for i, p in enumerate(parts)], dim=1)
        return features @ self._weight("fc").T

    def layer_input(self, token: int, hidden: torch.Tensor) -> torch.Tensor:
        """What attention reads: `[2 * hidden]`."""
        eps = self.spec.decoder.rms_norm_eps
        embedding = rms_norm(self.embedding[token].double(), self._weight("layers.0.input_layernorm"), eps)
        return torch.cat([embedding, rms_norm(hidden, self._weight("layers.0.hidden_norm"), eps)])

    def run_layer(self, inputs: torch.Tensor, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last input's output, final-normed, and the hidden state that follows it: `[hidden]` each."""
        eps = self.spec.decoder.rms_norm_eps
        residual = inputs[-1, len(hidden) :] if self.spec.norm_before_residual else hidden
        x = residual + self._attention(inputs, position)
        normed = rms_norm(x, self._weight("layers.0.post_attention_layernorm"), eps)
        gate, up = (normed @ self._weight(f"layers.0.mlp.{part}_proj").T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ self._weight("layers.0.mlp.down_proj").T
        output = rms_norm(x, self._weight("norm"), eps)
        return output, output if self.spec.norm_output else x

    def _attention(self, inputs: torch.Tensor, position: int) -> torch.Tensor:
        d = self.spec.decoder
        name = "layers.0.self_attn."

        def heads(projection: str, rows: torch.Tensor, count: int) -> torch.Tensor:
            projected = rows @ self._weight(name + projection + "_proj").T
            bias = self.tensors.get(f"{name}{projection}_proj.bias")
            projected = projected if bias is None else projected + bias.double()
            split = projected.view(len(rows), count, d.head_dim)
            norm = self.tensors.get(f"{name}{projection}_norm.weight")
            return split if norm is None else rms_norm(split, norm.double(), d.rms_norm_eps)

        positions = torch.arange(len(inputs))
        assert int(positions[-1]) == position
        query = rotate(heads("q", inputs[-1:], d.num_heads), positions[-1:], d.rope)[0]
        key, value = rotate(heads("k", inputs, d.num_kv_heads), positions, d.rope), heads("v", inputs, d.num_kv_heads)
        window = d.sliding_windows[0] or len(inputs)
        key, value = key[-window:], value[-window:]
        outputs = []
        for head in range(d.num_heads):
            shared = head // (d.num_heads // d.num_kv_heads)
            scores = key[:, shared] @ query[head] / math.sqrt(d.head_dim)
            outputs.append(scores.softmax(dim=-1) @ value[:, shared])
        attended = torch.cat(outputs) @ self._weight(name + "o_proj").T
        bias = self.tensors.get(f"{name}o_proj.bias")
        return attended if bias is None else attended + bias.double()

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"].double()

"""DSpark drafting a second time, straight from the equations, as `dense_drafter` has DFlash's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.drafters.dspark.config import DSparkSpec
from tests.models.dense_drafter import DenseDrafter


@dataclass(frozen=True)
class Walk:
    """What a walk along a block found: the logits that each draft was chosen by, float64 `[k, draft_vocab]`, the drafts
    in the target's ids, and how sure the confidence head is of each, as log-odds; none where there is no head."""

    logits: torch.Tensor
    tokens: list[int]
    log_odds: list[float]


@dataclass(frozen=True)
class DenseDSpark(DenseDrafter):
    """A DSpark drafter. `drafts` walks greedily."""

    spec: DSparkSpec

    def drafts(self, features: torch.Tensor, anchor: int, k: int) -> tuple[torch.Tensor, list[int]]:
        walk = self.walk(features, anchor, k)
        return walk.logits, walk.tokens

    def walk(
        self,
        features: torch.Tensor,
        anchor: int,
        k: int,
        temperature: float = 1.0,
        noise: torch.Tensor | None = None,
    ) -> Walk:
        """A walk along the block. noise: `[k, draft_vocab]`, added to the logits that are divided by the temperature
        before the largest is taken."""
        block = self.block_outputs(features, anchor, k - 1 if self.spec.from_anchor else k)
        outputs = block if self.spec.from_anchor else block[1:]
        previous, state = anchor, self._first_state(block[0], anchor)
        rows, tokens, log_odds = [], [], []
        for i, output in enumerate(outputs):
            row = self.logits(output[None])[0]
            if self.spec.markov is not None:
                latent, state = self._latent(output, previous, state)
                row = row + self._weight("markov_head.markov_w2") @ latent * self.spec.logits.scale
            if self.spec.has_confidence_head:
                log_odds.append(self._log_odds(output, previous))
            scores = row if noise is None else row / temperature + noise[i].double()
            previous = self.target_ids[int(scores.argmax())]
            rows.append(row)
            tokens.append(previous)
        return Walk(torch.stack(rows), tokens, log_odds)

    def _first_state(self, output: torch.Tensor, anchor: int) -> torch.Tensor:
        """That of a recurrent head before the first draft; output: the anchor's. Zeros for other heads."""
        rank = 0 if self.spec.markov is None else self.spec.markov.rank
        state = torch.zeros(rank, dtype=torch.float64)
        if rank == 0 or self.spec.from_anchor:
            return state
        return self._latent(output, anchor, state)[1]

    def _latent(self, output: torch.Tensor, previous: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent vector behind the token `previous`, and the next state."""
        assert self.spec.markov is not None
        embedding = self._weight("markov_head.markov_w1")[previous]
        if self.spec.markov.kind == "vanilla":
            return embedding, state
        if self.spec.markov.kind == "gated":
            return torch.sigmoid(self._affine("gate_proj", output, embedding)) * embedding, state
        gate, candidate, out = self._affine("joint_proj", state, embedding, output).chunk(3)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def _affine(self, name: str, *parts: torch.Tensor) -> torch.Tensor:
        bias = self.tensors[f"markov_head.{name}.bias"].double()
        return self._weight(f"markov_head.{name}") @ torch.cat(parts) + bias

    def _log_odds(self, output: torch.Tensor, previous: int) -> float:
        features = [output]
        if self.spec.confidence_reads_markov:
            features.append(self._weight("markov_head.markov_w1")[previous])
        bias = self.tensors["confidence_head.proj.bias"].double()
        return float(self._weight("confidence_head.proj")[0] @ torch.cat(features) + bias[0])

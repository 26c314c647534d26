"""DFlash2 drafting a second time, straight from the equations, as `dense_drafter` has DFlash's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_backend.drafters.dflash2.config import DFlash2Spec
from tests.models.dense_drafter import DenseDrafter

Scores = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DenseDFlash2(DenseDrafter):
    """A DFlash2 drafter. `drafts` walks greedily."""

    spec: DFlash2Spec

    def drafts(self, features: torch.Tensor, anchor: int, k: int) -> tuple[torch.Tensor, list[int]]:
        outputs = self.outputs(features, anchor, k)
        logits = self.logits(outputs)
        return logits, self.walk(logits, outputs, anchor, logits, 1.0)[0]

    def walk(
        self, logits: torch.Tensor, outputs: torch.Tensor, anchor: int, scores: torch.Tensor, temperature: float
    ) -> tuple[list[int], list[float]]:
        """The tokens, and their log-odds among all tokens at temperature 1.

        scores: `[k, vocab]`, what candidates are chosen by; edges are divided by the temperature and added to them.
        """
        selector = "candidate_selector."
        first, second = (self.tensors[f"{selector}{name}_codebook"].double() for name in ("predecessor", "successor"))
        projected = outputs @ self._weight(selector + "hidden_projection").T
        tokens, log_odds, previous = [], [], anchor
        for i in range(len(logits)):
            candidates = scores[i].argsort(descending=True)[: self.spec.selector.top_k].tolist()
            edges = {c: float((first[previous] * projected[i] * second[c]).sum()) for c in candidates}
            previous = max(candidates, key=lambda c: float(scores[i, c]) + edges[c] / temperature)
            joined = logits[i].clone()
            for candidate, edge in edges.items():
                joined[candidate] += edge
            log_odds.append(float(torch.special.logit(joined.softmax(dim=-1)[previous])))
            tokens.append(previous)
        return tokens, log_odds

    def _sublayer(self, name: str, normed: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        taps, groups = self.spec.conv.kernel_size, normed.shape[1] // self.spec.conv.group_size
        dynamic = (normed @ self._weight(f"{name}_conv.kernel_projection").T).view(len(normed), 2, taps, groups)
        base = self.tensors[f"{name}_conv.base_kernel"].double()
        return self._convolve(run(self._convolve(normed, base[0], dynamic[:, 0])), base[1], dynamic[:, 1])

    def _convolve(self, x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        """Each query with those before it in the block, which begins at the first."""
        output = torch.zeros_like(x)
        for query in range(len(x)):
            for tap in range(min(query + 1, len(base))):
                kernel = base[tap] + dynamic[query, tap].repeat_interleave(self.spec.conv.group_size)
                output[query] += kernel * x[query - tap]
        return output

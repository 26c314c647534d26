"""The drafter of prompt lookup: no model, no KV, no features; it reads the tokens that the worker keeps.

Beside a drafter's model it has the last word: where enough of a row's last tokens occurred before, what followed then
takes the place of the model's drafts.
"""

from __future__ import annotations

import torch

from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    Drafter,
    DrafterFactory,
    Drafts,
    DraftSampler,
    LoadOptions,
)
from dflash_backend.drafters.ngram.config import NgramSpec
from dflash_backend.models.ops import LayerOps

# Tokens that match by chance as often as not. Each one more makes what follows surer by one, as a logit.
UNSURE_MATCH = 2.0


class NgramDrafter(Drafter[NgramSpec]):
    """Looks drafts up with `ops`. Every row that drafts gets all of its drafts, matched or not: the core plans with
    their number before the tokens are known. The target rejects those that are wrong."""

    lookahead_base = None
    autoregressive = False
    reads_next_tokens = False
    capture = ()
    placeholder_id = None

    def __init__(self, spec: NgramSpec, ops: LayerOps) -> None:
        self.spec = spec
        self.ops = ops

    @classmethod
    def check_weights(cls, spec: NgramSpec) -> dict[str, TensorHeader]:
        return {}

    @classmethod
    def load(cls, spec: NgramSpec, options: LoadOptions) -> DrafterFactory:
        return lambda target, caches, backend: cls(spec, options.ops)

    def inject(self, batch: ContextBatch) -> None:
        """Nothing: it has no context KV."""

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        """`[R, k]`, the surer the more tokens matched. There are no logits to choose from, so the sampler has no part
        in it."""
        return Drafts(*self._look_up(batch))

    def propose_matched(self, batch: DraftBatch, wants_confidence: bool) -> tuple[Drafts, torch.Tensor]:
        """The drafts, `[R, k]`, and how many each row has: int32 `[R]`, 0 where nothing matched. Confidences are on the
        scale of a model's log-odds."""
        drafts, matched = self._look_up(batch)
        num_drafts = torch.where(matched[:, 0] > 0, batch.num_drafts, 0)
        return Drafts(drafts, matched - UNSURE_MATCH if wants_confidence else None), num_drafts

    def _look_up(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts, int64, and the tokens that matched, float32, each `[R, k]`."""
        spec = self.spec
        return self.ops.prompt_lookup(
            batch.tokens, batch.computed, batch.req_idx, batch.num_drafts, batch.k, spec.min_ngram, spec.max_ngram
        )

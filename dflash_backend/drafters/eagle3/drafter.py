"""The EAGLE-3 drafter: k passes propose k tokens, each from the token and the hidden state of the pass before."""

from __future__ import annotations

from typing import ClassVar

import torch

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.drafters.base import ContextBatch, DraftBatch, Drafts, DraftSampler
from dflash_backend.drafters.draft_model import ModelDrafter
from dflash_backend.drafters.eagle3.config import Eagle3Spec
from dflash_backend.drafters.eagle3.model import Eagle3Model
from dflash_backend.models.interface import PagedContext, TargetModel


class Eagle3Drafter(ModelDrafter[Eagle3Spec]):
    """Runs an `Eagle3Model` for the worker.

    The KV of position p belongs to the target's features at p and the token at p + 1. So the first pass runs at the
    position before the anchor, with the features there and the anchor, and writes nothing: its KV is context KV. The
    others write the KV of the anchor's position and of all drafts' but the last two: k - 1 positions of the k that are
    reserved.
    """

    lookahead_base = 0
    autoregressive = True
    reads_next_tokens = True
    # The tokens of the queries behind the anchor are those that the passes before choose.
    placeholder_id = 0

    model_class: ClassVar[type[Eagle3Model]] = Eagle3Model
    model: Eagle3Model

    def __init__(
        self, model: Eagle3Model, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        super().__init__(model, target, caches, backend)
        self.capture = model.spec.target_layer_ids

    def inject(self, batch: ContextBatch) -> None:
        assert batch.next_token_ids is not None
        embeddings = self._embed(batch.next_token_ids)
        self.model.inject(embeddings, batch.features, batch.positions, batch.slots, self.caches, batch.padded)

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        """A pass for each draft of the longest row, over the rows that still draft."""
        queries = batch.queries
        assert queries is not None
        assert batch.features is not None
        hidden, tokens = self.model.combine(batch.features), queries.token_ids[queries.row_starts()[:-1]]
        of_drafts = queries.draft_positions()
        found = torch.empty_like(of_drafts)
        sure = torch.empty(len(found), dtype=torch.float32, device=found.device) if sampler.wants_confidence else None
        for number, step in enumerate(queries.passes()):
            if step.rows is not None:
                hidden, tokens = hidden[step.rows], tokens[step.rows]
            context = PagedContext.prepare(
                step.layout,
                step.positions,
                step.slots,
                self.backend,
                self.model.patterns,
                hidden.dtype,
                padded=number == 0 or queries.padded,
            )
            output, hidden = self.model.forward(self._embed(tokens), hidden, context, self.caches)
            chosen = sampler.at(step.drafts).choose(self._head(output), of_drafts[step.drafts], self.model.id_map)
            found[step.drafts] = tokens = chosen.token_ids
            if sure is not None and chosen.confidence is not None:
                sure[step.drafts] = chosen.confidence
        return Drafts(found, sure)

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary: `[n, hidden]` -> `[n, draft_vocab]`."""
        logits, scale = self.lm_head(normed), self.model.spec.logit_scale
        return logits if scale == 1 else logits * scale

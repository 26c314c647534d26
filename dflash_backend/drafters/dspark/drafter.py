"""The DSpark drafter: DFlash's forward, then a walk along each block that adds to each draft's logits what follows from
the draft before it."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.drafters.base import DraftQueries, Drafts, DraftSampler
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.drafters.dflash.model import DFlashModel
from dflash_backend.drafters.dspark.model import DSparkModel, MarkovHead
from dflash_backend.models.interface import TargetModel


class DSparkDrafter(DFlashDrafter):
    """Runs a `DSparkModel` for the worker. Context KV is DFlash's.

    Where it samples from the anchor, the anchor's output gives the first draft, and no query is at the last one.
    """

    model_class: ClassVar[type[DFlashModel]] = DSparkModel
    model: DSparkModel

    def __init__(
        self, model: DFlashModel, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        super().__init__(model, target, caches, backend)
        self.lookahead_base = 0 if self.model.spec.from_anchor else 1

    def _choose(self, outputs: torch.Tensor, queries: DraftQueries, sampler: DraftSampler) -> Drafts:
        """How sure the drafter is of a draft is what its confidence head says behind the token before it; without that
        head, the log-odds of the draft among the logits that it was chosen by."""
        head, markov = self.model.confidence, self.model.markov
        asked = sampler.wants_confidence
        if head is not None:
            sampler = sampler.without_confidence()
        if markov is None:
            drafts, before = super()._choose(outputs, queries, sampler), None
        else:
            drafts, previous = self._walk(markov, outputs, queries, sampler)
            before = F.embedding(previous, markov.table)
        if head is None or not asked:
            return drafts
        return Drafts(drafts.token_ids, head.log_odds(queries.of_drafts(outputs), before))

    def _walk(
        self, markov: MarkovHead, outputs: torch.Tensor, queries: DraftQueries, sampler: DraftSampler
    ) -> tuple[Drafts, torch.Tensor]:
        """The drafts, from the first of each block to the last, and the token before each: int64 `[num_drafts]`, in the
        target's ids."""
        hidden, positions = queries.of_drafts(outputs), queries.draft_positions()
        logits, projected, scale = self._head(hidden), markov.project(hidden), self.model.spec.logits.scale
        previous = queries.token_ids[queries.row_starts()[:-1]]
        state = self._first_state(markov, outputs, queries, previous)
        tokens, before = torch.empty_like(positions), torch.empty_like(positions)
        sure = torch.empty(len(tokens), dtype=torch.float32, device=tokens.device) if sampler.wants_confidence else None
        for rows, drafts in queries.draft_steps():
            if rows is not None:
                previous, state = previous[rows], None if state is None else state[rows]
            part = None if projected is None else projected[drafts]
            latent, state = markov.step(previous, part, state, self.model.ops)
            biased = logits[drafts] + (markov.bias(latent) if scale == 1 else markov.bias(latent) * scale)
            found = sampler.at(drafts).choose(biased, positions[drafts], self.model.id_map)
            before[drafts] = previous
            tokens[drafts] = previous = found.token_ids
            if sure is not None and found.confidence is not None:
                sure[drafts] = found.confidence
        return Drafts(tokens, sure), before

    def _first_state(
        self, markov: MarkovHead, outputs: torch.Tensor, queries: DraftQueries, anchors: torch.Tensor
    ) -> torch.Tensor | None:
        """The state of a recurrent head before each row's first draft. It is trained along all outputs of a block, so
        one that does not sample from the anchor has taken a step there already."""
        state = markov.new_state(len(anchors))
        if state is None or queries.from_anchor:
            return state
        at_anchors = markov.project(outputs[queries.row_starts()[:-1]])
        return markov.step(anchors, at_anchors, state, self.model.ops)[1]

"""The DFlash2 drafter: DFlash's forward, then a walk along each block that chooses among the best tokens of each
position by what precedes them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from dflash_backend.drafters.base import DraftQueries, Drafts, DraftSampler
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.drafters.dflash.model import DFlashModel
from dflash_backend.drafters.dflash2.config import DFlash2Spec
from dflash_backend.drafters.dflash2.model import DFlash2Model
from dflash_backend.models.interface import PagedContext


class DFlash2Drafter(DFlashDrafter):
    """Runs a `DFlash2Model` for the worker. Context KV is DFlash's: convolutions are over a block's own queries."""

    model_class: ClassVar[type[DFlashModel]] = DFlash2Model
    model: DFlash2Model

    def _context(self, queries: DraftQueries, dtype: torch.dtype) -> PagedContext:
        return replace(super()._context(queries, dtype), row_index=queries.block_index())

    def _choose(self, outputs: torch.Tensor, queries: DraftQueries, sampler: DraftSampler) -> Drafts:
        """The walk from each row's anchor. With noise the candidates are the best with it, since the target may choose
        a token that is none of the likeliest; an edge counts as the logit that it is added to, divided by the
        temperature.

        How sure the drafter is of a draft are its log-odds at temperature 1 among all tokens, with the edges from the
        draft before it added to the logits of the candidates.
        """
        hidden = queries.of_drafts(outputs)
        selector, spec = self.model.selector, self.model.spec
        assert isinstance(spec, DFlash2Spec)
        logits = self._head(hidden)
        scores, candidates = sampler.top_candidates(logits, queries.draft_positions(), spec.selector.top_k)
        starts = queries.row_starts()
        chosen, edges = self.model.ops.selector_walk(
            scores,
            candidates,
            selector.projection(hidden),
            selector.predecessors,
            selector.successors,
            queries.token_ids[starts[:-1]],
            # Of a row's queries all but the anchor's are at drafts.
            starts - torch.arange(len(starts), device=starts.device),
            sampler.temperature,
        )
        token_ids = candidates.gather(1, chosen[:, None])[:, 0]
        if not sampler.wants_confidence:
            return Drafts(token_ids)
        joined = logits.scatter_add(1, candidates, edges.to(logits.dtype))
        return Drafts(token_ids, sampler.ops.log_odds(joined, token_ids))

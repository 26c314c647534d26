"""The EAGLE-3 drafter: k passes propose k tokens, each from the token and the hidden state of the pass before."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.weights import check_weights
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    Drafter,
    DrafterFactory,
    Drafts,
    DraftSampler,
    LoadOptions,
)
from dflash_backend.drafters.eagle3.config import Eagle3Spec
from dflash_backend.drafters.eagle3.model import Eagle3Model, Eagle3Weights
from dflash_backend.drafters.vocabulary import is_unused
from dflash_backend.models.interface import PagedContext, TargetModel


class Eagle3Drafter(Drafter[Eagle3Spec]):
    """Runs an `Eagle3Model` for the worker, over `caches`, its layer of the paged KV.

    The KV of position p belongs to the target's features at p and the token at p + 1. So the first pass runs at the
    position before the anchor, with the features there and the anchor, and writes nothing: its KV is context KV. The
    others write the KV of the anchor's position and of all drafts' but the last two: k - 1 positions of the k that are
    reserved. Embedding and LM head are the checkpoint's own where it ships them, else the target's; a smaller draft
    vocabulary then takes its rows of the target's head.
    """

    lookahead_base = 0
    autoregressive = True
    reads_next_tokens = True
    # The tokens of the queries behind the anchor are those that the passes before choose.
    placeholder_id = 0

    def __init__(
        self, model: Eagle3Model, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        self.model = model
        self.target = target
        self.caches = caches
        self.backend = backend
        self.capture = model.spec.target_layer_ids
        own_head = target.lm_head if model.id_map is None else target.lm_head.rows(model.id_map)
        self.lm_head = model.lm_head or own_head

    @classmethod
    def check_weights(cls, spec: Eagle3Spec) -> dict[str, TensorHeader]:
        return check_weights(
            spec.path,
            lambda source: Eagle3Weights.read(source, spec),
            ignored=lambda name: is_unused(spec, name),
        )

    @classmethod
    def load(cls, spec: Eagle3Spec, options: LoadOptions) -> DrafterFactory:
        return partial(cls, Eagle3Model.load(spec, **vars(options)))

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

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n]` -> `[n, hidden]`."""
        own = self.model.embedding
        if own is None:
            return self.target.embed(token_ids, self.model.spec.scales_embedding)
        return F.embedding(token_ids, own)

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary: `[n, hidden]` -> `[n, draft_vocab]`."""
        logits, scale = self.lm_head(normed), self.model.spec.logit_scale
        return logits if scale == 1 else logits * scale

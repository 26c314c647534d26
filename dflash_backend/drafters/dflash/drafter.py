"""The DFlash drafter: one forward over `[anchor, mask x k]` proposes k tokens for every row (arXiv 2602.06036)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.checkpoints.files import MASK_EMBEDDING, TensorHeader
from dflash_backend.checkpoints.weights import check_weights
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    Drafter,
    DrafterFactory,
    DraftQueries,
    Drafts,
    DraftSampler,
    LoadOptions,
)
from dflash_backend.drafters.dflash.config import DFlashSpec, LogitsSpec
from dflash_backend.drafters.dflash.mask_embedding import load_mask_embedding
from dflash_backend.drafters.dflash.model import DFlashModel
from dflash_backend.drafters.vocabulary import is_unused
from dflash_backend.models.interface import PagedContext, TargetModel


class DFlashDrafter(Drafter[DFlashSpec]):
    """Runs a `DFlashModel` for the worker, over `caches`, its layers of the paged KV.

    Embedding and LM head are the checkpoint's own where it ships them, else the target's; a smaller draft vocabulary
    then takes its rows of the target's head.
    """

    lookahead_base = 1
    autoregressive = False
    reads_next_tokens = False
    placeholder_id: int
    model_class: ClassVar[type[DFlashModel]] = DFlashModel

    def __init__(
        self, model: DFlashModel, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        self.model = model
        self.target = target
        self.caches = caches
        self.backend = backend
        self.capture = captured_layers(model.spec, target.spec.decoder.num_layers)
        self.placeholder_id = model.spec.mask_token_id
        own_head = target.lm_head if model.id_map is None else target.lm_head.rows(model.id_map)
        self.lm_head = model.lm_head or own_head

    @classmethod
    def check_weights(cls, spec: DFlashSpec) -> dict[str, TensorHeader]:
        headers = check_weights(
            spec.path,
            lambda source: cls.model_class.weights_class.read(source, spec),
            ignored=lambda name: is_unused(spec, name),
        )
        if spec.has_mask_embedding:
            load_mask_embedding(spec.path / MASK_EMBEDDING, spec.mask_token_id, spec.decoder.hidden_size)
        return headers

    @classmethod
    def load(cls, spec: DFlashSpec, options: LoadOptions) -> DrafterFactory:
        return partial(cls, cls.model_class.load(spec, **vars(options)))

    def inject(self, batch: ContextBatch) -> None:
        self.model.inject(batch.features, batch.positions, batch.slots, self.caches, batch.padded)

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        """One forward over all blocks. A mask query gives the logits of the token at its own position; the anchor's
        output is not used."""
        queries = batch.queries
        assert queries is not None
        embeddings = self._embed(queries.token_ids)
        hidden = self.model.forward(embeddings, self._context(queries, embeddings.dtype), self.caches)
        return self._choose(hidden, queries, sampler)

    def _context(self, queries: DraftQueries, dtype: torch.dtype) -> PagedContext:
        """What the pass needs beside the embeddings, of this dtype."""
        return PagedContext.prepare(
            queries.layout, queries.positions, queries.slots, self.backend, self.model.patterns, dtype, queries.padded
        )

    def _choose(self, outputs: torch.Tensor, queries: DraftQueries, sampler: DraftSampler) -> Drafts:
        """The drafts, from the final-normed outputs of all queries, `[num_queries, hidden]`."""
        logits = self._head(queries.of_drafts(outputs))
        return sampler.choose(logits, queries.draft_positions(), self.model.id_map)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n]` -> `[n, hidden]`. A mask embedding that was trained apart stands in for the mask token's row,
        which is no other token's; the checkpoint's `input_embedding_scale` multiplies both."""
        own = self.model.embedding
        if own is None:
            embeddings = self.target.embed(token_ids, self.model.spec.scales_embedding)
        else:
            embeddings = F.embedding(token_ids, own)
        vector = self.model.mask_embedding
        if vector is not None:
            embeddings = torch.where((token_ids == self.model.spec.mask_token_id)[:, None], vector, embeddings)
        scale = self.model.spec.input_embedding_scale
        return embeddings if scale == 1 else embeddings * scale

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary: `[n, hidden]` -> `[n, draft_vocab]`."""
        return formed(self.model.spec.logits, self.lm_head(normed))


def formed(form: LogitsSpec, logits: torch.Tensor) -> torch.Tensor:
    """What becomes of the head's `logits`, each for itself."""
    if form.multiplier != 1:
        logits = logits * form.multiplier
    if form.softcap is not None:
        logits = torch.tanh(logits / form.softcap) * form.softcap
    return logits if form.scale == 1 else logits * form.scale


def captured_layers(spec: DFlashSpec, num_target_layers: int) -> tuple[int, ...]:
    """What a drafter wants captured, as `TargetModel.forward` counts: layer ids, and the number of layers for the last
    layer's output after the final norm."""
    last = num_target_layers - 1
    return tuple(i + 1 if i == last and spec.normed_last_layer else i for i in spec.target_layer_ids)

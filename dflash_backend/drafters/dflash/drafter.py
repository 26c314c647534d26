"""The DFlash drafter: one forward over `[anchor, mask x k]` proposes k tokens for every row (arXiv 2602.06036)."""

from __future__ import annotations

from typing import ClassVar

import torch

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.checkpoints.files import MASK_EMBEDDING, TensorHeader
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    DraftQueries,
    Drafts,
    DraftSampler,
)
from dflash_backend.drafters.dflash.config import DFlashSpec, LogitsSpec
from dflash_backend.drafters.dflash.mask_embedding import load_mask_embedding
from dflash_backend.drafters.dflash.model import DFlashModel
from dflash_backend.drafters.draft_model import ModelDrafter
from dflash_backend.models.interface import PagedContext, TargetModel


class DFlashDrafter(ModelDrafter[DFlashSpec]):
    """Runs a `DFlashModel` for the worker."""

    lookahead_base = 1
    autoregressive = False
    reads_next_tokens = False
    placeholder_id: int
    model_class: ClassVar[type[DFlashModel]] = DFlashModel
    model: DFlashModel

    def __init__(
        self, model: DFlashModel, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        super().__init__(model, target, caches, backend)
        self.capture = captured_layers(model.spec, target.spec.decoder.num_layers)
        self.placeholder_id = model.spec.mask_token_id

    @classmethod
    def check_weights(cls, spec: DFlashSpec) -> dict[str, TensorHeader]:
        headers = super().check_weights(spec)
        if spec.has_mask_embedding:
            load_mask_embedding(spec.path / MASK_EMBEDDING, spec.mask_token_id, spec.decoder.hidden_size)
        return headers

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
        embeddings = super()._embed(token_ids)
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

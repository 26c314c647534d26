"""The DFlash drafter: one forward over `[anchor, mask x k]` proposes k tokens for every row (arXiv 2602.06036)."""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend, KVLayer, RowLayout
from dflash_backend.models.dflash import DFlashModel
from dflash_backend.models.interface import PagedContext, TargetModel
from dflash_backend.speculative.drafter import DraftBlock, DraftSampler


class DFlashDrafter:
    """See `Drafter` for the interface. `caches` are the drafter's layers of the paged K/V, under the target's block
    ids (TOGETHER)."""

    lookahead_base = 1

    def __init__(
        self, model: DFlashModel, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend, max_len: int
    ) -> None:
        self.model = model
        self.target = target
        self.caches = caches
        self.backend = backend
        self.max_len = max_len
        self.capture = model.spec.target_layer_ids
        self.mask_embedding = target.embed(
            torch.tensor([model.spec.mask_token_id], device=model.fc.device)
        )  # [1, hidden]

    def inject(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """See `Drafter.inject`."""
        kv = self.model.context_kv(features, positions)
        for layer_kv, cache in zip(kv, self.caches, strict=True):
            self.backend.write_kv(layer_kv, slots, cache)

    def propose(self, block: DraftBlock, sampler: DraftSampler) -> torch.Tensor:
        """See `Drafter.propose`. The mask query i gives the logits of the token at its own position; the anchor's
        output is not used."""
        query_lens = block.num_draft + 1
        rows = np.repeat(np.arange(len(query_lens)), query_lens)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(query_lens) - query_lens, query_lens)
        positions = block.positions[rows] + offsets
        device = block.anchors.device

        embeddings = self.mask_embedding.repeat(len(rows), 1)
        anchor_index = torch.from_numpy((offsets == 0).nonzero()[0]).to(device)
        embeddings[anchor_index] = self.target.embed(block.anchors)

        layout = RowLayout(query_lens, block.positions + query_lens, block.block_tables)
        context = PagedContext.prepare(
            layout,
            torch.from_numpy(positions).to(device),
            block.slots,
            self.backend,
            self.model.patterns,
            embeddings.dtype,
        )
        hidden = self.model.forward(embeddings, context, self.caches)

        masks = (offsets > 0).nonzero()[0]
        logits = self.target.head(hidden[torch.from_numpy(masks).to(device)])
        return sampler.choose(logits, rows[masks], positions[masks])

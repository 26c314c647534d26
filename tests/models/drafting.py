"""Running a drafter over paged KV without an engine: the slots of positions, and a sampler that keeps its logits."""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.attention import AttentionBatch
from dflash_backend.drafters.base import DraftBatch, DraftQueries, Drafts, DraftSampler, LoadOptions
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.worker.batch import spans
from dflash_backend.worker.step_ops import CpuStepOps
from tests.support.paged import BLOCK_SIZE


def load_options(max_positions: int, device: torch.device | str = "cpu", ops: LayerOps | None = None) -> LoadOptions:
    """How a drafter is loaded in float32; `ops`: by default those of the device."""
    device = torch.device(device)
    return LoadOptions(max_positions, torch.float32, device, lambda name, share: None, ops or select_ops(device))


class KeepsLogits(DraftSampler):
    """Greedy, and remembers the logits that it chose from."""

    def __init__(self, wants_confidence: bool = False) -> None:
        super().__init__(CpuStepOps(), wants_confidence=wants_confidence)
        self._drafts: list[int] | None = None
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def logits(self) -> torch.Tensor:
        """Of all drafts, in their order: `[num_drafts, vocab]`."""
        return torch.stack([self._kept[draft] for draft in sorted(self._kept)])

    def at(self, drafts: torch.Tensor) -> DraftSampler:
        self._drafts = drafts.tolist()
        return self

    def without_confidence(self) -> DraftSampler:
        return self

    def choose(self, logits: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None = None) -> Drafts:
        self._keep(logits)
        return super().choose(logits, positions, token_ids)

    def _keep(self, logits: torch.Tensor) -> None:
        drafts = range(len(logits)) if self._drafts is None else self._drafts
        self._kept |= dict(zip(drafts, logits, strict=True))

    def top_candidates(
        self, logits: torch.Tensor, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keep(logits)
        return super().top_candidates(logits, positions, count)


def draft_batch(
    anchors: np.ndarray,
    starts: np.ndarray,
    k: np.ndarray,
    tables: np.ndarray,
    placeholder: int,
    lookahead_base: int | None = 1,
    features: torch.Tensor | None = None,
) -> DraftBatch:
    """Draft blocks of `k` drafts behind the `anchors` at positions `starts`: `[num_rows]` each. For a drafter that
    reads no tokens but the anchors. features: of the positions before the anchors, where it reads those."""
    base = lookahead_base or 0
    rows, positions = spans(starts, k + base)
    is_anchor = positions == starts[rows]
    ids = np.where(is_anchor, anchors[rows], placeholder)
    layout = AttentionBatch(k + base, starts + k + base, torch.from_numpy(tables))
    masks = torch.from_numpy((~is_anchor | (base == 0)).nonzero()[0])
    queries = DraftQueries(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        slots(tables, rows, positions),
        layout,
        int(k.max()) + base,
        masks,
        from_anchor=base == 0,
    )
    every = torch.arange(len(starts), dtype=torch.int32)
    num_drafts = torch.from_numpy(k.astype(np.int32))
    tokens = torch.zeros(len(starts), 1, dtype=torch.int64)
    return DraftBatch(tokens, every * 0, every, num_drafts, int(k.max()), queries, features)


def slots(tables: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """int64, the KV slot of each position."""
    return torch.from_numpy(tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)

"""Running a drafter over paged K/V without an engine: the slots of positions, and a sampler that keeps its logits."""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.drafters.base import DraftSampler
from dflash_backend.sampling.vocabulary import VocabularyMap
from tests.paged import BLOCK_SIZE


class KeepsLogits(DraftSampler):
    """Greedy, and remembers the logits that it chose from."""

    def __init__(self) -> None:
        super().__init__(None, np.empty(0, dtype=np.int64))
        self.logits = torch.empty(0)

    def choose(
        self,
        logits: torch.Tensor,
        row_index: np.ndarray,
        positions: np.ndarray,
        vocabulary: VocabularyMap | None = None,
    ) -> torch.Tensor:
        self.logits = logits
        return super().choose(logits, row_index, positions, vocabulary)


def spans(starts: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every position in `[start, start + len)`."""
    pairs = [(row, start + i) for row, (start, n) in enumerate(zip(starts, lens, strict=True)) for i in range(n)]
    rows, positions = np.array(pairs, dtype=np.int64).T
    return rows, positions


def slots(tables: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """int64, the K/V slot of each position."""
    return torch.from_numpy(tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)

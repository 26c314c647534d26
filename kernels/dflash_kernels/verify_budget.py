"""Which drafts a step verifies: of all rows together the likeliest, as many as it has a budget for.

The chance that a draft is accepted when those before it are is `sigmoid(offset + effect + weight * confidence)`, with
an offset of its place in the block and an effect of its request; the chance that all up to it are accepted is the
product, which never grows within a row. So the likeliest drafts of all rows are the first ones of each row.
"""

from __future__ import annotations

import numpy as np


def verified_lens_reference(
    confidence: np.ndarray,
    num_draft: np.ndarray,
    weight: float,
    offsets: np.ndarray,
    effects: np.ndarray,
    num_drafts: int,
) -> np.ndarray:
    """How many drafts of each row are verified: int64 `[R]`, `num_drafts` together, or all where there are fewer.

    confidence: float32 `[R, k]`. num_draft: int64 `[R]`, the drafts that each row has. offsets: float32 `[k]`. effects:
    float32 `[R]`. Of equally likely drafts those of earlier rows come first.
    """
    chances = 1 / (1 + np.exp(-(offsets + effects[:, None] + np.float32(weight) * confidence)))
    survival = np.multiply.accumulate(chances, axis=1)
    there = np.arange(confidence.shape[1]) < num_draft[:, None]
    order = np.argsort(-np.where(there, survival, -1.0), axis=None, kind="stable")
    taken = order[: min(num_drafts, int(there.sum()))]
    return np.bincount(taken // confidence.shape[1], minlength=len(num_draft))

"""Acceptance lengths that the DFlash authors publish, and how far below them a run counts as a defect."""

from __future__ import annotations

# Qwen3-8B with its b16 drafter, greedy, thinking off (arXiv 2602.06036).
QWEN3_8B_B16 = {"mt-bench": 4.24, "humaneval": 6.50, "gsm8k": 6.54}

# GSM8K is run in part, and a part may come out lower by this much; the tolerance of each set comes on top.
GSM8K_SUBSET_SHARE = 0.975
TOLERANCE = 0.95


def least_acceptance_length(dataset: str) -> float:
    """The acceptance length below which a run of the published pair on `dataset` counts as a defect."""
    return QWEN3_8B_B16[dataset] * (GSM8K_SUBSET_SHARE if dataset == "gsm8k" else 1.0) * TOLERANCE

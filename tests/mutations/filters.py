"""Defects of the search for what top-k and top-p keep, among the logits near the largest."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CANDIDATES = (
    "tests/kernels/test_filter_candidates.py",
    "tests/kernels/test_sampling.py::test_the_filter_equals_its_reference",
)

FILTER_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/filter_candidates.py",
        CANDIDATES,
        ("the last token of top-k is not kept", "tl.cumsum(counts, 0) >= top_k", "tl.cumsum(counts, 0) >= top_k - 1"),
        (
            "tokens are taken for as likely as the first",
            "least = counts.to(tl.float32) * tl.exp2(-powers)",
            "least = counts.to(tl.float32)",
        ),
        ("what min-p hides counts for top-p", "there = (logits >= edge) & (logits > float", "there = (logits > float"),
        (
            "slices that keep little have other numbers behind it",
            "tl.store(kept_ptr + place * KEPT + number, nothing,",
            "tl.store(kept_ptr + place * KEPT + number, tl.zeros_like(nothing),",
        ),
        ("the second tile of a slice is kept over the first", "number = taken + tl.cumsum", "number = tl.cumsum"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/logits_filter.py",
        CANDIDATES,
        ("a slice that has more than it keeps is believed", "if most <= KEPT:", "if most <= vocab:"),
        ("top-p is of what was kept near the largest logit", "if IN_ALL | by_rank:", "if top_p < 1.0:"),
    ),
)

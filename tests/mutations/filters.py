"""Defects of the search for what top-k and top-p keep, among the logits near the largest."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FILTERS = (
    "tests/kernels/test_logits_filter.py",
    "tests/kernels/test_sampling.py::test_the_filter_equals_its_reference",
)

FILTER_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/logits_filter.py",
        FILTERS,
        ("a group's largest below the k-th is enough", "_kth_largest(tops, top_k))", "_kth_largest(tops, top_k - 1))"),
        (
            "all tokens of a group count for top-p as if they reached its largest",
            "known = tl.maximum(weights - (GROUP - 1) * least, own)",
            "known = weights",
        ),
        (
            "of a group its largest alone is known",
            "known = tl.maximum(weights - (GROUP - 1) * least, own)",
            "known = own",
        ),
        ("what min-p hides counts for top-p", "elif min_p <= 0.0:", "else:"),
        (
            "logits below the groups' edge are kept",
            "logits = tl.where(logits.to(tl.float32) >= lowest,",
            "logits = tl.where(logits.to(tl.float32) >= -1e30,",
        ),
        ("more groups than fit are believed", "if num_near <= most_kept:", "if num_near <= most_kept + 1:"),
        (
            "the second tile of groups is kept over the first",
            "tl.store(kept_ptr + which[:, None] * GROUP",
            "tl.store(kept_ptr + (which - base)[:, None] * GROUP",
        ),
        ("top-p is of what was kept near the largest logit", "tl.where(total < 0.0, found, total)", "found"),
        ("top-p after top-k is of the whole row", "            total = -1.0\n", "            total = 1.0e6\n"),
        (
            "a row has more groups than a program holds",
            "return triton.next_power_of_2(triton.cdiv(vocab, MOST_GROUPS))",
            "return 1",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/sample.py",
        ("tests/kernels/test_sampling.py::test_a_sample_equals_its_reference",),
        (
            "a tile of which one token is kept gets no noise",
            "tl.min(hidden.to(tl.int32), axis=0) == 0",
            "tl.max(hidden.to(tl.int32), axis=0) == 0",
        ),
    ),
)

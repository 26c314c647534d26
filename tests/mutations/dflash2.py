"""Defects of the DFlash2 drafter: each stays lossless, and would show as lower acceptance of a trained drafter."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

BASE = "dflash_backend/drafters/base.py"
DFLASH2 = "dflash_backend/drafters/dflash2"
CONV, WALK = "kernels/dflash_kernels/grouped_conv.py", "kernels/dflash_kernels/selector_walk.py"
ORACLE = ("tests/oracle/test_dflash2.py",)
DENSE = "tests/drafters/test_dflash2.py::"
CONVOLVED, WALKED = ("tests/kernels/test_grouped_conv.py",), ("tests/kernels/test_selector_walk.py",)
PLACES = (DENSE + "test_places_in_blocks_are_those_of_the_rows_whatever_their_layout",)
NOISY = (DENSE + "test_noisy_walks_choose_among_the_best_with_noise",)
PADDED = ("tests/drafters/test_dflash2_engine.py::test_the_padded_steps_of_a_gpu_have_the_same_drafts",)

DFLASH2_MUTANTS = (
    *mutants_of(
        CONV,
        ORACLE,
        ("a tap is of the query before the one that it is for", "channels.roll(tap, 0)", "channels.roll(tap + 1, 0)"),
        ("a tap reaches into the block before", "inside = (block_index >= tap)", "inside = (block_index >= 0)"),
        ("a block's first queries lose a tap", "inside = (block_index >= tap)", "inside = (block_index > tap)"),
    ),
    *mutants_of(
        CONV,
        CONVOLVED,
        (
            "kernel: a tap is of the query before the one that it is for",
            "(token - tap) * x_stride",
            "tl.maximum(token - tap - 1, 0) * x_stride",
        ),
        (
            "kernel: a tap reaches into the block before",
            "tl.where(place >= tap, HIDDEN, 0)",
            "tl.where(token >= tap, HIDDEN, 0)",
        ),
    ),
    *mutants_of(
        WALK,
        ORACLE,
        (
            "the likeliest candidate stands before the next draft, whichever was chosen",
            "previous[rows] = candidates[drafts, chosen[drafts]]",
            "previous[rows] = candidates[drafts, 0]",
        ),
        (
            "the anchor stands before every draft",
            "previous[rows] = candidates[drafts, chosen[drafts]]",
            "previous[rows] = anchors[rows]",
        ),
    ),
    *mutants_of(
        WALK,
        WALKED,
        (
            "kernel: the likeliest candidate stands before the next draft, whichever was chosen",
            "tl.load(candidates_ptr + draft * NUM + index)",
            "tl.load(candidates_ptr + draft * NUM)",
        ),
        (
            "kernel: another token than the anchor stands before the first draft",
            "previous = tl.load(anchors_ptr + row)",
            "previous = row.to(tl.int64)",
        ),
    ),
    Mutant(
        "the first mask query's token stands before the first draft",
        f"{DFLASH2}/drafter.py",
        "queries.token_ids[starts[:-1]]",
        "queries.token_ids[starts[:-1] + 1]",
        ORACLE,
    ),
    Mutant(
        "the drafts of a row begin at its anchor's query",
        f"{DFLASH2}/drafter.py",
        "starts - torch.arange(len(starts), device=starts.device)",
        "starts.clamp(max=len(logits))",
        (DENSE + "test_drafts_equal_a_dense_implementation_after_any_acceptance",),
    ),
    Mutant(
        "places in the blocks of padded rows count the anchor as 1",
        BASE,
        "return every % self.query_len",
        "return every % self.query_len + 1",
        PADDED,
    ),
    Mutant(
        "places in blocks of their own lengths go on from one to the next",
        BASE,
        "return every - self.row_starts()[:-1].repeat_interleave(torch.from_numpy(self.layout.query_lens))",
        "return every",
        PLACES,
    ),
    Mutant(
        "the kernels of a sublayer's input are those of its output",
        f"{DFLASH2}/drafter.py",
        "before, after = self.weights",
        "after, before = self.weights",
        ORACLE,
    ),
    Mutant(
        "scales and soft cap are not the selector's",
        f"{DFLASH2}/drafter.py",
        "scores, candidates = sampler.top_candidates(logits,",
        "logits = self.lm_head(hidden)\n        scores, candidates = sampler.top_candidates(logits,",
        ORACLE,
    ),
    Mutant(
        "candidates are the likeliest, whatever the noise",
        BASE,
        "        if self.temperature is not None and self.seeds is not None:\n            scores",
        "        if False:\n            scores",
        NOISY,
    ),
    Mutant(
        "edges weigh more than the logits that they are added to",
        f"{DFLASH2}/drafter.py",
        "sampler.temperature,",
        "None,",
        NOISY,
    ),
    Mutant(
        "the drafter is as sure as if nothing stood before a draft",
        f"{DFLASH2}/drafter.py",
        "joined = logits.scatter_add(1, candidates, edges.to(logits.dtype))",
        "joined = logits",
        NOISY,
    ),
    Mutant(
        "sliding layers of the speculators library are causal where nothing is said",
        f"{DFLASH2}/config.py",
        '{**base.data, "sliding_window_non_causal": True}',
        '{**base.data, "sliding_window_non_causal": False}',
        (DENSE + "test_a_speculators_config_has_the_librarys_defaults",),
    ),
)

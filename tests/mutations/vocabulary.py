"""Defects of embedding and head that ranks split by vocabulary. A wrong slice shows at some tokens alone."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

SLICES = ("tests/parallel/test_shards.py::test_slices_hold_each_token_once",)
TEXTS = ("tests/parallel/test_vocabulary_ranks.py::test_ranks_that_split_the_vocabulary_give_the_text_of_one",)
DRAFTS = ("tests/parallel/test_vocabulary_ranks.py::test_drafts_are_those_that_one_process_proposes",)
ROWS = ("tests/parallel/test_shards.py::test_ranks_that_split_the_vocabulary_hold_their_rows",)
RULE = ("tests/parallel/test_vocabulary_ranks.py::test_a_small_vocabulary_stays_on_rank_0",)

VOCABULARY = "dflash_backend/parallel/vocabulary.py"

VOCABULARY_MUTANTS = (
    *mutants_of(
        VOCABULARY,
        TEXTS,
        ("padding of a narrow slice counts as tokens", "[part[:, : len(own)] for part", "[part for part"),
    ),
    *mutants_of(
        VOCABULARY,
        DRAFTS,
        (
            "rows of the target's head are those of its embedding",
            "if task.of_head:",
            "if False:",
        ),
        (
            "ranks run the target's norm before a drafter's head",
            "self._target.logits(x) if task.of_target else head(x)",
            "self._target.logits(x)",
        ),
    ),
    Mutant(
        "tokens of other ranks have the embedding of a border",
        "dflash_backend/models/linear.py",
        ".masked_fill_(missing[:, None], 0.0)",
        "",
        ROWS,
    ),
    Mutant(
        "a vocabulary that ranks do not divide loses its last tokens",
        "dflash_backend/parallel/shard.py",
        "range(self.rank * vocab_size // self.size, (self.rank + 1) * vocab_size // self.size)",
        "range(self.rank * (vocab_size // self.size), (self.rank + 1) * (vocab_size // self.size))",
        SLICES,
    ),
    Mutant(
        "a slice is read row by row",
        "dflash_backend/checkpoints/quantization/slices.py",
        "found.pop()[0] if found and found[-1][1] == part * size else part * size",
        "part * size",
        ("tests/parallel/test_shards.py::test_a_slice_of_rows_is_read_at_once",),
    ),
    Mutant(
        "the other ranks' slices of logits depend on the batch",
        "dflash_backend/parallel/rank.py",
        "ops=select_ops(device, wanted_ops, needs.batch_invariant)",
        "ops=select_ops(device, wanted_ops, False)",
        ("tests/parallel/test_vocabulary_ranks.py::test_a_rank_has_the_operations_that_rank_zero_has",),
    ),
    Mutant(
        "a tied head counts twice",
        "dflash_backend/parallel/group.py",
        "(1 if spec.tie_word_embeddings else 2) *",
        "2 *",
        RULE,
    ),
    Mutant(
        "a long tensor is gathered into its beginning",
        "dflash_backend/parallel/sums.py",
        "whole.view(-1)[first : first + step] for whole",
        "whole.view(-1)[: len(flat[first : first + step])] for whole",
        ("tests/parallel/test_sums.py::test_rank_0_alone_gets_what_each_has",),
    ),
)

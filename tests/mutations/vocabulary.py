"""Defects of embedding and head that ranks split by vocabulary. A wrong slice shows at some tokens alone."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CHOICE = ("tests/models/test_vocabulary.py",)
TEXTS = ("tests/parallel/test_vocabulary_ranks.py::test_ranks_that_split_the_vocabulary_give_the_text_of_one",)
DRAFTS = ("tests/parallel/test_vocabulary_ranks.py::test_drafts_are_those_that_one_process_proposes",)
ROWS = ("tests/parallel/test_shards.py::test_ranks_that_split_the_vocabulary_hold_their_rows",)
RULE = ("tests/parallel/test_vocabulary_ranks.py::test_a_small_vocabulary_stays_on_rank_0",)

VOCABULARY = "dflash_backend/models/vocabulary.py"

VOCABULARY_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/sample.py",
        CHOICE,
        (
            "a rank takes the noise of the ids within its slice",
            "sample_reference(values, temperature, seeds, positions, token_ids=token_ids)",
            "sample_reference(values, temperature, seeds, positions)",
        ),
        (
            "a score has the noise of a column of the slice",
            "positions[sampled], token_ids[columns[sampled], None]",
            "positions[sampled], columns[sampled, None]",
        ),
    ),
    *mutants_of(
        VOCABULARY,
        CHOICE,
        (
            "of equal scores the last rank's wins",
            "columns[:, :, 0].argmax(axis=1)",
            "columns.shape[1] - 1 - columns[:, ::-1, 0].argmax(axis=1)",
        ),
        (
            "log-odds are those within a slice",
            "np.logaddexp.reduce(columns[:, :, 3], axis=1)",
            "columns[rows, winner, 3]",
        ),
    ),
    *mutants_of(
        VOCABULARY,
        TEXTS,
        (
            "a rank gives the column of its slice for the id",
            "found = [scores, token_ids[columns]]",
            "found = [scores, columns]",
        ),
        ("padding of a narrow slice counts as tokens", "[part[:, : len(own)] for part", "[part for part"),
    ),
    *mutants_of(
        VOCABULARY,
        DRAFTS,
        ("ranks leave out what a drafter does to its logits", "if task.form is not None:", "if False:"),
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
        "filters are left out where the vocabulary is split",
        "dflash_backend/worker/step_ops.py",
        "if logits_filter.any_filters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p):",
        "if False:",
        TEXTS,
    ),
    *mutants_of(
        "dflash_backend/models/filtered_choice.py",
        CHOICE,
        (
            "what a slice leaves out is taken for filtered",
            "decided & is_number & has_score & ((lowest > border) | ~left_out.any())",
            "decided & is_number & has_score",
        ),
        ("ties that a slice leaves out are forgotten", "((lowest > border) |", "((lowest >= border) |"),
        ("top-p is cut however close a sum is", "decided &= ~by_sum | ~is_close.any(dim=1)", "pass"),
        (
            "large logits are divided by the temperature in another precision",
            "(ordered / torch.where(sampled, temperature, 1.0)[:, None]).double()",
            "ordered.double() / torch.where(sampled, temperature, 1.0)[:, None]",
        ),
        (
            "a slice adds its probabilities as logarithms in float32",
            "(scaled - largest.masked_fill(largest.isneginf(), 0.0)).exp_().sum(dim=1, dtype=torch.float64).log()",
            "scaled.logsumexp(dim=1) - largest[:, 0]",
        ),
        (
            "a slice divides by the temperature in bfloat16",
            "scaled = values / torch.where(temperature > 0.0, temperature, 1.0)[:, None]",
            "scaled = logits / torch.where(temperature > 0.0, temperature, 1.0)[:, None].to(logits.dtype)",
        ),
        ("a slice without tokens has no sum", "largest.masked_fill(largest.isneginf(), 0.0)", "largest"),
        (
            "top-p is a part of what is here",
            "torch.where(is_filtered, weights.sum(dim=1), total)",
            "weights.sum(dim=1)",
        ),
        ("of equal scores the first slice's is not taken", "slices[-1].stop).amin(dim=1)", "-1).amax(dim=1)"),
    ),
    Mutant(
        "rows that a few logits do not decide are taken as they are",
        VOCABULARY,
        "if (decided | ~has_filters).all():",
        "if True:",
        ("tests/benchmarks/test_vocabulary_split.py",),
    ),
    Mutant(
        "masks of grammars are left out where the vocabulary is split",
        "dflash_backend/worker/step.py",
        "not isinstance(logits, torch.Tensor) and grammars is None:",
        "not isinstance(logits, torch.Tensor):",
        ("tests/parallel/test_vocabulary_ranks.py::test_a_grammar_holds_for_ranks_that_split_the_vocabulary",),
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
        CHOICE,
    ),
    Mutant(
        "a slice is read row by row",
        "dflash_backend/checkpoints/quantization/slices.py",
        "if found and sum(found[-1]) == part:",
        "if False:",
        ("tests/parallel/test_shards.py::test_a_slice_of_rows_is_read_at_once",),
    ),
    Mutant(
        "the other ranks' slices of logits depend on the batch",
        "dflash_backend/parallel/rank.py",
        "ops=select_ops(device, wanted_ops, needs.batch_invariant)",
        "ops=select_ops(device, wanted_ops, False)",
        ("tests/parallel/test_vocabulary_ranks.py::test_text_depends_neither_on_the_batch_nor_on_what_is_gathered",),
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
        "whole.view(-1)[first : first + step] = term",
        "whole.view(-1)[: len(term)] = term",
        ("tests/parallel/test_sums.py::test_rank_0_alone_gets_what_each_has",),
    ),
)

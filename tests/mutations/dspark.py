"""Defects of the DSpark drafter, and of drafts that come from the anchor: each stays lossless, and would show as lower
acceptance of a trained drafter, or as drafts that are left out though they would have been accepted."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

BASE = "dflash_backend/drafters/base.py"
DSPARK = "dflash_backend/drafters/dspark"
STEP, PREPARE = "kernels/dflash_kernels/markov_step.py", "kernels/dflash_kernels/prepare_draft.py"
ORACLE = ("tests/oracle/test_dspark.py",)
DENSE = "tests/drafters/test_dspark.py::"
READ = "tests/drafters/test_dspark_config.py::"
STEPPED = ("tests/kernels/test_markov_step.py",)
NOISY = (DENSE + "test_noise_is_that_of_each_drafts_own_position_and_of_the_targets_ids",)
SURE = (DENSE + "test_a_confidence_head_reads_the_token_that_was_drafted_before",)
QUERIES = ("tests/worker/test_step_ops.py::test_the_drafter_runs_anchor_and_masks_of_the_rows_that_draft",)
EXACT = ("tests/worker/test_step_ops.py::test_a_cpu_runs_the_queries_that_are_no_padding_and_stores_the_same",)

DSPARK_MUTANTS = (
    *mutants_of(
        f"{DSPARK}/drafter.py",
        ORACLE,
        (
            "the anchor stands before every draft of a Markov head",
            "tokens[drafts] = previous = found.token_ids",
            "tokens[drafts] = found.token_ids",
        ),
        (
            "the Markov head reads draft ids of a reduced vocabulary",
            "tokens[drafts] = previous = found.token_ids",
            "tokens[drafts], previous = found.token_ids, biased.argmax(dim=-1)",
        ),
        (
            "the first mask query's token stands before the first draft of a Markov head",
            "previous = queries.token_ids[queries.row_starts()[:-1]]",
            "previous = queries.token_ids[queries.row_starts()[:-1] + 1]",
        ),
        (
            "drafts are chosen without the Markov bias",
            "sampler.at(drafts).choose(biased,",
            "sampler.at(drafts).choose(logits[drafts],",
        ),
        (
            "the confidence head reads the draft in place of the token before",
            "before[drafts] = previous",
            "before[drafts] = found.token_ids",
        ),
        (
            "the confidence head reads the anchor before every draft",
            "before[drafts] = previous",
            "before[drafts] = queries.token_ids[queries.row_starts()[:-1]]",
        ),
        (
            "a block that drafts from the anchor has a query too many",
            "self.lookahead_base = 0 if self.model.spec.from_anchor else 1",
            "self.lookahead_base = 1",
        ),
        (
            "a recurrent head takes no step at an anchor that does not draft",
            "if state is None or queries.from_anchor:",
            "if True:",
        ),
        (
            "a confidence head is not asked",
            "        if head is None or not asked:\n",
            "        if True:\n",
        ),
    ),
    Mutant(
        "a Markov bias has another scale than the logits",
        f"{DSPARK}/drafter.py",
        "markov.bias(latent) if scale == 1 else markov.bias(latent) * scale",
        "markov.bias(latent)",
        (DENSE + "test_drafts_equal_a_dense_implementation_after_any_acceptance",),
    ),
    *mutants_of(
        f"{DSPARK}/drafter.py",
        ORACLE,
        (
            "a gate takes the token before for the output",
            "hidden, weight = joint.weight.split([size, rank], dim=1)",
            "weight, hidden = joint.weight.split([rank, size], dim=1)",
        ),
        (
            "a recurrent head takes the output for its state",
            "weight, hidden = joint.weight.split([2 * rank, size], dim=1)",
            "hidden, weight = joint.weight.split([size, 2 * rank], dim=1)",
        ),
        (
            "a confidence head takes the token before for the output",
            "torch.cat([hidden, embeddings], dim=1)",
            "torch.cat([embeddings, hidden], dim=1)",
        ),
    ),
    *mutants_of(
        STEP,
        ORACLE,
        (
            "a state and an embedding change places",
            "torch.cat([state, embedding], dim=1)",
            "torch.cat([embedding, state], dim=1)",
        ),
        ("an open gate forgets the state", "gate * state + (1 - gate) * torch", "(1 - gate) * state + gate * torch"),
        ("gate and candidate change places", "gate, candidate, output = joined", "candidate, gate, output = joined"),
    ),
    *mutants_of(
        STEP,
        STEPPED,
        (
            "kernel: an open gate forgets the state",
            "gate * own + (1.0 - gate) * _tanh(candidate)",
            "(1.0 - gate) * own + gate * _tanh(candidate)",
        ),
        (
            "kernel: the candidate has the gate's weights",
            "candidate += _dot(weight_ptr, RANK + out,",
            "candidate += _dot(weight_ptr, out,",
        ),
        (
            "kernel: all rows have the first one's outputs",
            "projected_ptr += row * projected_stride",
            "projected_ptr += 0 * projected_stride",
        ),
    ),
    *mutants_of(
        BASE,
        NOISY,
        (
            "drafts from the anchor have the noise of the position before",
            "return self.positions + 1 if self.from_anchor",
            "return self.positions if self.from_anchor",
        ),
        (
            "drafts at one place have the noise of other requests",
            "seeds=self.seeds[drafts]",
            "seeds=self.seeds[: len(drafts)]",
        ),
        (
            "the last place of a block is not walked to",
            "range(int(lens.max(initial=0)))",
            "range(int(lens.max(initial=1)) - 1)",
        ),
    ),
    *mutants_of(
        PREPARE,
        QUERIES,
        (
            "a drafter that drafts from the anchor is given a query too many",
            "query_lens = np.where(drafts, lens + lookahead_base, 0)",
            "query_lens = np.where(drafts, lens + 1, 0)",
        ),
    ),
    *mutants_of(
        PREPARE,
        QUERIES,
        (
            "kernel: a drafter that drafts from the anchor is given a query too many",
            "query_len = tl.where(drafts, num_next_draft + LOOKAHEAD_BASE, 0)",
            "query_len = tl.where(drafts, num_next_draft + 1, 0)",
        ),
    ),
    Mutant(
        "the bound of a block that drafts from the anchor is one position too high",
        "dflash_backend/worker/step_ops.py",
        "np.maximum(bounds.draft_lens + (lookahead_base - 1), 0)",
        "bounds.draft_lens",
        QUERIES,
    ),
    *mutants_of(
        f"{DSPARK}/config.py",
        (
            READ + "test_a_config_of_deepspec_is_read",
            READ + "test_a_speculators_config_has_the_librarys_defaults_and_says_so",
        ),
        (
            "a block that drafts from the anchor has a draft less",
            "return block_size if from_anchor else block_size - 1",
            "return block_size - 1",
        ),
    ),
    *mutants_of(
        f"{DSPARK}/config.py",
        (READ + "test_who_drafts_first_is_told_by_the_proposal_where_no_field_says_it",),
        ("the anchor drafts where no field says it", "from_anchor = proposed == block_size", "from_anchor = True"),
        ("no anchor drafts where no field says it", "from_anchor = proposed == block_size", "from_anchor = False"),
    ),
    Mutant(
        "DeepSpec's feature of the last layer is taken after the norm",
        f"{DSPARK}/config.py",
        '        "normed_last_layer": False,\n',
        "",
        (READ + "test_the_last_layers_feature_is_taken_before_the_norm",),
    ),
)

"""Defects of the EAGLE-3 drafter, and of drafting pass by pass: each stays lossless, and would show as lower acceptance
of a trained drafter, or as time that is spent on drafts which do not pay."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

BASE = "dflash_backend/drafters/base.py"
EAGLE3 = "dflash_backend/drafters/eagle3"
STEP, STEP_OPS = "dflash_backend/worker/step.py", "dflash_backend/worker/step_ops.py"
ORACLE = ("tests/oracle/test_eagle3.py",)
DENSE = ("tests/drafters/test_eagle3.py::test_drafts_equal_a_dense_implementation_after_any_acceptance",)
NOISY = ("tests/drafters/test_eagle3.py::test_noise_is_that_of_each_drafts_own_position_and_of_the_targets_ids",)
READ = "tests/drafters/test_eagle3_config.py::"
ENGINE = "tests/drafters/test_eagle3_engine.py::"
PADDED = (ENGINE + "test_the_padded_steps_of_a_gpu_have_the_same_drafts",)
FEATURES = ("tests/worker/test_features_before_anchors.py",)

EAGLE3_MUTANTS = (
    *mutants_of(
        BASE,
        ORACLE,
        (
            "the first pass runs at the anchor's position",
            "positions = (anchors + (place - 1)).clamp(min=0)",
            "positions = anchors + place",
        ),
        (
            "the KV of a draft goes to the slot behind its position",
            "self.slots[drafts - 1] if place",
            "self.slots[drafts] if place",
        ),
        (
            "a pass does not see the token that it runs",
            "AttentionBatch(ones, anchors.numpy() + place, tables)",
            "AttentionBatch(ones, anchors.numpy() + place - (place > 0), tables)",
        ),
    ),
    *mutants_of(
        BASE,
        DENSE,
        (
            "rows that still draft read the blocks of others",
            "anchors, tables = anchors[rows], tables[rows]",
            "anchors = anchors[rows]",
        ),
    ),
    *mutants_of(
        BASE,
        PADDED,
        (
            "padded: a pass does not see the token that it runs",
            "ends = (anchors + place) * (device.query_lens > place)",
            "ends = (anchors + place - (place > 0)) * (device.query_lens > place)",
        ),
    ),
    *mutants_of(
        f"{EAGLE3}/drafter.py",
        ORACLE,
        (
            "the next pass reads draft ids of a reduced vocabulary",
            "found[step.drafts] = tokens = chosen.token_ids",
            "found[step.drafts], tokens = chosen.token_ids, self._head(output).argmax(dim=-1)",
        ),
        (
            "d2t is ignored",
            "of_drafts[step.drafts], self.model.id_map)",
            "of_drafts[step.drafts])",
        ),
        (
            "every pass reads the anchor",
            "found[step.drafts] = tokens = chosen.token_ids",
            "found[step.drafts] = chosen.token_ids",
        ),
        (
            "every pass reads the hidden state of the context",
            "output, hidden = self.model.forward(",
            "output, _ = self.model.forward(",
        ),
    ),
    *mutants_of(
        f"{EAGLE3}/drafter.py",
        NOISY,
        (
            "drafts have the noise of the position before",
            "of_drafts = queries.draft_positions()",
            "of_drafts = queries.positions",
        ),
        (
            "drafts of a pass have the noise of other requests",
            "sampler.at(step.drafts).choose(",
            "sampler.at(step.drafts.flip(0)).choose(",
        ),
    ),
    *mutants_of(
        f"{EAGLE3}/drafter.py",
        DENSE,
        (
            "rows that still draft go on from the hidden states of others",
            "hidden, tokens = hidden[step.rows], tokens[step.rows]",
            "hidden, tokens = hidden[: len(step.rows)], tokens[step.rows]",
        ),
        (
            "logit_scale is not applied",
            "return logits if scale == 1 else logits * scale",
            "return logits",
        ),
    ),
    *mutants_of(
        f"{EAGLE3}/drafter.py",
        ORACLE,
        (
            "the next pass reads the final-normed hidden state",
            "output if self.spec.norm_output else hidden",
            "output",
        ),
        (
            "norm_output is not read",
            "output if self.spec.norm_output else hidden",
            "hidden",
        ),
        (
            "norm_before_residual is not read",
            "normed if self.spec.norm_before_residual else hidden",
            "hidden",
        ),
        (
            "the hidden state stands before the embedding",
            "torch.cat([token, normed], dim=1)",
            "torch.cat([normed, token], dim=1)",
        ),
        (
            "context KV is made of the hidden state before its norm",
            "model.layer_input(self._embed(batch.next_token_ids), model.combine(batch.features))",
            "model.layer_input(self._embed(batch.next_token_ids), model.fc(batch.features))",
        ),
    ),
    *mutants_of(
        f"{EAGLE3}/config.py",
        (READ + "test_a_config_is_read", READ + "test_layers_are_named_by_either_convention"),
        (
            "vLLM's layers are read as layer ids",
            '("", "eagle_aux_hidden_state_layer_ids", BOUNDARY)',
            '("", "eagle_aux_hidden_state_layer_ids", LAYER)',
        ),
        (
            "SGLang's layers are read as boundary ids",
            '("eagle_config", "eagle_aux_hidden_state_layer_ids", LAYER)',
            '("eagle_config", "eagle_aux_hidden_state_layer_ids", BOUNDARY)',
        ),
    ),
    Mutant(
        "layers that are not named are one further on",
        f"{EAGLE3}/config.py",
        "ids = (1, num_layers // 2 - 1, num_layers - 4)",
        "ids = (2, num_layers // 2, num_layers - 3)",
        (READ + "test_layers_that_are_not_named_are_those_of_the_target_that_others_take",),
    ),
    *mutants_of(
        STEP_OPS,
        FEATURES,
        (
            "the first pass has the features of the last token of the step before",
            "last = step.batch.query_start + step.batch.num_new + step.num_accepted - 1\n"
            "        return features.index_select",
            "last = step.batch.query_start + step.batch.num_new - 1\n        return features.index_select",
        ),
        (
            "on a CPU the first pass has the features of a position too few",
            "last = step.batch.query_start + step.batch.num_new + step.num_accepted - 1\n        return features[last",
            "last = step.batch.query_start + step.batch.num_new + step.num_accepted - 2\n        return features[last",
        ),
    ),
    Mutant(
        "the blocks of an autoregressive drafter are longer than those that pay",
        "dflash_backend/core/speculation/policy.py",
        "key=lambda each: each[1])[0], 1.0",
        "key=lambda each: each[1])[0], 1.3",
        ("tests/core/test_speculation.py::test_passes_are_paid_for_by_the_row_that_drafts_the_most",),
    ),
    *mutants_of(
        "kernels/dflash_kernels/context_write.py",
        ("tests/kernels/test_kv_writes.py",),
        (
            "kernel: the keys of a drafter without key norms are normed",
            "NORM=k_norm is not None",
            "NORM=True",
        ),
    ),
)

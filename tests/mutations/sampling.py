"""Defects of sampling by the target's own noise. Those of drafts leave every output as it is: only acceptance falls."""

from __future__ import annotations

from tests.mutations.mutant import Mutant

ACCEPT = "kernels/dflash_kernels/accept.py"
DRAFTERS = "dflash_backend/drafters/base.py"
FILTER = "kernels/dflash_kernels/logits_filter.py"
STEP_OPS_FILE = "dflash_backend/worker/step_ops.py"
STEP_OPS = ("tests/worker/test_step_ops.py",)

SAMPLING_MUTANTS = (
    Mutant(
        "all drafts of a row are compared with samples of one noise",
        STEP_OPS_FILE,
        "positions = positions.index_select(0, step.logits_token)",
        "positions = positions[step.logits_token.min()].expand(len(step.logits_token))",
        STEP_OPS,
    ),
    Mutant(
        "the target's noise is that of the position before",
        STEP_OPS_FILE,
        "positions = step.positions + 1",
        "positions = step.positions",
        STEP_OPS,
    ),
    Mutant(
        "the draft's noise is that of the position before",
        DRAFTERS,
        "self.ops.sample(logits, self.temperature, self.seeds, positions, token_ids=token_ids)",
        "self.ops.sample(logits, self.temperature, self.seeds, positions - 1, token_ids=token_ids)",
        STEP_OPS,
    ),
    Mutant(
        "drafts have noise of their own",
        DRAFTERS,
        "self.ops.sample(logits, self.temperature, self.seeds, positions, token_ids=token_ids)",
        "self.ops.sample(logits, self.temperature, self.seeds + 1, positions, token_ids=token_ids)",
        STEP_OPS,
    ),
    Mutant(
        "a draft's noise is that of its id in the draft vocabulary",
        DRAFTERS,
        "self.ops.sample(logits, self.temperature, self.seeds, positions, token_ids=token_ids)",
        "self.ops.sample(logits, self.temperature, self.seeds, positions)",
        STEP_OPS,
    ),
    Mutant(
        "draft ids of a reduced vocabulary are taken for the target's",
        DRAFTERS,
        "return Drafts(chosen if token_ids is None else token_ids[chosen], confidence)",
        "return Drafts(chosen, confidence)",
        (f"{STEP_OPS[0]}::test_a_draft_is_chosen_with_the_noise_by_which_the_target_will_choose",),
    ),
    Mutant(
        "drafts are chosen at temperature 1",
        STEP_OPS_FILE,
        "state.temperature[req_idx] * temperature_ratio",
        "state.temperature[req_idx].sign() * temperature_ratio",
        STEP_OPS,
    ),
    Mutant(
        "a draft has the seed of another row's request",
        STEP_OPS_FILE,
        "np.repeat(batch.req_idx.numpy().astype(np.int64), batch.num_next_draft.numpy())",
        "np.resize(batch.req_idx.numpy().astype(np.int64), int(batch.num_next_draft.sum()))",
        STEP_OPS,
    ),
    Mutant(
        "a row of logits has the parameters of the row before",
        STEP_OPS_FILE,
        "step.batch.req_idx.index_select(0, step.logits_row.clamp(min=0))",
        "step.batch.req_idx.index_select(0, (step.logits_row - 1).clamp(min=0))",
        STEP_OPS,
    ),
    Mutant(
        "min_p is applied before the temperature",
        FILTER,
        "temperature * min_p.log()",
        "min_p.log()",
        ("tests/kernels/test_sampling.py::test_the_filters_see_the_probabilities_at_the_temperature",),
        ((FILTER, "top + temperature * tl.log(min_p)", "top + tl.log(min_p)"),),
    ),
    Mutant(
        "the target's tokens are not filtered",
        STEP_OPS_FILE,
        "self.sample(logits, temperature, state.seeds.index_select(0, index), positions, lowest_kept)",
        "self.sample(logits, temperature, state.seeds.index_select(0, index), positions)",
        ("tests/invariants/test_filtered_sampling.py",),
    ),
    Mutant(
        "one draft more than the target's own is accepted",
        ACCEPT,
        "axis=1).sum(axis=1)",
        "axis=1).sum(axis=1).clip(max=lens - 1).__add__(lens > 0)",
        STEP_OPS,
    ),
    Mutant(
        "the kernel accepts a draft behind a rejected one",
        ACCEPT,
        "count = tl.min(tl.where(rejected, column, num_draft), axis=0)",
        "count = tl.sum((rejected == 0).to(tl.int32), axis=0)",
        STEP_OPS,
    ),
    Mutant(
        "noise does not depend on the token in the kernel's last tile",
        "kernels/dflash_kernels/sample.py",
        "token_ids = offsets.to(tl.int64)",
        "token_ids = (offsets - tile * BLOCK).to(tl.int64)",
        ("tests/kernels/test_sampling.py",),
    ),
)

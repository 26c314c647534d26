"""Defects of padded steps that take prompts beside decode rows."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TESTS = ("tests/worker/test_mixed_steps.py",)

MIXED_STEP_MUTANTS = (
    *mutants_of(
        "dflash_backend/worker/batch.py",
        TESTS,
        ("a chunk that does not end a prompt has logits", "np.where(batch.sample, 0, -1)", "nowhere"),
        (
            "a prompt's tokens leave as much room for drafts as one",
            "num_tokens - int(batch.num_new.sum())",
            "num_tokens - len(nowhere)",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        TESTS,
        (
            "a mixed step has a row's logits for one token",
            "torch.zeros(num_rows * model.decode_query_len, dtype",
            "torch.zeros(num_rows, dtype",
        ),
        (
            "rows of prompts have the bound of decode rows",
            "most = num_tokens if mixed",
            "most = step.decode_query_len if mixed",
        ),
        ("a mixed step drafts where none of its rows does", "and inputs.traits.drafts == drafts", ""),
        ("a mixed step is padded to any size", "<= inputs.num_tokens <= most\n", "<= inputs.num_tokens\n"),
        (
            "steps with few tokens of prompts run without a graph",
            "most = max(MOST_PADDING * num_tokens, CHEAP_TOKENS)",
            "most = max(MOST_PADDING * num_tokens, MIXED_TOKENS[0])",
        ),
        ("chunks that choose nothing pay for logits", "and batch.traits.chooses", ""),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        TESTS,
        (
            "steps with prompts find no graph",
            "if not batch.decode_only:\n            steps",
            "if not batch.decode_only:\n            return None\n            steps",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/attention_merge.py",
        ("tests/kernels/test_attention_launch.py",),
        (
            "few tiles are merged as many are",
            "launch.num_workers >= FEW_TILES_FROM * launch.num_tiles",
            "launch.num_workers < FEW_TILES_FROM * launch.num_tiles",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/attention_schedule.py",
        ("tests/kernels/test_attention_schedule.py::test_the_device_schedules_what_the_reference_does",),
        (
            "tiles that are cut are not merged at their last worker",
            "tl.store(shared_ptr + 2 * most + place, last_worker, mask=is_shared)",
            "tl.store(shared_ptr + 2 * most + place, worker, mask=is_shared)",
        ),
        (
            "workers go through tiles without queries",
            "place = listed + tl.cumsum(there.to(tl.int32), 0)",
            ("there = inside\n        place = 1 + tile"),
        ),
    ),
)

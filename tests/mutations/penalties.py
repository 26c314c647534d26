"""Defects of penalties, and of the counts of tokens that they go by."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNEL_FILE = "kernels/dflash_kernels/penalties.py"
LOGITS = ("tests/worker/test_logits.py",)

PENALTY_MUTANTS = (
    *mutants_of(
        KERNEL_FILE,
        ("tests/kernels/test_penalties.py",),
        (
            "penalties do not count the last token",
            "min(int(positions[entry]), tokens.shape[1])",
            "min(int(positions[entry]) - 1, tokens.shape[1])",
        ),
        (
            "penalties do not count drafts",
            "count[np.searchsorted(ids, drafts[number - 1])] += 1",
            "count[np.searchsorted(ids, drafts[number - 1])] += 0",
        ),
        (
            "tokens are counted anew in each step, on top of those before",
            "all_counted[index] = max(begin, end)",
            "all_counted[index] = 0",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/state.py",
        LOGITS,
        (
            "a request begins with the counts of the one before at its index",
            "                state.token_counts.index_fill_(0, penalised, 0)\n",
            "",
        ),
        (
            "a request takes the tokens of the one before at its index for its own counted ones",
            "                state.num_counted.index_fill_(0, penalised, 0)\n",
            "",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/logits.py",
        LOGITS,
        (
            "penalties leave the last drafts of a row that is not the first",
            "int(num_draft.max())",
            "int(num_draft[0])",
        ),
    ),
    *mutants_of(
        KERNEL_FILE,
        ("tests/kernels/test_penalties.py",),
        ("the kernel counts the draft that a row of logits decides", "range(0, number):", "range(0, number + 1):"),
        ("the kernel counts all tokens anew", "tl.maximum(begin, end).to(tl.int32))", "0)"),
        (
            "the kernel takes tokens of the prompt for output",
            "tl.atomic_add(count, 1, mask=inside & (position >= prompt_len))",
            "tl.atomic_add(count, 1, mask=inside)",
        ),
        (
            "the kernel reads drafts past the end of the tokens",
            "tl.minimum(position + draft, max_len - 1)",
            "position + draft",
        ),
        (
            "the kernel changes logits behind a row's drafts",
            ("    if number > tl.load(numbers_ptr + 3 * num_rows + row):\n        return\n"),
            "",
        ),
    ),
)

"""Defects of rows that ask for more than a graph does."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

WORKER = "dflash_backend/worker"
SPECIAL = ("tests/worker/test_special_rows.py",)

SPECIAL_MUTANTS = (
    *mutants_of(
        f"{WORKER}/logits.py",
        SPECIAL,
        (
            "special tokens are chosen and not put in place",
            "        target_tokens.index_copy_(0, self.flat, tokens)\n",
            "",
        ),
        ("masks are not applied between graphs", "ops.apply_token_bitmask(logits, *masks)", "pass"),
        (
            "the noise of a special row is that of its first position throughout",
            "self.position.index_select(0, of_row) + number",
            "self.position.index_select(0, of_row)",
        ),
        (
            "log-probabilities between graphs are those of masked logits",
            "            self._raw = logits.index_select(0, self.flat)\n",
            "            self._raw = logits\n"
            "            if (masks := None if self._grammars is None else "
            "self._grammars.masks()) is not None:\n"
            "                ops.apply_token_bitmask(logits, *masks)\n"
            "            self._raw = logits.index_select(0, self.flat)\n",
        ),
        ("special rows are greedy", "self._requests.state, self._sampled)", "self._requests.state, False)"),
    ),
    *mutants_of(
        f"{WORKER}/runner.py",
        SPECIAL,
        (
            "a special request takes the others out of their graph",
            "not copies and of_prompt is None else None",
            "not copies and of_prompt is None and special is None else None",
        ),
    ),
    *mutants_of(
        f"{WORKER}/logits.py",
        ("tests/worker/test_runner.py",),
        (
            "special logits of a row in flight begin at the upper bound",
            "torch.where(in_flight > 0, starts, highest)",
            "highest + 0 * (in_flight + starts)",
        ),
    ),
    *mutants_of(
        f"{WORKER}/logits.py",
        ("tests/worker/test_logits.py",),
        (
            "log-probabilities of rejected drafts count as those of the next row",
            "            first += length\n",
            "            first += len(new)\n",
        ),
    ),
)

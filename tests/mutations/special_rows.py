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
            "        target_tokens.index_copy_(0, processors.flat, tokens)\n",
            "",
        ),
        ("masks are not applied between graphs", "ops.apply_token_bitmask(logits, *masks)", "pass"),
        (
            "the noise of a special row is that of its first position throughout",
            "metadata.position.index_select(0, of_row) + number",
            "metadata.position.index_select(0, of_row)",
        ),
        ("log-probabilities between graphs are those of masked logits", "        processors.keep(logits)\n", ""),
        ("special rows are greedy", "self._state, self._sampled)", "self._state, False)"),
    ),
    *mutants_of(
        f"{WORKER}/runner.py",
        SPECIAL,
        (
            "a special request takes the others out of their graph",
            "padded = self.graphs.find(batch) if not copies and of_prompt is None else None",
            "special = LogitsProcessors.of(batch, self.requests) is not None or grammars is not None\n"
            "        padded = self.graphs.find(batch) if not copies and of_prompt is None and not special else None",
        ),
    ),
    *mutants_of(
        f"{WORKER}/logits.py",
        ("tests/worker/test_runner.py",),
        (
            "special logits of a row in flight begin at the upper bound",
            "torch.where(in_flight > 0, requests.state.computed.index_select(0, index) + new, upper)",
            "upper + 0 * (in_flight + new + index)",
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

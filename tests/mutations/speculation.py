"""Defects of the choice of how many tokens each row drafts: outputs stay, only speed is lost."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CORE = "dflash_backend/core"
TESTS = ("tests/core/test_speculation.py", "tests/core/test_speculating_engine.py")

SPECULATION_MUTANTS = (
    *mutants_of(
        f"{CORE}/speculation.py",
        TESTS,
        (
            "a budget goes to drafts that are no prefixes of their rows",
            "(chance, -i, group) for group in groups for i, chance in enumerate(",
            "(1 - chance, -i, group) for group in groups for i, chance in enumerate(",
        ),
        ("drafting is never tried again", "            self._probe(rows, lengths, line)\n", "            pass\n"),
        (
            "the time of a step without drafts is never looked at",
            "if self._wants_trial(len(rows), mean_position, num_other_tokens):",
            "if False:",
        ),
        ("the number of drafts that pays is not remembered", "highest, num_taken = rate, number", "num_taken = number"),
        (
            "prompt tokens of a step are left out",
            "(len(rows), mean_position, num_other_tokens)\n        if line",
            "(len(rows), mean_position, 0)\n        if line",
        ),
        ("the same row probes each time", "self._next_probe = (self._next_probe + num_probing) % num_rows", "pass"),
        ("a request drafts more than its own k", "        return min(row.k, length)", "        return length"),
    ),
    *mutants_of(
        f"{CORE}/acceptance.py",
        TESTS,
        (
            "the estimate is fed with its own prediction",
            "self.accepted[position] += count * (accepted + usual)",
            "self.accepted[position] += count * (chance + usual)",
        ),
        (
            "drafts behind the first that was not accepted count as refused",
            "tried = min(num_accepted + 1, num_draft)",
            "tried = num_draft",
        ),
        (
            "the requests that draft more stand for all",
            "self.accepted[position] += count * (accepted + usual)",
            "self.accepted[position] += count * accepted",
        ),
        ("the level stays", "self.level + gain * surprise", "self.level"),
        ("a request's effect stays", "effect.value += gain *", "effect.value += 0 * gain *"),
    ),
    *mutants_of(
        f"{CORE}/step_costs.py",
        TESTS,
        (
            "drafting is free",
            "self.draft_fixed + self.per_query * num_queries + self.per_drafting_row * num_drafting",
            "0.0",
        ),
        (
            "the time of drafting counts twice",
            "self._target.observe(self._target_features(shape), target_s)",
            "self._target.observe(self._target_features(shape), target_s + draft_s)",
        ),
    ),
    *mutants_of(
        f"{CORE}/step_history.py",
        TESTS,
        (
            "new requests draft k tokens whatever was decided",
            "request.draft_length = self.speculation.first_length(request.speculation)",
            "pass",
        ),
        ("surplus drafts at the end of an answer", "min(length, request.max_useful_drafts)", "length"),
        (
            "the decision does not know of the prompts in its step",
            "(self._num_prefill_tokens if has_prompts else 0)",
            "0",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/pending_context.py",
        ("tests/worker/test_pending_context.py", "tests/worker/test_pause_in_drafting.py"),
        (
            "a full block waits beside others that are not full",
            "% state.block_size).all()",
            "% state.block_size).any()",
        ),
        (
            "context of a full block goes on waiting",
            "if tail is not None and tokens[0].position >= tail:",
            "if tail is not None:",
        ),
        ("context waits though its request drafts", "int(tail[row]) if rests[row] else None", "int(tail[row])"),
        ("the last tokens of a full block wait", "positions.numpy() >= tail[rows])", "positions.numpy() >= 0)"),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_pending_context.py",),
        (
            "context of a request that ended is another's",
            "self.step.pending.drop(",
            "len(self.step.pending._pending) and abs(",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/step.py",
        ("tests/worker/test_pause_in_drafting.py",),
        (
            "no context is written while drafting rests",
            "if self.drafter is not None and verified.features is not None:",
            "if self.drafter is not None and verified.features is not None and inputs.traits.drafts:",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        ("tests/worker/test_graphs.py",),
        (
            "a step that does not draft is taken for rows that do",
            "            and inputs.traits.drafts >= batch.traits.drafts\n",
            "",
        ),
        ("a row's tokens are cut to the width of the step", "            and widest <= inputs.width\n", ""),
    ),
    *mutants_of(
        "dflash_backend/engine/build.py",
        ("tests/test_settings.py",),
        (
            "the setting adaptive_speculation does nothing",
            "adaptive_speculation=config.adaptive_speculation",
            "adaptive_speculation=True",
        ),
    ),
)

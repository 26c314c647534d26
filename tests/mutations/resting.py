"""Defects of what happens while drafting rests: probes, steps that are passed over, context that waits."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CORE = "dflash_backend/core"
TESTS = (
    "tests/core/test_probing.py",
    "tests/core/test_speculation.py",
    "tests/core/test_resting.py",
    "tests/core/test_speculating_engine.py",
)

RESTING_MUTANTS = (
    *mutants_of(
        f"{CORE}/speculation/policy.py",
        TESTS,
        (
            "decisions stay as frequent while drafting rests",
            "max(wait, STEPS_BETWEEN_DECISIONS) if is_known else STEPS_BETWEEN_DECISIONS",
            "STEPS_BETWEEN_DECISIONS",
        ),
        (
            "requests that begin while drafting rests wait for a probe",
            "not row.k or not (is_undecided or (length == 0 and self._num_rows <= FEW_ROWS)):",
            "True:",
        ),
        ("many rows begin with all of k after a rest", "RESUMED_DRAFTS = 4", "RESUMED_DRAFTS = 400"),
        ("few rows begin with few drafts after a rest", "if rested and len(rows) > FEW_ROWS:", "if rested:"),
        (
            "a decision after a rest holds as long as the rest did",
            "STEPS_BETWEEN_DECISIONS if rested else min(",
            "min(",
        ),
        ("a first block is followed by others", "self._has_first_block |= row.is_tried", "pass"),
        (
            "requests that ask for no drafts count as failed first blocks",
            "if not row.k or not (is_undecided",
            "if not (is_undecided",
        ),
        (
            "first blocks of a drafter that fails are all tried",
            "        if self._num_untried < wait:\n            return False\n",
            "",
        ),
        ("a step of a prompt asks anew for a first block", "if row.is_tried is None:", "if True:"),
        (
            "first blocks stay rare though one was accepted",
            "            self._num_failed_first = 0\n            if num_accepted == num_draft:",
            "            if num_accepted == num_draft:",
        ),
        (
            "decisions become as rare while many rows draft",
            "MOST_STEPS_OF_FEW if len(rows) <= FEW_ROWS else STEPS_BETWEEN_DECISIONS",
            "MOST_STEPS_OF_FEW",
        ),
        (
            "what of a probe is accepted waits for the next decision",
            "            self._is_due = True\n",
            "            pass\n",
        ),
        (
            "a request that rests becomes less certain the slower the rarer decisions are",
            "row.effect.drift(num_passed / STEPS_BETWEEN_DECISIONS)",
            "row.effect.drift(1)",
        ),
    ),
    *mutants_of(
        f"{CORE}/speculation/policy.py",
        TESTS,
        ("the same row probes each time", "self._next = (self._next + num_probing) % num_rows", "pass"),
        (
            "probes that fail become ever rarer",
            "min(1 + LATER_BY * self._num_failed, LATEST)",
            "(1 + self._num_failed)",
        ),
        ("probes that fail do not become rarer", "self._num_failed += not self._succeeded", "pass"),
        (
            "probes whose drafts are accepted follow one another for ever",
            "self._succeeded and self._num_in_a_row < MAX_PROBES_IN_A_ROW",
            "self._succeeded",
        ),
        ("probes in a row wait as long as one", "wait * max(self._num_in_a_row, 1)", "wait"),
        (
            "steps without drafts stay as frequent while rows draft",
            "self._wait = min(2 * self._wait, MAX_STEPS_BETWEEN_TRIALS)",
            "pass",
        ),
        (
            "a probe that was accepted is not followed by one",
            "        if self._is_early:\n            return 0\n",
            "",
        ),
    ),
    *mutants_of(
        f"{CORE}/speculation/policy.py",
        TESTS,
        (
            "a prompt goes on to draft though drafting rests by now",
            "                request.draft_length = self.choose_first_block(request.speculation)\n",
            "                pass\n",
        ),
        (
            "no step is taken in while drafting rests",
            "if is_plain and (self._num_plain - 1) % (OBSERVED_EVERY if self._num_plain <= AT_FIRST else LATER_EVERY):",
            "if is_plain:",
        ),
        (
            "behind each probe steps are taken in as often as at first",
            "        if self.pays:\n",
            "        if not is_plain:\n",
        ),
        (
            "each step is taken in while drafting rests",
            "if is_plain and (self._num_plain - 1) % (OBSERVED_EVERY if self._num_plain <= AT_FIRST else LATER_EVERY):",
            "if False:",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/cpu_step.h",
        ("tests/worker/test_pending_context.py", "tests/worker/test_pause_in_drafting.py"),
        (
            "tokens of one step alone are written as they come",
            "!(rests(r) && positions[t] >= tail(r));",
            "true;",
        ),
        (
            "context of a full block goes on waiting",
            "(w.positions[q] < tail(r) || !rests(r))",
            "!rests(r)",
        ),
        (
            "what waited is forgotten where its row goes on",
            "as_they_are = w.counts[requests[r]] == 0;",
            "as_they_are = true;",
        ),
        (
            "context waits though its request drafts",
            "(w.positions[q] < tail(r) || !rests(r))",
            "w.positions[q] < tail(r)",
        ),
        ("the last tokens of a full block wait", "if (!rests(r) || positions[t] < tail(r)) {", "if (!rests(r)) {"),
        ("tokens that waited are written to one slot", "w.slots[request] + i, r);", "w.slots[request], r);"),
        ("a row's tokens wait in one place", "kept + waiting++ * w.bytes", "kept + 0 * waiting++"),
        ("tokens that waited have one position", "w.positions[request] + i, w", "w.positions[request], w"),
    ),
    *mutants_of(
        "dflash_backend/worker/step_ops.py",
        ("tests/worker/test_pending_context.py",),
        ("any number of rows wait", "batch.size <= MAX_WAITING_ROWS", "True"),
        ("all that waits has one position", "first.repeat(counts) + steps * moves", "first.repeat(counts)"),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_pending_context.py",),
        (
            "context of a request that ended is another's",
            "self.model.pending.drop(",
            "abs(",
        ),
        (
            "context of the second request that ended is another's",
            "for request_id in plan.finished_req_ids:\n                    self.model.pending.drop(",
            "for request_id in plan.finished_req_ids[:1]:\n                    self.model.pending.drop(",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/step.py",
        ("tests/worker/test_pause_in_drafting.py",),
        (
            "no context is written while drafting rests",
            "if drafter is not None and features is not None:",
            "if drafter is not None and features is not None and step.traits.drafts:",
        ),
    ),
)

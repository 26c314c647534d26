"""Defects of steps that are planned while another is in flight, and of short requests."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, core_mutant

OVERLAP = "tests/core/test_overlap.py"

OVERLAP_MUTANTS = (
    core_mutant(
        "a result goes to whoever has the id now",
        "engine",
        "            if not self._is_in_progress(request):\n                continue\n            if not row_res",
        "            request = self._requests.get(row.request_id)\n"
        "            if request is None:\n                continue\n            if not row_res",
        OVERLAP,
    ),
    core_mutant(
        "drafts of a dropped result are counted",
        "engine",
        "            if not self._is_in_progress(request):\n                continue\n            if not row_res",
        "            if not self._is_in_progress(request):\n"
        "                self._spec_stats.observe_draft(row.num_draft, row_result.num_accepted + 1)\n"
        "                continue\n            if not row_res",
        OVERLAP,
    ),
    core_mutant(
        "the last step in flight is left there",
        "engine",
        "return bool(self._requests or self._in_flight or self._failed_step)",
        "return bool(self._requests or self._failed_step)",
        OVERLAP,
    ),
    core_mutant(
        "a row that was applied still counts as in flight",
        "engine",
        "if request.row_in_flight is row:",
        "if request.row_in_flight is None:",
        OVERLAP,
    ),
    core_mutant(
        "a row in flight is dropped when the one ahead of it is applied",
        "engine",
        "if request.row_in_flight is row:",
        "if row is not None:",
        OVERLAP,
    ),
    core_mutant(
        "a step waits for the one ahead of it",
        "engine",
        "self._collect_down_to(1 if self._overlap and submitted else 0, outputs)",
        "self._collect_down_to(0, outputs)",
        OVERLAP,
    ),
    core_mutant(
        "a row is planned on the lowest outcome",
        "rows",
        "most = min(fewest + row.num_draft, longest)",
        "most = fewest",
        OVERLAP,
    ),
    core_mutant(
        "the bound takes in outcomes that end the request",
        "rows",
        "most = min(fewest + row.num_draft, longest)",
        "most = fewest + row.num_draft",
        OVERLAP,
    ),
    core_mutant(
        "a row does not say that its start is an upper bound",
        "rows",
        "[], row.num_draft, num_positions)",
        "[], 0, num_positions)",
        OVERLAP,
    ),
    core_mutant(
        "a request that is sure to end is planned",
        "rows",
        "        if fewest > longest:\n            return None\n",
        "        longest = max(longest, fewest)\n",
        OVERLAP,
    ),
    core_mutant(
        "k is judged by the lowest outcome alone",
        "rows",
        "k = next_draft_length(request, most_drafting, num_draft, config)",
        "k = next_draft_length(request, fewest, num_draft, config)",
        OVERLAP,
    ),
    core_mutant(
        "k is judged by the highest outcome alone",
        "rows",
        "    if k == 0 and next_draft_length(request, fewest, num_draft, config) > 0:\n        return None\n",
        "",
        OVERLAP,
    ),
    core_mutant(
        "no lookahead behind the upper bound",
        "rows",
        "num_draft + max(most, most_drafting + config.lookahead(k))",
        "num_draft + most",
        OVERLAP,
    ),
    core_mutant(
        "a request that needs its own output does not wait for it",
        "scheduler",
        "if request.disables_overlap:",
        "if request is None:",
        OVERLAP,
    ),
    core_mutant(
        "a prompt is admitted behind one that a step skips",
        "scheduler",
        "builder.stop_admission.add(request.sampling.tenant)",
        "pass",
        OVERLAP,
    ),
    core_mutant(
        "a request is preempted while a step is in flight",
        "scheduler",
        "                if in_flight:\n                    return False\n",
        "",
        OVERLAP,
    ),
    core_mutant(
        "blocks that ran out are never made good while steps are in flight",
        "scheduler",
        "or (in_flight and self._must_settle):",
        "or (in_flight and not self.running and not self.waiting):",
        OVERLAP,
    ),
    core_mutant(
        "a chunk is planned again while it is in flight",
        "rows",
        "return request.num_computed + (0 if row is None else row.num_new)",
        "return request.num_computed",
    ),
    core_mutant(
        "who did not fit the memory is admitted again at once",
        "scheduler",
        "self._admits_from = plan.step_id + 1 + STEPS_TO_RECOVER",
        "self._admits_from = 0",
        OVERLAP,
    ),
    core_mutant(
        "what is in flight is lost when a step does not fit the memory",
        "engine",
        "self._collect_down_to(0, outputs)  # no request",
        "self._collect_down_to(0, StepOutputs())  # no request",
        OVERLAP,
    ),
    core_mutant(
        "a request that alone does not fit the memory is tried for ever",
        "engine",
        "if was_idle and len(plan.rows) == 1:",
        "if was_idle and len(plan.rows) == 0:",
        OVERLAP,
    ),
)

SHORT_REQUESTS_MUTANTS = (
    Mutant(
        "a short request is taken for one whose stop tokens are hidden",
        "dflash_backend/worker/logits.py",
        "hides = (min_end > 0) & (min_end > batch.start + batch.num_new - batch.num_unverified)",
        "hides = min_end > batch.start + batch.num_new - batch.num_unverified",
        ("tests/worker/test_short_requests.py",),
    ),
)

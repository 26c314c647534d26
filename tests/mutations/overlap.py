"""Defects of steps that are planned while another is in flight."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CORE = "dflash_backend/core"
OVERLAP = ("tests/core/test_overlap.py",)
RANDOM = ("tests/core/test_core_random.py",)

EARLY = ("tests/worker/test_early_tokens.py",)

OVERLAP_MUTANTS = (
    Mutant(
        "on a CPU a step's tokens wait for its drafts",
        "dflash_backend/worker/runner.py",
        "            if self.overlaps:\n                self._draft_part(part)\n",
        "            self._draft_part(part)\n",
        EARLY,
    ),
    Mutant(
        "the engine's process drafts before it sends",
        "dflash_backend/engine/process.py",
        "                outputs = self._core.step()\n",
        "                outputs = self._core.step()\n                self._core.collect_drafts()\n",
        EARLY,
    ),
    *mutants_of(
        "dflash_backend/core/engine.py",
        ("tests/core/test_failed_steps.py",),
        ("blocks are found whose drafting failed", "            self.scheduler.kv.reset_prefix_cache()\n", ""),
    ),
    *mutants_of(
        "dflash_backend/core/kv/groups.py",
        ("tests/core/test_state_snapshots.py",),
        (
            "copies of states are found that were never written",
            "        self._tell_removed(self.snapshots.clear())\n",
            "        pass\n",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_runner.py",),
        (
            "the phases of a step are those of its last part",
            "                if sum(seconds) > sum(phases.values()):\n                    phases",
            "                if True:\n                    phases",
        ),
    ),
    *mutants_of(
        "dflash_backend/core/engine.py",
        ("tests/core/test_engine_core.py",),
        (
            "a request goes on whose drafts say that it cannot",
            "        for request_id, (reason, status) in drafts.errors.items():",
            "        for request_id, (reason, status) in ():",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/logits.py",
        ("tests/worker/test_special_rows.py",),
        (
            "rows choose later whose logits nothing changes",
            "self.replaces_all = self._changes and len(flat)",
            "self.replaces_all = len(flat)",
        ),
    ),
    Mutant(
        "tokens that are chosen later are chosen twice",
        "dflash_backend/worker/runner.py",
        "special is not None and special.replaces_all",
        "False",
        ("tests/worker/test_special_rows.py",),
    ),
    Mutant(
        "the times of the last step are never told",
        "dflash_backend/core/engine.py",
        "        outputs, self._outputs = self._outputs, EngineCoreOutputs()\n        return",
        "        outputs = EngineCoreOutputs()\n        return",
        EARLY,
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        OVERLAP,
        (
            "a result goes to the request that has the id now",
            "                if self._requests.get(request.request_id) is request:\n"
            "                    self._apply(request, row,",
            "                if request.request_id in self._requests:\n"
            "                    self._apply(self._requests[request.request_id], row,",
        ),
        (
            "drafts of a dropped result are counted",
            "                if self._requests.get(request.request_id) is request:\n"
            "                    self._apply(request, row,",
            "                if self._requests.get(request.request_id) is not request:\n"
            "                    accepted = row_result.num_accepted\n"
            "                    self._spec_counts.delivered.observe_draft(row.num_draft, accepted + 1)\n"
            "                else:\n"
            "                    self._apply(request, row,",
        ),
        ("the last step in flight is left there", "self._requests or self._in_flight", "self._requests"),
        (
            "a row that was applied still counts as in flight",
            "if request.row_in_flight is row:",
            "if request.row_in_flight is None:",
        ),
        (
            "a row in flight is dropped when the one ahead of it is applied",
            "if request.row_in_flight is row:",
            "if row is not None:",
        ),
        ("a step waits for the one ahead of it", "1 if self._overlap and submitted else 0, outputs", "0, outputs"),
        (
            "what is in flight is lost when a step does not fit the memory",
            "self._collect_down_to(0, outputs)  # no request",
            "self._collect_down_to(0, EngineCoreOutputs())  # no request",
        ),
        (
            "a request that alone does not fit the memory is tried for ever",
            "elif len(plan.rows) > 1:",
            "elif len(plan.rows) > 0:",
        ),
    ),
    *mutants_of(
        f"{CORE}/request.py",
        OVERLAP,
        ("a row is planned on the lowest outcome", "most = min(fewest + row.num_draft, longest)", "most = fewest"),
        (
            "the bound takes in outcomes that end the request",
            "most = min(fewest + row.num_draft, longest)",
            "most = fewest + row.num_draft",
        ),
        (
            "a row does not say that its start is an upper bound",
            "[], row.num_draft, num_positions)",
            "[], 0, num_positions)",
        ),
        (
            "a request that is sure to end is planned",
            "        if fewest > longest:\n            return None\n",
            "        longest = max(longest, fewest)\n",
        ),
        (
            "k is chosen by the lowest outcome alone",
            "(request, most_drafting, num_draft,",
            "(request, fewest, num_draft,",
        ),
        (
            "k is chosen by the highest outcome alone",
            "    if k == 0 and next_draft_length(request, fewest, num_draft, config, request.draft_length) > 0:\n"
            "        return None\n",
            "",
        ),
        (
            "no lookahead behind the upper bound",
            "num_draft + max(most, most_drafting + config.lookahead[k])",
            "num_draft + most",
        ),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        OVERLAP,
        (
            "a request is preempted while a step is in flight",
            "                if in_flight:\n                    return False\n",
            "",
        ),
        (
            "blocks that ran out are never made good while steps are in flight",
            "or (in_flight and self._must_drain):",
            "or (in_flight and not self.running and not self.waiting):",
        ),
        ("a request that did not fit the memory is admitted again at once", "plan.step_id + 1 + STEPS_TO_RECOVER", "0"),
    ),
    Mutant(
        "a chunk is planned again while it is in flight",
        f"{CORE}/request.py",
        "return request.num_computed + (0 if row is None else row.num_new)",
        "return request.num_computed",
        RANDOM,
    ),
)

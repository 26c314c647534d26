"""Defects of what budgets are thought to cost, and of what drafts without confidences are thought to be worth."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CORE = "dflash_backend/core"
TESTS = ("tests/core/test_budget_cost.py",)

BUDGET_COST_MUTANTS = (
    *mutants_of(
        f"{CORE}/speculation/budget.py",
        TESTS,
        (
            "budgets whose steps took long are never tried again",
            "self._excess -= EXCESS_LOSS * self._excess",
            "pass",
        ),
        ("no step is without a budget where they seem to pay", " and self._num_in_a_row < MOST_IN_A_ROW", ""),
    ),
    Mutant(
        "rows that differ anyway draft past the end of their answers",
        f"{CORE}/speculation/policy.py",
        "len(lengths) > 1 and len(set(lengths)) == 1",
        "len(lengths) > 1",
        TESTS,
    ),
    Mutant(
        "rows that are alike differ near the end of their answers",
        f"{CORE}/speculation/policy.py",
        "length if alike else min(length, request.max_useful_drafts)",
        "min(length, request.max_useful_drafts)",
        TESTS,
    ),
    Mutant(
        "steps without a budget among others are mostly not looked at",
        f"{CORE}/speculation/policy.py",
        "            self.costs.pass_step()\n",
        "",
        TESTS,
    ),
    Mutant(
        "a draft whose confidence is not known is taken for one of a usual confidence",
        f"{CORE}/speculation/acceptance.py",
        "confidences, slopes = np.zeros(usual.shape), self._slopes",
        "confidences, slopes = np.zeros(usual.shape), np.ones(self.k)",
        ("tests/core/test_draft_budget.py",),
    ),
    Mutant(
        "how much longer steps with a budget take is not learned",
        f"{CORE}/speculation/policy.py",
        "if budgeted and self.uneven.cost and 0 <",
        "if budgeted and self.uneven.cost and 1e9 <",
        TESTS,
    ),
    Mutant(
        "steps with a budget are taken for any others",
        f"{CORE}/speculation/policy.py",
        "budgeted = plan.budget is not None and len(plan.rows) > 1",
        "budgeted = False",
        TESTS,
    ),
)

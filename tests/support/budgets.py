"""A scheduler whose steps have budgets that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dflash_backend.core.plan import DraftBudget, ScheduledRequest, SchedulerOutput
from dflash_backend.core.scheduler import Scheduler

Choose = Callable[[Sequence[ScheduledRequest]], DraftBudget | None]


def choose_budgets(scheduler: Scheduler, choose: Choose) -> None:
    """Let `choose` say which drafts of each step's rows are verified, in place of the policy, if there is one."""
    if scheduler.speculation is not None:
        scheduler.speculation.choose_budget = lambda rows, speculating: choose(rows)  # type: ignore[method-assign]
        return
    make_plan = scheduler.plan

    def plan(now: float, in_flight: bool = False) -> SchedulerOutput | None:
        made = make_plan(now, in_flight)
        return None if made is None else replace(made, budget=choose(made.rows))

    scheduler.plan = plan  # type: ignore[method-assign]

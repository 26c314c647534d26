"""Rows and steps of any shape, for the tests of what steps cost and of how many tokens they draft."""

from __future__ import annotations

from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.core.scheduler_config import DrafterWork
from dflash_backend.core.speculation.costs import StepShape

# A drafter with an anchor, which drafts in one pass, and an autoregressive one.
BLOCKS, PASSES = DrafterWork(), DrafterWork(0, autoregressive=True)


def row_of(num_draft: int, num_next: int, num_new: int = 1, num_computed: int = 100) -> ScheduledRequest:
    return ScheduledRequest("r", num_computed, num_new, num_draft, True, num_next, [])


def decode_shape(num_rows: int, num_drafts: int, position: int = 100, work: DrafterWork = BLOCKS) -> StepShape:
    """That of rows of so many drafts each, which draft as many again."""
    rows = [row_of(num_drafts, num_drafts, num_computed=position)] * num_rows
    return StepShape.of(rows, work)

"""What the toy worker checks of a plan as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_backend.core.plan import ScheduledRequest, SchedulerOutput
from dflash_backend.core.scheduler_config import SchedulerConfig


def check_shared(
    plan: SchedulerOutput, work: Sequence[tuple[ScheduledRequest, Any, int]], config: SchedulerConfig
) -> None:
    """Groups of decode rows, apart from one another, each with one prefix of final blocks that all of them have.

    work: each row with what the worker holds of its request, and the row's start.
    """
    end = 0
    for prefix in plan.shared_prefixes:
        assert prefix.first_row >= end
        end = prefix.first_row + prefix.num_rows
        group = work[prefix.first_row : end]
        assert len(group) == prefix.num_rows > 1
        positions = prefix.num_blocks * config.block_size
        assert positions >= config.min_shared_positions > 0
        assert len({tuple(held.block_ids[: prefix.num_blocks]) for _, held, _ in group}) == 1
        for row, held, start in group:
            assert len(held.block_ids) >= prefix.num_blocks
            assert row.num_new == 1, f"{row} is a chunk"
            assert positions <= min(start, held.num_computed)

"""`kv_write_guard`: checks invariant OWN on every KV write of a step, before it happens. Slow, as the setting says:
the host waits for the device in every phase."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_backend.core.plan import ScheduledRequest, SchedulerOutput
from dflash_backend.drafters.base import DraftQueries


class KVWriteError(RuntimeError):
    """A KV write would have gone to a block that its request may not write."""


class WriteGuard:
    """Checks the slots that each row of a step, or of a part of one, is about to write against the blocks that the plan
    lets it write."""

    def __init__(self, plan: SchedulerOutput, rows: Sequence[ScheduledRequest], block_size: int) -> None:
        """`plan.writable_block_ids` must be there."""
        assert plan.writable_block_ids is not None
        self._allowed = [plan.writable_block_ids.get(row.request_id, frozenset()) for row in rows]
        of_windows = plan.writable_window_block_ids or {}
        self._allowed_of_windows = [of_windows.get(row.request_id, frozenset()) for row in rows]
        self._step_id = plan.step_id
        self._block_size = block_size
        self._request_ids = [row.request_id for row in rows]
        # A row in flight may belong to a request that has ended: it may write less than its layout says.
        self._certain = np.array([row.num_unverified_drafts == 0 for row in rows])

    def check(
        self,
        phase: str,
        row_of_slot: torch.Tensor,
        slots: torch.Tensor,
        expected: torch.Tensor | None = None,
        allowed: Sequence[frozenset[int]] | None = None,
    ) -> None:
        """Raise `KVWriteError` for a slot that its row may not write, for one that is written twice, and where a row
        has no block for what it must write (RESERVE).

        row_of_slot: int32 `[n]`, -1 for padding. slots: int64 `[n]`, -1 for no write. expected: int32 `[R]`, how many
        slots each row should write, where that is certain. allowed: the blocks that each row may write; None: those of
        all layers but those with a window that have their own.
        """
        allowed = self._allowed if allowed is None else allowed
        rows, where = row_of_slot.cpu().numpy(), slots.cpu().numpy()
        written = where >= 0
        rows, where = rows[written], where[written]
        if (rows < 0).any():
            self._fail(phase, f"a padding token would write slot {int(where[rows < 0][0])}")
        count = len(self._request_ids)
        if expected is not None:
            lacking = np.bincount(rows, minlength=count)[:count] < expected.cpu().numpy()[:count]
            for row in (lacking & self._certain).nonzero()[0].tolist():
                self._fail(
                    phase,
                    f"request {self._request_ids[row]} has no block for some of the positions that it must write",
                )
        blocks = where // self._block_size
        for row, request_id in enumerate(self._request_ids):
            not_its_own = set(blocks[rows == row].tolist()) - allowed[row]
            if not_its_own:
                self._fail(
                    phase,
                    f"request {request_id} would write block {min(not_its_own)}, which is shared, published or not its "
                    f"own; its own are {sorted(allowed[row])}",
                )
        if len(np.unique(where)) != len(where):
            self._fail(phase, "a slot would be written twice")

    def check_windows(self, row_of_slot: torch.Tensor, slots: torch.Tensor) -> None:
        """`check` for layers with a window that have block ids of their own."""
        self.check("verify, layers with a window", row_of_slot, slots, allowed=self._allowed_of_windows)

    def check_draft(self, draft: DraftQueries, num_next_draft: torch.Tensor, lookahead_base: int) -> None:
        """`check` for the draft phase; num_next_draft: int32 `[R]`, the drafts of each row, for which the drafter
        writes `num_next_draft + lookahead_base` positions."""
        queries = torch.where(num_next_draft > 0, num_next_draft + draft.queries_beside_drafts, 0)
        expected = torch.where(num_next_draft > 0, num_next_draft + lookahead_base, 0)
        rows = torch.arange(len(num_next_draft), dtype=torch.int32, device=num_next_draft.device)
        per_row = queries if draft.layout.device is None else torch.full_like(queries, draft.width)
        self.check("draft", rows.repeat_interleave(per_row), draft.slots, expected)

    def _fail(self, phase: str, what: str) -> None:
        raise KVWriteError(f"kv_write_guard: step {self._step_id}, phase {phase}: {what}")

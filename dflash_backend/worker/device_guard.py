"""`kv_write_guard` for steps on a device: brings the slots to the host before they are written. Used by the device
runner. Slow, as the setting says: the host waits for the device in every phase."""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.core.plan import StepPlan
from dflash_backend.worker.write_guard import KVWriteError, WriteGuard


class DeviceGuard:
    """Checks the K/V writes of one step."""

    def __init__(self, plan: StepPlan, block_size: int) -> None:
        self._guard = WriteGuard(plan, block_size)
        self._step_id = plan.step_id
        self._request_ids = [row.request_id for row in plan.rows]
        # A row in flight may belong to a request that has ended: it may write less than its layout says.
        self._certain = np.array([row.num_unverified_drafts == 0 for row in plan.rows])

    def check(self, phase: str, row_of_slot: torch.Tensor, slots: torch.Tensor, expected: torch.Tensor | None) -> None:
        """See `device_step.Hooks.check`. Raises `KVWriteError` for a slot that the row may not write, for one written
        twice, by whom ever, and where a row has no block for what it must write (RESERVE)."""
        rows, where = row_of_slot.cpu().numpy(), slots.cpu().numpy()
        written = where >= 0
        rows, where = rows[written], where[written]
        if (rows < 0).any():
            raise KVWriteError(
                f"kv_write_guard: step {self._step_id}, phase {phase}: a padding token would write slot "
                f"{int(where[rows < 0][0])}"
            )
        count = len(self._request_ids)
        if expected is not None:
            lacking = np.bincount(rows, minlength=count)[:count] < expected.cpu().numpy()[:count]
            for row in (lacking & self._certain).nonzero()[0].tolist():
                raise KVWriteError(
                    f"kv_write_guard: step {self._step_id}, phase {phase}: request {self._request_ids[row]} has no "
                    "block for some of the positions that it must write"
                )
        self._guard.check(phase, self._request_ids, rows, where)

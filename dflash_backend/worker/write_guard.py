"""`kv_write_guard`: checks invariant OWN on every K/V write of a step, before it happens."""

from __future__ import annotations

import numpy as np

from dflash_backend.core.plan import StepPlan


class KVWriteError(RuntimeError):
    """A K/V write would have gone to a block that its request may not write."""


class WriteGuard:
    """Checks the slots that each row is about to write against the blocks the plan says it may write."""

    def __init__(self, plan: StepPlan, block_size: int) -> None:
        self.allowed = plan.writable_block_ids
        self.step_id = plan.step_id
        self.block_size = block_size

    def check(self, phase: str, request_ids: list[str], rows: np.ndarray, slots: np.ndarray) -> None:
        """Raise `KVWriteError` on the first slot outside its row's blocks, or written twice.

        rows, slots: int64 `[n]`; rows index `request_ids`. Does nothing when the guard is off.
        """
        if self.allowed is None:
            return
        blocks = slots // self.block_size
        for row, request_id in enumerate(request_ids):
            allowed = self.allowed.get(request_id, frozenset())
            strange = set(blocks[rows == row].tolist()) - allowed
            if strange:
                raise KVWriteError(
                    f"kv_write_guard: step {self.step_id}, phase {phase}: request {request_id} would write block "
                    f"{min(strange)}, which is shared, published or not its own; its own are {sorted(allowed)}"
                )
        if len(np.unique(slots)) != len(slots):
            raise KVWriteError(f"kv_write_guard: step {self.step_id}, phase {phase} would write a slot twice")

"""What the layers of both models keep of a request, as the core sees it: groups of layers under one block table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose cache a request addresses with one block table.

    There is one such group: the attention layers of target and drafter (TOGETHER). K and V lie by position, in blocks
    of `block_size` positions. Its commit phase, after a step's drafts are accepted, is empty: K and V of a rejected
    draft lie past `num_computed`, where the next step overwrites them. Layers that keep one state for all positions (a
    recurrence) have the worker's request index for their slot, and their commit is the worker's
    (`models/recurrent_state.py`). A hit needs a copy of their state as well (`state_snapshots.py`).
    """

    block_size: int

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-num_positions // self.block_size)

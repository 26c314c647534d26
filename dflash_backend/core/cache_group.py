"""What the layers of both models keep of a request, as the core sees it: groups of layers under one block table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose cache a request addresses with one block table.

    There is one group: the attention layers of target and drafter (TOGETHER). K and V lie by position, in blocks of
    `block_size` positions. Its commit phase, after a step's drafts are accepted, is empty: K and V of a rejected draft
    lie past `num_computed`, where the next step overwrites them. Layers that keep one state for all positions (a
    recurrence) would be a second group, with a commit that keeps the state behind the last accepted token.
    """

    block_size: int

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-num_positions // self.block_size)

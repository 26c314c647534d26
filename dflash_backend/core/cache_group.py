"""What the layers of both models keep of a request, as the core sees it: groups of layers under one block table
each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose cache a request addresses with one block table.

    This is the group of the attention layers of target and drafter (TOGETHER), but for those in a `WindowGroup`. K and
    V lie by position, in blocks of `block_size` positions. Its commit phase, after a step's drafts are accepted, is
    empty: K and V of a rejected draft lie past `num_computed`, where the next step overwrites them. Layers that keep
    one state for all positions (a recurrence) have the worker's request index for their slot, and their commit is the
    worker's (`models/recurrent_state.py`). A hit needs a copy of their state as well (`state_snapshots.py`).
    """

    block_size: int

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-num_positions // self.block_size)


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The target's layers with a sliding window, under a block table of their own (`window_blocks.py`).

    window: positions that a query sees at most, its own included. max_step_tokens: tokens of a step; max_lookahead:
    positions that a row reserves behind them.
    """

    num_blocks: int
    block_size: int
    window: int
    max_step_tokens: int
    max_lookahead: int

    def first_visible(self, position: int) -> int:
        """Index of the first block that a query at `position`, or behind it, sees."""
        return max(0, position - self.window + 1) // self.block_size

    def first_visible_behind(self, num_blocks: int) -> int:
        """Index of the first block that the first query behind `num_blocks` blocks sees, at most `num_blocks`."""
        return min(num_blocks, self.first_visible(num_blocks * self.block_size))

    @property
    def steady_blocks(self) -> int:
        """Blocks that hold a window, what a row reserves, and the ends of both, wherever blocks begin."""
        return -(-(self.window - 1 + self.max_lookahead) // self.block_size) + 2

    @property
    def most_blocks(self) -> int:
        """Blocks that a request holds at a time at most: before the result of the step in flight is known, those that
        it and the step behind it write are not given back."""
        return self.steady_blocks + -(-2 * self.max_step_tokens // self.block_size)
